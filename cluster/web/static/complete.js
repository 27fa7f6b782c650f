// A prompt and its completion, with tokens coloured by origin.

import { Activity } from "./activity.js";
import { field, percent, showFigures } from "./dom.js";
import { areValid, sampling } from "./options.js";
import { Run, showLegend, showTokens, stream } from "./run.js";

let activity;

/** Start the mode; return a function that stops it. */
export function startComplete() {
  activity = new Activity(field("generate"), field("stop"), field("run-status"));
  field("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!activity.isRunning && areValid()) activity.run(generate);
  });
  show(new Run());
  return activity;
}

async function generate(signal) {
  const run = new Run();
  const body = { prompt: field("prompt").value, ...sampling() };
  const output = field("output");
  output.replaceChildren();
  output.setAttribute("aria-busy", true);
  try {
    await stream(run, "v1/completions", body, signal, () => show(run));
  } finally {
    output.setAttribute("aria-busy", false);
  }
  return [run.ending, "good"];
}

function show(run) {
  const acceptance = ["draft tokens accepted", percent(run.speculation?.draft_acceptance_rate)];
  showFigures(field("run-figures"), [...run.figures, acceptance]);
  showLegend(field("legend"), run);
  showTokens(field("output"), run);
}
