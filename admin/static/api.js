// Asking the service. The admin key lives in this tab's session storage and goes into one header.

const STORED = "inferact-admin-key";
const HEADER = "x-inferact-admin-key";
const PATIENCE_MS = 4000;

/** An answer that is none; `status` is 0 where nobody answered. */
export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }

  /** Whether another key would help. */
  get isAboutKey() {
    return this.status === 401 || this.status === 403;
  }
}

export const storedKey = {
  get: () => sessionStorage.getItem(STORED),
  set: (key) => sessionStorage.setItem(STORED, key),
  forget: () => sessionStorage.removeItem(STORED),
};

export const getStatus = async () => (await ask("/status")).json();
export const getMetrics = async () => (await ask("/metrics")).text();

export const getDecisions = (limit) => keyed(`/admin/decisions?limit=${limit}`);
export const getDecision = (id) => keyed(`/admin/decisions/${encodeURIComponent(id)}`);
export const drain = (id) => keyed(`/admin/nodes/${encodeURIComponent(id)}/drain`, "POST");
export const restore = (id) => keyed(`/admin/nodes/${encodeURIComponent(id)}/restore`, "POST");
export const getQuarantine = () => keyed("/admin/quarantine");
export const release = (key) => keyed(`/admin/quarantine/${encodeURIComponent(key)}`, "DELETE");

/** Raises `ApiError` unless the service takes the key. */
export async function tryKey(key) {
  await ask("/admin/decisions?limit=1", "GET", key);
}

async function keyed(path, method = "GET") {
  return (await ask(path, method, storedKey.get())).json();
}

async function ask(path, method = "GET", key = null) {
  const headers = key ? { [HEADER]: key } : {};
  let response;
  try {
    response = await fetch(path, { method, headers, cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
  } catch (error) {
    throw new ApiError(reasonOf(error), 0);
  }
  if (!response.ok) throw new ApiError(await messageOf(response), response.status);
  return response;
}

function reasonOf(error) {
  if (error.name === "TimeoutError") return `The service did not answer within ${PATIENCE_MS / 1000} s.`;
  return "The service cannot be reached.";
}

async function messageOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `The service answered with status ${response.status}.`;
  }
}
