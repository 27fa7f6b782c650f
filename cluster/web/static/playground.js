// The playground: one completion, streamed, each token coloured by where it came from.

import { postForEvents } from "./api.js";
import { NOTHING, element, number, percent, showFigures } from "./dom.js";

const ORIGINS = {
  accepted: "a draft token that was right",
  recovered: "sampled in place of the first rejected draft token",
  bonus: "sampled after a fully accepted draft",
  plain: "sampled without a draft",
};
const FIGURES_INTERVAL_MS = 100;

const field = (id) => document.getElementById(id);

let running = null; // the AbortController of the generation under way

export function startPlayground() {
  field("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) generate();
  });
  field("stop").addEventListener("click", () => running?.abort());
  field("speculation").addEventListener("change", showDraftLength);
  addEventListener("keydown", onKey);
  showDraftLength(); // a browser may restore a box that was ticked before a reload
  showRun(new Run());
}

function onKey(event) {
  if (event.key === "Escape") running?.abort();
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !field("playground").hidden) {
    event.preventDefault();
    field("ask").requestSubmit();
  }
}

function showDraftLength() {
  field("draft-length").disabled = !field("speculation").checked;
}

async function generate() {
  running = new AbortController();
  const run = new Run();
  setRunning(true);
  showStatus("generating…", "good");
  field("output").replaceChildren();
  const timer = setInterval(() => showRun(run), FIGURES_INTERVAL_MS);
  try {
    for await (const event of postForEvents("v1/completions", requestBody(), running.signal)) take(run, event);
    showStatus(ending(run), "good");
  } catch (error) {
    if (error.name === "AbortError") showStatus("stopped", "warn");
    else showStatus(error.message, "bad");
  } finally {
    clearInterval(timer);
    running = null;
    showRun(run);
    setRunning(false);
  }
}

function requestBody() {
  const body = {
    prompt: field("prompt").value,
    max_tokens: Number(field("max-tokens").value),
    temperature: Number(field("temperature").value),
    stream: true,
    return_token_ids: true,
  };
  if (field("seed").value) body.seed = Number(field("seed").value);
  if (!field("speculation").checked) body.disable_spec_decode = true;
  else if (field("draft-length").value) body.num_speculative_tokens = Number(field("draft-length").value);
  return body;
}

/** What is known of one generation. */
class Run {
  startedMs = performance.now();
  firstMs = null;
  lastMs = null;
  numTokens = 0;
  counts = Object.fromEntries(Object.keys(ORIGINS).map((origin) => [origin, 0]));
  speculation = null; // the service's own account, which comes last
  finishReason = null;

  take(tokens) {
    if (!tokens.length) return;
    this.lastMs = performance.now();
    this.firstMs ??= this.lastMs;
    this.numTokens += tokens.length;
    for (const token of tokens) this.counts[token.origin] += 1;
  }

  get tokensPerSecond() {
    return this.numTokens ? (1000 * this.numTokens) / (this.lastMs - this.startedMs) : null;
  }

  get acceptedShare() {
    return this.numTokens ? this.counts.accepted / this.numTokens : null;
  }

  get tokensPerVerification() {
    const numVerifications = this.counts.recovered + this.counts.bonus; // each ends in one of the two
    return numVerifications ? (this.counts.accepted + numVerifications) / numVerifications : null;
  }
}

function take(run, event) {
  run.speculation = event.metrics?.speculative_decoding ?? run.speculation;
  for (const choice of event.choices) {
    run.take(choice.tokens);
    run.finishReason = choice.finish_reason ?? run.finishReason;
    append(choice.tokens);
  }
}

function append(tokens) {
  const output = field("output");
  const isAtEnd = output.scrollHeight - output.scrollTop - output.clientHeight < 8;
  output.append(
    ...tokens.map((token) => {
      const shown = element("span", token.text);
      shown.className = `token ${token.origin}`;
      shown.title = `${token.origin}, token ${token.id}`;
      return shown;
    }),
  );
  if (isAtEnd) output.scrollTop = output.scrollHeight;
}

function showRun(run) {
  const acceptance = run.speculation?.draft_acceptance_rate;
  showFigures(field("run-figures"), [
    ["tokens/s", number(run.tokensPerSecond, 1)],
    ["tokens", run.numTokens],
    ["first token", run.firstMs === null ? NOTHING : `${Math.round(run.firstMs - run.startedMs)} ms`],
    ["of the text from drafts", percent(run.acceptedShare)],
    ["draft tokens accepted", percent(acceptance)],
    ["tokens/verification", number(run.speculation?.mean_acceptance_length ?? run.tokensPerVerification, 2)],
  ]);
  field("legend").replaceChildren(
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

function ending(run) {
  const reason = run.speculation?.disabled_reason;
  return `finished: ${run.finishReason}${reason ? `; speculation off: ${reason}` : ""}`;
}

function showStatus(text, kind) {
  field("run-status").textContent = text;
  field("run-status").dataset.kind = kind;
}

function setRunning(isRunning) {
  const [now, next] = isRunning ? [field("generate"), field("stop")] : [field("stop"), field("generate")];
  next.disabled = false;
  if (document.activeElement === now) next.focus(); // a disabled button would lose the keyboard's place
  now.disabled = true;
  field("output").setAttribute("aria-busy", isRunning);
}
