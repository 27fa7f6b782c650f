// The fleet view: polls /load every second while it is visible.

import { getJson } from "./api.js";
import { NOTHING, element, field, number, percent, showFigures, showStatus } from "./dom.js";

const INTERVAL_MS = 1000;
const TIMEOUT_MS = 5000;
const HISTORY_S = 120;
const GAP_S = 4; // a longer time between two answers: the view was hidden
const CHART_HEIGHT = 32; // drawing units; one unit of width is a second
const FULL_KV = 0.9; // above it, preemptions are near
const SHOWN_VERSIONS = 3; // of a learner's
const OLD_SNAPSHOT_S = 3; // the router has missed several intervals

const history = []; // {seconds, rate}, oldest first
let answeredMs = null;
let wake = () => {};

const view = field("fleet");
const status = field("fleet-status");

/** Poll at once, if the view is visible. */
export function wakeFleet() {
  wake();
}

export async function startFleet() {
  document.addEventListener("visibilitychange", wakeFleet);
  for (;;) {
    const woken = new Promise((resolve) => (wake = resolve));
    const isLocked = isWatched() && (await observe());
    const waits = [woken];
    if (isWatched() && !isLocked) waits.push(new Promise((resolve) => setTimeout(resolve, INTERVAL_MS)));
    await Promise.race(waits);
  }
}

function isWatched() {
  return !document.hidden && !view.hidden;
}

/** Poll once and show the answer; return whether polling must wait for another key. */
async function observe() {
  try {
    const load = await getJson("load", AbortSignal.timeout(TIMEOUT_MS));
    answeredMs = performance.now();
    render(load);
    return false;
  } catch (error) {
    const since = answeredMs === null ? "" : `; what follows is ${Math.round((performance.now() - answeredMs) / 1000)} s old`;
    showStatus(status, error.status === 401 ? error.message : `no answer: ${error.message}${since}`, "bad");
    return error.status === 401;
  }
}

function render(load) {
  showAge(load.age_s);
  if (!load.totals) return; // a gateway without a fleet
  showTotals(load.totals);
  showHistory(load.totals.tokens_per_s);
  fill("verifiers", load.verifiers.map(verifierRow));
  fill("drafters", load.drafters.map(drafterRow));
  field("learning").hidden = !load.learners.length;
  fill("learners", load.learners.map(learnerRow));
  const total = load.decisions.reduce((sum, row) => sum + row.count, 0);
  const sorted = [...load.decisions].sort((a, b) => b.count - a.count);
  fill("decisions", sorted.map((row) => decisionRow(row, total)));
}

function showAge(age) {
  if (age == null) showStatus(status, "no word from the router yet", "warn");
  else if (age > OLD_SNAPSHOT_S) showStatus(status, `the router has been silent for ${Math.round(age)} s`, "warn");
  else showStatus(status, "live", "good");
}

function showTotals(totals) {
  showFigures(field("totals"), [
    ["tokens/s", number(totals.tokens_per_s, 1)],
    ["running", totals.num_running],
    ["waiting", totals.num_waiting],
    ["draft sessions", totals.num_draft_sessions],
    ["draft tokens accepted", percent(totals.acceptance_rate)],
    ["tokens/verification", number(totals.mean_acceptance_length, 2)],
  ]);
}

function showHistory(rate) {
  const now = performance.now() / 1000;
  history.push({ seconds: now, rate });
  while (now - history[0].seconds > HISTORY_S) history.shift();
  const peak = Math.max(...history.map((item) => item.rate));
  const place = (item) => ({
    x: (HISTORY_S - (now - item.seconds)).toFixed(2),
    y: (CHART_HEIGHT - 1 - (peak ? item.rate / peak : 0) * (CHART_HEIGHT - 3)).toFixed(2),
  });
  const stretches = unbroken(history).map((items) => items.map(place));
  const lines = stretches.map((points) => `M${points.map(({ x, y }) => `${x},${y}`).join("L")}`);
  const grounds = stretches.map(
    (points, index) => `${lines[index]}L${points.at(-1).x},${CHART_HEIGHT}L${points[0].x},${CHART_HEIGHT}Z`,
  );
  field("history-line").setAttribute("d", lines.join(""));
  field("history-ground").setAttribute("d", grounds.join(""));
  field("history-peak").textContent = `peak ${number(peak, 1)}`;
}

/** Split the history at the times without polling. */
function unbroken(items) {
  const stretches = [];
  items.forEach((item, index) => {
    if (index === 0 || item.seconds - items[index - 1].seconds > GAP_S) stretches.push([]);
    stretches.at(-1).push(item);
  });
  return stretches;
}

function verifierRow(row) {
  const speculation = row.draft_length
    ? badge(`up to ${row.draft_length}`, "good")
    : badge(`off: ${row.disabled_reason ?? NOTHING}`, "warn");
  return [
    row.id,
    stateBadge(row.state),
    row.num_running,
    row.num_waiting ? badge(row.num_waiting, "warn") : 0,
    share(row.kv_usage, FULL_KV),
    number(row.tokens_per_s, 1),
    milliseconds(row.mean_step_s),
    speculation,
    percent(row.acceptance_rate),
    number(row.mean_acceptance_length, 2),
  ];
}

function drafterRow(row) {
  return [
    row.id,
    stateBadge(row.state),
    row.pool,
    row.num_sessions,
    row.queue_depth,
    milliseconds(row.mean_draft_s || null),
    row.num_links_up,
    row.num_circuits_open ? badge(row.num_circuits_open, "bad") : 0,
  ];
}

function learnerRow(row) {
  const drafted = row.versions.filter((version) => version.named_per_round != null).slice(-SHOWN_VERSIONS);
  const named = drafted.map((version) => `${version.name} ${number(version.named_per_round, 2)}`);
  return [
    row.pool,
    badge(row.phase, row.phase === "paused" ? "warn" : "good"),
    row.serving,
    row.num_samples,
    row.num_steps,
    named.join(", ") || NOTHING,
    row.last_event || NOTHING,
  ];
}

function decisionRow(row, total) {
  const reason = row.reason === "none" ? NOTHING : row.reason;
  return [badge(row.decision, row.decision === "on" ? "good" : "warn"), reason, row.count, share(row.count / total)];
}

function fill(tableId, rows) {
  const table = field(tableId);
  table.tBodies[0].replaceChildren(...(rows.length ? rows.map(tableRow) : [emptyRow(table)]));
}

function emptyRow(table) {
  const row = tableRow(["none"]);
  row.cells[0].colSpan = table.tHead.rows[0].cells.length;
  return row;
}

function tableRow(cells) {
  const row = document.createElement("tr");
  cells.forEach((cell, index) => {
    const box = element(index ? "td" : "th", cell);
    if (!index) box.scope = "row";
    row.append(box);
  });
  return row;
}

function badge(text, kind) {
  const made = element("span", text);
  made.className = "badge";
  made.dataset.kind = kind;
  return made;
}

function stateBadge(state) {
  return badge(state, state === "ready" ? "good" : "warn");
}

function share(value, high) {
  const meter = document.createElement("meter");
  meter.value = value;
  if (high !== undefined) meter.high = high;
  const made = element("span", percent(value));
  made.className = "share";
  made.prepend(meter);
  return made;
}

function milliseconds(seconds) {
  return seconds == null ? NOTHING : `${(1000 * seconds).toFixed(1)} ms`;
}
