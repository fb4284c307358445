// Recent decisions: a line each, which opens the receipt.

import { byId, keep, make, say } from "./dom.js";
import { clock, counted, seconds } from "./format.js";
import { openReceipt } from "./receipt.js";

const shown = new WeakMap();

/** Show the latest decisions, the newest first. */
export function showDecisions(decisions) {
  say(byId("decisions-note"), decisions.length ? "Choose one to see why it went there." : "None yet.");
  keep(byId("decisions-list"), decisions, (decision) => decision.exchange_id, create, update);
}

function create() {
  const button = make("button", { type: "button", class: "decision" });
  for (const name of ["time", "to", "model", "result", "id"]) button.append(make("span", { class: name }), " ");
  button.addEventListener("click", () => openReceipt(shown.get(button)));
  return make("li", {}, button);
}

function update(element, decision) {
  const button = element.firstChild;
  shown.set(button, decision);
  const texts = {
    time: clock(decision.decided_at),
    to: decision.candidates[0].node,
    model: decision.model,
    result: resultOf(decision),
    id: decision.request_id ?? "",
  };
  for (const [name, text] of Object.entries(texts)) say(button.querySelector(`.${name}`), text);
  button.dataset.ended = decision.outcome?.ended ?? "running";
}

function resultOf({ outcome, failed_attempts: failed }) {
  if (!outcome) return failed.length ? `running, after ${counted(failed.length, "failed attempt")}` : "running";
  const how = outcome.ended === "complete" ? "" : `${outcome.ended.replace("_", " ")} `;
  const attempts = outcome.attempts > 1 ? `, ${outcome.attempts} attempts` : "";
  return `${how}${seconds(outcome.duration_s)}${attempts}`;
}
