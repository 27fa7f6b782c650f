// One generation while it streams, and how it is shown.

import { postForEvents } from "./api.js";
import { NOTHING, element, number, percent } from "./dom.js";

const ORIGINS = {
  accepted: "a draft token that was right",
  recovered: "sampled in place of the first rejected draft token",
  bonus: "sampled after a fully accepted draft",
  plain: "sampled without a draft",
};
const DRAW_INTERVAL_MS = 100;

/** One generation. */
export class Run {
  startedMs = performance.now();
  firstMs = null;
  lastMs = null;
  tokens = []; // {id, text, origin}
  said = ""; // of a chat: the content, without reasoning and calls
  thought = "";
  calls = []; // {id, type, function: {name, arguments}}
  counts = Object.fromEntries(Object.keys(ORIGINS).map((origin) => [origin, 0]));
  speculation = null; // the service's metrics, in the last chunk
  finishReason = null;

  take(event) {
    this.speculation = event.metrics?.speculative_decoding ?? this.speculation;
    for (const choice of event.choices) {
      this.finishReason = choice.finish_reason ?? this.finishReason;
      if (choice.tokens.length) this.#add(choice.tokens);
      this.said += choice.delta?.content ?? "";
      this.thought += choice.delta?.reasoning_content ?? "";
      for (const call of choice.delta?.tool_calls ?? []) this.#grow(call);
    }
  }

  #grow({ index, ...call }) {
    if (index in this.calls) this.calls[index].function.arguments += call.function.arguments;
    else this.calls[index] = call;
  }

  /** Calls with complete arguments. */
  get wholeCalls() {
    return this.calls.filter((call) => isJson(call.function.arguments));
  }

  #add(tokens) {
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.tokens.push(...tokens);
    for (const token of tokens) this.counts[token.origin] += 1;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  get tokensPerSecond() {
    return this.tokens.length ? (1000 * this.tokens.length) / (this.lastMs - this.startedMs) : null;
  }

  get acceptedShare() {
    return this.tokens.length ? this.counts.accepted / this.tokens.length : null;
  }

  get tokensPerVerification() {
    if (this.speculation?.mean_acceptance_length != null) return this.speculation.mean_acceptance_length;
    const numVerifications = this.counts.recovered + this.counts.bonus; // each verification ends with one of the two
    return numVerifications ? (this.counts.accepted + numVerifications) / numVerifications : null;
  }

  get ending() {
    const reason = this.speculation?.disabled_reason;
    if (!this.text) return `the model ended at once, without a word: ${this.finishReason}`;
    return `finished: ${this.finishReason}${reason ? `; speculation off: ${reason}` : ""}`;
  }

  /** (name, figure) pairs. */
  get figures() {
    return [
      ["tokens/s", number(this.tokensPerSecond, 1)],
      ["tokens", this.tokens.length],
      ["first token", this.firstMs === null ? NOTHING : `${Math.round(this.firstMs - this.startedMs)} ms`],
      ["of the text from drafts", percent(this.acceptedShare)],
      ["tokens/verification", number(this.tokensPerVerification, 2)],
    ];
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** POST a body, stream the answer into a run, and draw it at intervals and at the end. */
export async function stream(run, path, body, signal, draw) {
  const timer = setInterval(draw, DRAW_INTERVAL_MS);
  try {
    const asked = { ...body, stream: true, return_token_ids: true };
    for await (const event of postForEvents(path, asked, signal)) run.take(event);
  } finally {
    clearInterval(timer);
    draw();
  }
}

/** Show a run's tokens in their origins' colours; tokens that are shown already stay. */
export function showTokens(place, run) {
  const isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 8;
  place.append(...run.tokens.slice(place.childElementCount).map(shownToken));
  if (isAtEnd) place.scrollTop = place.scrollHeight;
}

function shownToken(token) {
  const shown = element("span", token.text);
  shown.className = `token ${token.origin}`;
  shown.title = `${token.origin}, token ${token.id}`;
  return shown;
}

/** Show the legend, with the number of tokens per origin. */
export function showLegend(list, run) {
  list.replaceChildren(
    ...Object.entries(ORIGINS).map(([origin, meaning]) => {
      const sample = element("span", origin);
      sample.className = `token ${origin}`;
      const item = element("li", sample);
      item.append(` ${run.counts[origin]}`);
      item.title = meaning;
      return item;
    }),
  );
}
