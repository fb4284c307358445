// The smaller parts: tiles, configuration errors, the queue by priority, the quarantine.

import { byId, keep, make, pairs, say } from "./dom.js";
import { count, span } from "./format.js";
import { taking } from "./nodes.js";

export function showSummary(status) {
  say(byId("about"), `${status.scheduler_version} · up ${span(status.uptime_seconds)}`);
  const running = status.nodes.reduce((total, node) => total + node.requests_in_flight, 0);
  const tiles = [
    ["Nodes taking requests", taking(status.nodes)],
    ["Requests running", count(running)],
    ["Waiting for a node", count(status.queue_depth)],
    ["Routed since start", count(status.total_requests_routed)],
    ["Cache policy in force", status.policy],
  ];
  const list = byId("tiles");
  if (!list.children.length) list.append(...pairs(tiles));
  list.querySelectorAll("dd").forEach((cell, at) => say(cell, tiles[at][1]));
}

export function showErrors(errors) {
  byId("errors").hidden = !errors.length;
  keep(byId("errors-list"), errors, (text) => text, (text) => make("li", {}, text));
}

/** The queue, from samples `{labels: {priority}, value}`; priorities with nobody are left out. */
export function showQueue(samples) {
  const waiting = samples.filter((one) => one.value > 0).sort((a, b) => b.labels.priority - a.labels.priority);
  const most = Math.max(1, ...waiting.map((one) => one.value));
  say(byId("queue-note"), waiting.length ? "10 goes first, 0 last." : "Nothing waits.");
  keep(byId("queue-list"), waiting, (one) => one.labels.priority, queueRow, (row, one) => {
    row.querySelector(".fill").style.width = `${(100 * one.value) / most}%`;
    say(row.querySelector(".number"), count(one.value));
  });
}

function queueRow(one) {
  return make(
    "li",
    {},
    make("span", {}, `Priority ${one.labels.priority}`),
    make("div", { class: "meter", "aria-hidden": "true" }, make("div", { class: "fill" })),
    make("span", { class: "number" }),
  );
}

/** The prompts in quarantine; `letOut(key)` is what a button does. */
export function showQuarantine(prompts, letOut) {
  say(byId("quarantine-note"), prompts.length ? "Prompts that engines died of; no node gets them." : "No prompt is held back.");
  keep(byId("quarantine-list"), prompts, (prompt) => prompt.key, (prompt) => quarantineRow(prompt, letOut), (row, prompt) => {
    say(row.querySelector(".left"), `${prompt.nodes.join(", ")} · ${span(prompt.seconds_left)} left`);
  });
}

function quarantineRow(prompt, letOut) {
  const button = make("button", { type: "button", "aria-label": `Let out ${prompt.key}` }, "Let out");
  button.addEventListener("click", () => letOut(prompt.key));
  const text = make("div", {}, make("code", {}, prompt.key), make("p", { class: "left" }));
  return make("li", { class: "row" }, text, button);
}

/** Without a key (or with keys off) the lists of the admin API stay empty, and say why. */
export function showLocked(reason) {
  for (const name of ["decisions", "quarantine"]) {
    say(byId(`${name}-note`), reason);
    byId(`${name}-list`).replaceChildren();
  }
}

export function showQueueUnknown() {
  say(byId("queue-note"), "The queue by priority is not known: /metrics does not answer.");
  byId("queue-list").replaceChildren();
}

