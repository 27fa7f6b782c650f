// The generation options of all modes of the playground.

import { field } from "./dom.js";

const WIDE = "(min-width: 60.01rem)"; // as in style.css: in a narrower window, the options are folded

const form = field("options");

/** Show the options that a mode has. */
export function showOptionsOf(mode) {
  for (const part of form.querySelectorAll("[data-modes]")) {
    part.hidden = !part.dataset.modes.split(" ").includes(mode);
    part.querySelector("input, textarea").disabled = part.hidden; // a hidden field is not validated
  }
  showDraftLength();
}

export function startOptions() {
  const fold = field("options-fold");
  fold.open = matchMedia(WIDE).matches;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("invalid", () => (fold.open = true), true); // show the invalid field
  field("speculation").addEventListener("change", showDraftLength);
}

function showDraftLength() {
  const speculation = field("speculation");
  field("draft-length").disabled = !speculation.disabled && !speculation.checked;
}

/** Show an invalid option. */
export function areValid() {
  field("tools").setCustomValidity(field("tools").disabled || tools() ? "" : "This must be a JSON list of tools.");
  return form.reportValidity();
}

/** Return the tools of a chat, [] for none; null if the text is not a JSON list. */
export function tools() {
  const typed = field("tools").value.trim();
  if (!typed) return [];
  try {
    const parsed = JSON.parse(typed);
    return Array.isArray(parsed) ? parsed : null;
  } catch {
    return null;
  }
}

/** Return the options as fields of a request body. */
export function sampling() {
  const body = { max_tokens: Number(field("max-tokens").value), temperature: temperature() };
  if (field("seed").value) body.seed = Number(field("seed").value);
  if (field("draft-length").disabled) body.disable_spec_decode = true;
  else if (field("draft-length").value) body.num_speculative_tokens = Number(field("draft-length").value);
  return body;
}

function temperature() {
  const shown = field("temperature").disabled ? field("race-temperature") : field("temperature");
  return Number(shown.value);
}
