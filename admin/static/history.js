// What the charts remember: the last quarter of an hour of each line, and rates out of counters.

export const KEPT_S = 15 * 60;
const RATE_OVER_S = 10;

/** Points `{t, value}` in the order of time, `t` in seconds; a `null` is a hole. */
export class Line {
  points = [];

  add(t, value) {
    this.points.push({ t, value });
    while (this.points[0].t < t - KEPT_S) this.points.shift();
  }

  get latest() {
    return this.points.at(-1)?.value ?? null;
  }

  /** Seconds from the first point until now. */
  age(now) {
    return this.points.length ? now - this.points[0].t : 0;
  }

  get highest() {
    return Math.max(0, ...this.points.map((point) => point.value ?? 0));
  }
}

/** A counter's growth per second over the last ten; `null` until two readings are there. */
export class Rate {
  #read = [];

  next(t, value) {
    if (this.#read.length && value < this.#read.at(-1).value) this.#read = []; // the service began anew
    this.#read.push({ t, value });
    while (this.#read.length > 2 && this.#read[1].t <= t - RATE_OVER_S) this.#read.shift();
    const [first] = this.#read;
    return t > first.t ? (value - first.value) / (t - first.t) : null;
  }
}

/** A rate for each name. */
export class Rates {
  #rates = new Map();

  next(name, t, value) {
    if (!this.#rates.has(name)) this.#rates.set(name, new Rate());
    return this.#rates.get(name).next(t, value);
  }
}
