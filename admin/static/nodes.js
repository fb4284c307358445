// The nodes: a card each, with a button that drains or restores.

import { byId, keep, make, say } from "./dom.js";
import { UNKNOWN, count, counted, milliseconds, percent, rate, ratio, span } from "./format.js";

const FACTS = ["In flight", "Queued", "Hit ratio", "p99 latency", "Tokens/s", "Requests"];

/** Show the nodes; `act(node, drains)` is what a button does. */
export function showNodes(nodes, tokensPerSecond, act) {
  keep(
    byId("nodes-list"),
    nodes,
    (node) => node.id,
    (node) => card(node, act),
    (element, node) => update(element, node, tokensPerSecond.get(node.id) ?? null),
  );
}

function card(node, act) {
  const button = make("button", { type: "button" });
  const element = make(
    "li",
    { class: "node" },
    make("div", { class: "row" }, make("h3", {}, node.id), make("span", { class: "badge" })),
    make("p", { class: "what" }),
    meter(node.id),
    make("dl", { class: "facts" }, ...FACTS.map(fact)),
    make("p", { class: "problem" }),
    make("p", { class: "models" }),
    button,
  );
  button.addEventListener("click", () => act(node.id, button.dataset.does === "drain"));
  return element;
}

function fact(name) {
  return make("div", {}, make("dt", {}, name), make("dd"));
}

function meter(id) {
  const bar = make("div", {
    class: "meter", role: "meter", "aria-label": `KV cache used on ${id}`, "aria-valuemin": 0, "aria-valuemax": 100,
  }, make("div", { class: "fill" }));
  return make("div", { class: "kv" }, make("span", {}, "KV cache"), bar, make("span", { class: "percent" }));
}

function update(element, node, tokensPerSecond) {
  const find = (selector) => element.querySelector(selector);
  const state = node.drained ? "drained" : node.status;
  element.dataset.state = state;
  say(find(".badge"), node.drained && node.status !== "healthy" ? `drained, ${node.status}` : state);
  say(find(".what"), whatItIs(node));
  fill(find(".kv"), node.kv_cache_used_pct);
  const values = [
    count(node.requests_in_flight), count(node.queue_depth), ratio(node.prefix_hit_ratio),
    milliseconds(node.p99_latency_ms), rate(tokensPerSecond), count(node.requests_total),
  ];
  element.querySelectorAll("dd").forEach((cell, at) => say(cell, values[at]));
  say(find(".problem"), problemOf(node));
  say(find(".models"), node.models.join(", "));
  label(find("button"), node);
}

function whatItIs(node) {
  const weight = node.weight === 1 ? "" : ` · weight ${node.weight}`;
  return `${node.hardware} · ${node.backend}${weight}`;
}

function fill(kv, used) {
  const bar = kv.querySelector(".meter");
  kv.classList.toggle("high", used !== null && used >= 90);
  kv.querySelector(".fill").style.width = `${used ?? 0}%`;
  if (used === null) bar.removeAttribute("aria-valuenow");
  else bar.setAttribute("aria-valuenow", used);
  bar.setAttribute("aria-valuetext", used === null ? "unknown" : percent(used));
  say(kv.querySelector(".percent"), percent(used));
}

function problemOf(node) {
  if (node.drained && node.requests_in_flight) {
    return `${counted(node.requests_in_flight, "request")} still running here.`;
  }
  if (node.status !== "healthy") return node.last_error ?? "";
  if (node.report_age_s === null) return "No fresh report from the engine: routing goes by its hardware.";
  return node.report_age_s > 5 ? `The engine's report is ${span(node.report_age_s)} old.` : "";
}

function label(button, node) {
  const does = node.drained ? "restore" : "drain";
  button.dataset.does = does;
  const text = does === "drain" ? "Drain" : "Restore";
  say(button, text);
  button.setAttribute("aria-label", `${text} ${node.id}`);
  button.title = does === "drain" ? "No new requests; running ones end" : "New requests again";
}

/** Counts for the tiles: how many nodes take requests. */
export function taking(nodes) {
  const open = nodes.filter((node) => !node.drained && node.status !== "offline").length;
  return nodes.length ? `${open} of ${nodes.length}` : UNKNOWN;
}
