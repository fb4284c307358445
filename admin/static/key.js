// The admin key: asked for once, tried, and kept for this tab only.

import { ApiError, storedKey, tryKey } from "./api.js";
import { byId, say } from "./dom.js";

const dialog = byId("key-dialog");
const input = byId("key-input");
const problem = byId("key-error");
let settle = () => {};
let changed = () => {};

/** Set up the dialog and the button in the header; `onChange` hears of a new key and of its end. */
export function startKeys(onChange) {
  changed = onChange;
  byId("key-form").addEventListener("submit", submit);
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", closed);
  byId("key-button").addEventListener("click", () => (storedKey.get() ? forgetKey() : askForKey()));
  showButton();
}

/** Ask for the key unless there is one; resolves to whether there is one then. */
export async function needKey() {
  return storedKey.get() !== null || askForKey();
}

/** The service refused the key that was kept. */
export function forgetKey() {
  storedKey.forget();
  showButton();
  changed();
}

function askForKey() {
  say(problem, "");
  dialog.showModal();
  return new Promise((resolve) => (settle = resolve));
}

async function submit(event) {
  event.preventDefault();
  say(problem, "");
  const key = input.value.trim();
  try {
    await tryKey(key);
  } catch (error) {
    say(problem, error instanceof ApiError ? error.message : "A key is printable ASCII.");
    input.select();
    return;
  }
  storedKey.set(key);
  dialog.close();
  showButton();
  changed();
}

function closed() {
  input.value = "";
  settle(storedKey.get() !== null);
}

function showButton() {
  say(byId("key-button"), storedKey.get() ? "Forget admin key" : "Enter admin key");
}
