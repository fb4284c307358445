// A chart drawn by hand: lines over the last quarter of an hour, and the same in words.

import { draw, make, say } from "./dom.js";
import { span } from "./format.js";
import { KEPT_S } from "./history.js";

const WIDTH = 300;
const HEIGHT = 80;
const HOLE_S = 20;
const WINDOWS_S = [120, 300, 600, KEPT_S]; // a young page begins with a short one

/** A figure with one or two lines: `lines` maps names to `Line`s; `format` writes values. */
export class Chart {
  constructor({ title, lines, format, top = null }) {
    this.title = title;
    this.lines = lines;
    this.format = format;
    this.top = top;
    this.since = make("span");
    this.highest = make("span", { class: "highest" });
    this.values = new Map(Object.keys(lines).map((name) => [name, make("strong")]));
    this.paths = new Map(Object.keys(lines).map((name, at) => [name, draw("path", { class: `line line-${at + 1}` })]));
    this.svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this.svg.append(...[0.5, HEIGHT / 2, HEIGHT - 0.5].map(gridLine), ...this.paths.values());
    this.element = make("figure", { class: "chart" }, this.#caption(), this.#plot(), this.#axis());
  }

  #caption() {
    const legend = [...this.values].map(([name, value], at) =>
      make("span", { class: `legend legend-${at + 1}` }, name ? `${name} ` : "", value),
    );
    return make("figcaption", {}, make("span", { class: "title" }, this.title), ...legend);
  }

  #plot() {
    return make("div", { class: "plot" }, this.svg, this.highest);
  }

  #axis() {
    return make("div", { class: "axis", "aria-hidden": "true" }, this.since, make("span", {}, "now"));
  }

  /** Draw everything up to `now` (seconds). */
  draw(now) {
    const all = Object.values(this.lines);
    const top = this.top ?? rounded(Math.max(...all.map((line) => line.highest)));
    const age = Math.max(...all.map((line) => line.age(now)));
    const window = WINDOWS_S.find((length) => age <= length) ?? KEPT_S;
    for (const [name, line] of Object.entries(this.lines)) {
      this.paths.get(name).setAttribute("d", pathOf(line.points, now, window, top));
      say(this.values.get(name), this.format(line.latest));
    }
    say(this.highest, this.format(top));
    say(this.since, `${span(window)} ago`);
    this.svg.setAttribute("aria-label", this.#inWords());
  }

  #inWords() {
    const said = Object.entries(this.lines).map(
      ([name, line]) => `${name} now ${this.format(line.latest)}, highest ${this.format(line.highest)}`.trim(),
    );
    return `${this.title}: ${said.join("; ")}`;
  }
}

function gridLine(y) {
  return draw("line", { class: "grid", x1: 0, x2: WIDTH, y1: y, y2: y });
}

function pathOf(points, now, window, top) {
  let path = "";
  let last = null;
  for (const { t, value } of points) {
    if (value === null) {
      last = null;
      continue;
    }
    const x = WIDTH * (1 - (now - t) / window);
    const y = HEIGHT - 1 - (HEIGHT - 2) * Math.min(value / top, 1);
    path += `${last === null || t - last > HOLE_S ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    last = t;
  }
  return path;
}

/** The next of 1, 2, 5, 10, 20, ... at or above a value. */
function rounded(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => value <= step * power * (1 + 1e-9));
}
