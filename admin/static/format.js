// Numbers and times as people read them; a dash stands for what nobody knows.

export const UNKNOWN = "–";

const whole = new Intl.NumberFormat("en");

export function count(value) {
  return value == null ? UNKNOWN : whole.format(Math.round(value));
}

/** Three digits at most below a thousand. */
export function rate(value) {
  if (value == null) return UNKNOWN;
  return value >= 100 || value === 0 ? count(value) : String(Number(value.toPrecision(2)));
}

export function percent(value) {
  if (value == null) return UNKNOWN;
  return `${value < 10 ? Number(value.toFixed(1)) : Math.round(value)} %`;
}

export function ratio(value) {
  return percent(value == null ? null : value * 100);
}

/** Three digits and the unit. */
export function seconds(value) {
  if (value == null) return UNKNOWN;
  if (value >= 1000) return `${count(value)} s`;
  if (value >= 0.1 || value === 0) return `${Number(value.toPrecision(3))} s`;
  return `${Number((value * 1000).toPrecision(3))} ms`;
}

export function milliseconds(value) {
  return seconds(value == null ? null : value / 1000);
}

/** A length of time in its two greatest units at most. */
export function span(value) {
  const total = Math.round(value);
  if (total < 60) return `${total} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min`;
  if (total < 86400) return `${Math.floor(total / 3600)} h ${Math.floor((total % 3600) / 60)} min`;
  return `${Math.floor(total / 86400)} d ${Math.floor((total % 86400) / 3600)} h`;
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}

/** A number and its noun: "1 request", "3 requests". */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}
