// The playground: three modes that share their options.

import { startChat } from "./chat.js";
import { startComplete } from "./complete.js";
import { field } from "./dom.js";
import { showOptionsOf, startOptions } from "./options.js";
import { startRace } from "./race.js";

const MODES = ["chat", "race", "complete"];

let activities;

export function startPlayground() {
  startOptions();
  activities = [startChat(), startRace(), startComplete()];
  field("modes").addEventListener("change", showMode);
  addEventListener("keydown", onKey);
  showMode(); // after a reload, a browser may restore the mode
}

function shownMode() {
  return field("modes").querySelector("input:checked").value;
}

function showMode() {
  for (const mode of MODES) field(mode).hidden = mode !== shownMode();
  showOptionsOf(shownMode());
}

function onKey(event) {
  if (event.key === "Escape") activities.forEach((activity) => activity.stop());
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !field("playground").hidden) {
    event.preventDefault();
    field(shownMode()).querySelector("form").requestSubmit();
  }
}
