// Calls to the gateway. Paths are relative: the service may be under a prefix.

const KEY_ITEM = "outrider-api-key";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export function apiKey() {
  return sessionStorage.getItem(KEY_ITEM) ?? "";
}

export function setApiKey(key) {
  if (key) sessionStorage.setItem(KEY_ITEM, key);
  else sessionStorage.removeItem(KEY_ITEM);
}

/** GET JSON; throws ApiError with the service's text. */
export async function getJson(path, signal) {
  const response = await ask(path, { signal });
  return response.json();
}

/** POST a body, return JSON; throws ApiError with the service's text. */
export async function postJson(path, body, signal) {
  const response = await post(path, body, signal);
  return response.json();
}

/** POST a body, yield the objects of the event stream until [DONE]; throws an error within the stream. */
export async function* postForEvents(path, body, signal) {
  const response = await post(path, body, signal);
  for await (const data of eventData(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message, response.status);
    yield event;
  }
  throw new ApiError("the stream ended early", response.status);
}

function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return ask(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

async function ask(path, options) {
  const headers = { ...options.headers };
  if (apiKey()) headers.Authorization = `Bearer ${apiKey()}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store" });
  if (!response.ok) throw new ApiError(await refusal(response), response.status);
  return response;
}

async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `HTTP ${response.status}`; // not ours: a proxy's page
  }
}

async function* eventData(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let part = await reader.read(); !part.done; part = await reader.read()) {
      const events = (rest + part.value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (event.startsWith("data: ")) yield event.slice("data: ".length); // others are comments
      }
    }
  } finally {
    await reader.cancel();
  }
}
