// A receipt: why a request went to its node, what the others would have cost, and what came of it.

import { byId, make, pairs, say } from "./dom.js";
import { clock, count, seconds } from "./format.js";

const MEANINGS = {
  wait: "until the work ahead of it is done",
  prefill: "the part of the prompt that the node does not hold",
  queue: "what later requests wait for that",
  pressure: "the KV memory that it fills",
  decode: "the answer",
  harm: "what it slows down answers that run there",
};

const dialog = byId("receipt");
let open = null;
byId("receipt-close").addEventListener("click", () => dialog.close());

/** Open the receipt of a decision. */
export function openReceipt(decision) {
  open = decision;
  say(byId("receipt-title"), `Why ${decision.candidates[0].node}`);
  byId("receipt-body").replaceChildren(
    make("p", { class: "why" }, decision.why),
    make("dl", { class: "facts" }, ...pairs(circumstances(decision))),
    ...costs(decision),
    ...leftOut(decision),
    ...prefillLeg(decision),
    make("div", { id: "happened" }, ...happened(decision)),
  );
  dialog.showModal();
  byId("receipt-title").focus();
}

/** Add what happened to the receipt that is open, once one of the decisions tells. */
export function completeReceipt(decisions) {
  const same = decisions.find((one) => one.exchange_id === open?.exchange_id);
  if (!dialog.open || open.outcome || !same?.outcome) return;
  open = same;
  byId("happened").replaceChildren(...happened(same));
}

function circumstances(decision) {
  return [
    ["Request", decision.request_id ?? "none"],
    ["Model", decision.model],
    ["Decided", clock(decision.decided_at)],
    ["Policy", decision.policy],
    ["Prompt, about", `${count(decision.prompt_tokens)} tokens`],
    ["Answer, about", `${count(decision.expected_output_tokens)} tokens`],
    ["First token expected", seconds(decision.predicted_ttft_s)],
    ["Waited in the queue", seconds(decision.waited_s)],
  ];
}

function costs(decision) {
  const terms = Object.keys(decision.candidates[0].terms_s);
  const head = ["Node", "Cost", ...terms, "Held tokens", "Weight", "Role", "Notes"];
  const cells = (one) => [
    seconds(one.cost_s), ...terms.map((term) => seconds(one.terms_s[term])),
    count(one.matched_tokens), String(one.weight), one.role ?? "", one.put_back.join("; "),
  ];
  const row = (one) => make(
    "tr", { class: one.role ?? "other" },
    make("th", { scope: "row" }, one.node, " ", make("small", {}, one.hardware)),
    ...cells(one).map((text) => make("td", {}, text)),
  );
  const table = make(
    "table", {},
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...decision.candidates.map(row)),
  );
  return [
    make("h3", {}, "What each node would have cost"),
    make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Costs of the candidates" }, table),
    make("dl", { class: "terms" }, ...pairs(terms.map((term) => [term, MEANINGS[term] ?? ""]))),
  ];
}

function leftOut(decision) {
  const reasons = decision.excluded.map((one) => make("li", {}, `${one.node}: ${one.reason}`));
  if (decision.more_excluded) reasons.push(make("li", {}, `and ${count(decision.more_excluded)} more`));
  const failed = decision.failed_attempts.map((one) => make("li", {}, `${one.node}: ${one.reason}`));
  return [...section("Left out", reasons), ...section("Failed attempts", failed)];
}

function prefillLeg({ prefill }) {
  if (!prefill) return [];
  const facts = [
    ["Node", prefill.node],
    ["Prompt to compute, about", `${count(prefill.uncached_tokens)} tokens`],
    ["Expected to wait", seconds(prefill.wait_s)],
    ["Expected to compute", seconds(prefill.prefill_s)],
    ["Transfer, expected", seconds(prefill.transfer_s)],
    ["Spared to the decode nodes", seconds(prefill.saved_s)],
    ["Took", seconds(prefill.took_s)],
    ["Failed", prefill.failure?.replace("_", " ") ?? "no"],
  ];
  return [make("h3", {}, "The prompt was computed elsewhere"), make("dl", { class: "facts" }, ...pairs(facts))];
}

function section(title, items) {
  return items.length ? [make("h3", {}, title), make("ul", {}, ...items)] : [];
}

function happened({ outcome }) {
  const title = make("h3", {}, "What happened");
  if (!outcome) return [title, make("p", {}, "The answer is not over yet, or nobody told of its end.")];
  const facts = [
    ["Served by", outcome.node_id],
    ["Ended", outcome.ended.replace("_", " ")],
    ["Status", outcome.status ? String(outcome.status) : "none"],
    ["Attempts", count(outcome.attempts)],
    ["Duration", seconds(outcome.duration_s)],
    ["First token", seconds(outcome.ttft_s)],
    ["Prompt tokens", count(outcome.usage?.prompt_tokens)],
    ["of them cached", count(outcome.usage?.cached_tokens)],
    ["Answer tokens", count(outcome.usage?.output_tokens)],
  ];
  return [title, make("dl", { class: "facts" }, ...pairs(facts))];
}
