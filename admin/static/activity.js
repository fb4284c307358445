// The charts of the fleet, fed by what /status and /metrics say.

import { Chart } from "./chart.js";
import { byId } from "./dom.js";
import { milliseconds, percent, rate } from "./format.js";
import { Line, Rates } from "./history.js";
import { parse } from "./metrics.js";

const PROMPT = "inferact_prompt_tokens_total";
const OUTPUT = "inferact_output_tokens_total";
const QUEUE = "inferact_queue_depth";

const lines = Object.fromEntries(
  ["routed", "running", "waiting", "output", "prompt", "p99", "kvMost", "kvMean", "cached"].map((name) => [name, new Line()]),
);
const rates = new Rates();

const charts = [
  new Chart({ title: "Requests per second", format: rate, lines: { "": lines.routed } }),
  new Chart({ title: "Requests in flight", format: rate, lines: { "on nodes": lines.running, waiting: lines.waiting } }),
  new Chart({ title: "Tokens per second", format: rate, lines: { generated: lines.output, prompt: lines.prompt } }),
  new Chart({ title: "p99 latency", format: milliseconds, lines: { "slowest node": lines.p99 } }),
  new Chart({ title: "KV cache used", format: percent, top: 100, lines: { "fullest node": lines.kvMost, mean: lines.kvMean } }),
  new Chart({ title: "Prompt tokens from cache", format: percent, top: 100, lines: { "": lines.cached } }),
];

export function showCharts() {
  byId("charts").append(...charts.map((chart) => chart.element));
}

export function drawCharts(now) {
  for (const chart of charts) chart.draw(now);
}

/** Remember what /status says of the fleet. */
export function addStatus(now, status) {
  const known = (name) => status.nodes.map((node) => node[name]).filter((value) => value !== null);
  const used = known("kv_cache_used_pct");
  lines.routed.add(now, rates.next("routed", now, status.total_requests_routed));
  lines.running.add(now, sum(known("requests_in_flight")));
  lines.waiting.add(now, status.queue_depth);
  lines.p99.add(now, greatest(known("p99_latency_ms")));
  lines.kvMost.add(now, greatest(used));
  lines.kvMean.add(now, used.length ? sum(used) / used.length : null);
}

/** Remember what /metrics says; returns the queue by priority and each node's generated tokens per second. */
export function addMetrics(now, text) {
  const samples = parse(text, [PROMPT, OUTPUT, QUEUE]);
  const prompt = (source) => sum(samples.get(PROMPT).filter((one) => one.labels.source === source).map((one) => one.value));
  const grown = Object.fromEntries(
    ["cached", "computed", "unknown"].map((source) => [source, rates.next(source, now, prompt(source))]),
  );
  const perNode = new Map(
    samples.get(OUTPUT).map(({ labels, value }) => [labels.node, rates.next(`output ${labels.node}`, now, value)]),
  );
  const told = grown.cached + grown.computed;
  lines.prompt.add(now, grown.cached === null ? null : told + grown.unknown);
  lines.cached.add(now, told > 0 ? (100 * grown.cached) / told : null);
  lines.output.add(now, [...perNode.values()].includes(null) ? null : sum([...perNode.values()]));
  return { queue: samples.get(QUEUE), tokensPerSecond: perNode };
}

const sum = (values) => values.reduce((total, value) => total + value, 0);
const greatest = (values) => (values.length ? Math.max(...values) : null);
