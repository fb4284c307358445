// Reading Prometheus' text format, as far as this page needs it.

const LINE = /^(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** The samples of some metrics: a map from name to a list of `{labels, value}`. */
export function parse(text, names) {
  const samples = new Map(names.map((name) => [name, []]));
  for (const line of text.split("\n")) {
    const [, name, labels, value] = LINE.exec(line) ?? [];
    samples.get(name)?.push({ labels: labelsOf(labels ?? ""), value: Number(value) });
  }
  return samples;
}

function labelsOf(text) {
  return Object.fromEntries([...text.matchAll(LABEL)].map(([, name, value]) => [name, plain(value)]));
}

function plain(value) {
  return value.replace(/\\(.)/g, (_, escaped) => (escaped === "n" ? "\n" : escaped));
}
