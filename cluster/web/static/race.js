// One prompt twice: with speculation off and with speculation on.

import { Activity } from "./activity.js";
import { postJson } from "./api.js";
import { field, showFigures } from "./dom.js";
import { areValid, sampling } from "./options.js";
import { Run, showLegend, showTokens, stream } from "./run.js";

const MAX_SEED = 2 ** 32;

let activity;

/** Start the mode; return a function that stops it. */
export function startRace() {
  activity = new Activity(field("race-start"), field("race-stop"), field("race-status"));
  field("race-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!activity.isRunning && areValid()) activity.run(race);
  });
  for (const lane of newLanes()) lane.draw();
  return activity;
}

function newLanes() {
  return [new Lane("off", { disable_spec_decode: true }), new Lane("on", {})];
}

class Lane {
  run = new Run();

  constructor(speculation, changes) {
    this.speculation = speculation;
    this.changes = changes;
    this.place = field(`lane-${speculation}`);
    this.part("output").replaceChildren();
    this.mark("");
  }

  part(name) {
    return this.place.querySelector(`.${name}`);
  }

  async start(path, body, signal) {
    this.run = new Run(); // starts its clock
    this.part("progress").max = body.max_tokens;
    // a new salt: the prompt is in no prefix cache, and no drafter knows the other lane's text
    const cacheSalt = crypto.getRandomValues(new Uint32Array(4)).join("-");
    const asked = { ...body, ...this.changes, cache_salt: cacheSalt };
    await stream(this.run, path, asked, signal, () => this.draw());
    this.part("progress").value = body.max_tokens; // the text may end earlier
  }

  draw() {
    this.part("progress").value = this.run.tokens.length;
    showFigures(this.part("figures"), this.run.figures);
    showTokens(this.part("output"), this.run);
    if (this.speculation === "on") showLegend(field("race-legend"), this.run);
  }

  mark(text) {
    this.part("badge").textContent = text;
    this.part("badge").hidden = !text;
  }
}

async function race(signal) {
  const lanes = newLanes();
  for (const lane of lanes) lane.draw();
  const { path, ...prompt } = await request(field("race-prompt").value, signal);
  const body = { seed: Math.floor(MAX_SEED * Math.random()), ...sampling(), ...prompt };
  const start = (lane) => lane.start(path, body, signal);
  if (field("race-alone").checked) for (const lane of lanes) await start(lane);
  else await Promise.all(lanes.map(start));
  return verdict(...lanes, body.temperature);
}

/** Return the path and body for a prompt; for a model without a chat template, as a completion. */
async function request(prompt, signal) {
  const messages = [{ role: "user", content: prompt }];
  try {
    await postJson("tokenize", { messages }, signal); // checks the messages without generating
    return { path: "v1/chat/completions", messages };
  } catch (error) {
    if (!error.message.includes("no chat template")) throw error;
    return { path: "v1/completions", prompt };
  }
}

function verdict(off, on, temperature) {
  const isSame = off.run.text === on.run.text;
  const texts = isSame ? "same text" : `texts differ${temperature ? ", as draws may" : ""}`;
  const reason = on.run.speculation?.disabled_reason;
  const unused = reason ? [`the service left speculation off: ${reason}`] : [];
  const isGood = !reason && (isSame || temperature > 0);
  return [[...winner(off, on), texts, ...unused].join("; "), isGood ? "good" : "warn"];
}

/** Mark the faster lane; return a text about it. */
function winner(off, on) {
  const [slow, fast] = [off, on].sort((a, b) => a.run.tokensPerSecond - b.run.tokensPerSecond);
  const ratio = (fast.run.tokensPerSecond / slow.run.tokensPerSecond).toFixed(2);
  if (!slow.run.tokens.length || ratio === "1.00") return ["nobody won"];
  fast.mark(`${ratio} × as fast`);
  return [`speculation ${fast.speculation} won: ${ratio} × as fast`];
}
