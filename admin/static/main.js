// The dashboard: asks the service in turns, shows what it says, and says when it says nothing.

import { addMetrics, addStatus, drawCharts, showCharts } from "./activity.js";
import * as api from "./api.js";
import { showDecisions } from "./decisions.js";
import { byId, say } from "./dom.js";
import { clock, counted, span } from "./format.js";
import { forgetKey, needKey, startKeys } from "./key.js";
import { showNodes } from "./nodes.js";
import { showErrors, showLocked, showQuarantine, showQueue, showQueueUnknown, showSummary } from "./panels.js";
import { completeReceipt, openReceipt } from "./receipt.js";

const STATUS_EVERY_MS = 2000;
const OTHERS_EVERY_MS = 4000;
const OLD_AFTER_S = 7;
const LISTED = 20;
const TOLD_FOR_MS = 12000;

let heardAt = null;
let tokensPerSecond = new Map();
let silence = 0;

const now = () => Date.now() / 1000;

async function readStatus() {
  let status;
  try {
    status = await api.getStatus();
  } catch (error) {
    showAway(error);
    return;
  }
  heardAt = now();
  showAway(null);
  addStatus(heardAt, status);
  showSummary(status);
  showErrors(status.config_errors);
  showNodes(status.nodes, tokensPerSecond, act);
  drawCharts(heardAt);
}

async function readMetrics() {
  try {
    const read = addMetrics(now(), await api.getMetrics());
    tokensPerSecond = read.tokensPerSecond;
    showQueue(read.queue);
  } catch {
    showQueueUnknown();
  }
}

/** Decisions and quarantine, which need the key. */
async function readKeyed() {
  if (!api.storedKey.get()) {
    showLocked("Enter the admin key to see them.");
    return;
  }
  try {
    const [decisions, quarantine] = await Promise.all([api.getDecisions(LISTED), api.getQuarantine()]);
    showDecisions(decisions.decisions);
    completeReceipt(decisions.decisions);
    showQuarantine(quarantine.prompts, letOut);
  } catch (error) {
    if (error.isAboutKey) refused(error);
    else if (error.status) showLocked(error.message);
  }
}

/** Do something that needs the key, and say what came of it. */
async function withKey(deed) {
  if (!(await needKey())) return;
  try {
    tell(await deed());
  } catch (error) {
    if (error.isAboutKey) refused(error);
    else tell(error.message, true);
  }
}

/** The key that was kept is not the service's any more. */
function refused(error) {
  forgetKey();
  tell(`${error.message} Enter it again.`, true);
}

async function act(id, drains) {
  await withKey(async () => {
    const node = await (drains ? api.drain(id) : api.restore(id));
    await readStatus();
    if (!drains) return `${id} takes requests again.`;
    return `${id} is drained; ${counted(node.requests_in_flight, "request")} still running there.`;
  });
}

async function letOut(key) {
  await withKey(async () => {
    await api.release(key);
    await readKeyed();
    byId("quarantine-title").focus();
    return "Nodes may get the prompt again.";
  });
}

async function find(event) {
  event.preventDefault();
  await withKey(async () => {
    openReceipt(await api.getDecision(byId("find-id").value.trim()));
    return "";
  });
}

function tell(text, isProblem = false) {
  byId("said").classList.toggle("problem", isProblem);
  say(byId("said"), text);
  clearTimeout(silence);
  silence = setTimeout(() => say(byId("said"), ""), TOLD_FOR_MS);
}

function showAway(error) {
  const away = byId("away");
  document.body.dataset.state = error ? "away" : "live";
  away.hidden = error === null;
  say(byId("live"), error ? "No connection" : "Live");
  if (error === null) return;
  const since = heardAt === null ? "Nothing is known yet." : `What you see is from ${clock(heardAt)}.`;
  say(away, `${error.message} ${since} Trying again.`);
}

function showAge() {
  const age = heardAt === null ? 0 : now() - heardAt;
  say(byId("age"), heardAt === null ? "" : `${span(age)} ago`);
  if (age > OLD_AFTER_S && document.body.dataset.state === "live") {
    document.body.dataset.state = "old";
    say(byId("live"), "Old data");
  }
}

/** Again and again, each turn a while after the last one ended. */
async function every(ms, task) {
  for (;;) {
    await task();
    await new Promise((resolve) => setTimeout(resolve, ms));
  }
}

startKeys(readKeyed);
showCharts();
byId("find").addEventListener("submit", find);
setInterval(showAge, 1000);
every(STATUS_EVERY_MS, readStatus);
every(OTHERS_EVERY_MS, readMetrics);
every(OTHERS_EVERY_MS, readKeyed);
