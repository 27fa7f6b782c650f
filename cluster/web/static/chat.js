// A conversation: every request has all of it; an answer is shown as Markdown or as tokens.

import { Activity } from "./activity.js";
import { element, field, showFigures } from "./dom.js";
import { markdown } from "./markdown.js";
import { areValid, sampling, tools } from "./options.js";
import { Run, showLegend, showTokens, stream } from "./run.js";

const NEAR_END = 48; // pixels from the end of the page: closer, the page follows new text

let activity;
let turns = []; // questions and answers, oldest first

/** Start the mode; return a function that stops it. */
export function startChat() {
  activity = new Activity(field("send"), field("chat-stop"), field("chat-status"));
  field("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!activity.isRunning && areValid()) activity.run(ask);
  });
  field("message").addEventListener("keydown", sendOnEnter);
  field("new-chat").addEventListener("click", begin);
  field("show-origins").addEventListener("change", showOrigins);
  showOrigins(); // after a reload, a browser may restore the check box
  return activity;
}

function sendOnEnter(event) {
  if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.metaKey || event.isComposing) return;
  event.preventDefault();
  field("chat-form").requestSubmit();
}

async function begin() {
  await activity.stop();
  turns = [];
  field("messages").replaceChildren();
  field("chat-figures").replaceChildren();
  showOrigins();
  activity.say("", "good");
  showWhatIsAsked();
  field("message").focus();
}

class Turn {
  constructor(role) {
    this.role = role;
    this.place = element("div", "");
    this.place.className = "content";
    this.shown = element("li", element("span", role));
    this.shown.className = `message ${role}`;
    this.shown.append(this.place);
  }
}

class Question extends Turn {
  constructor(content) {
    super("user");
    this.message = { role: "user", content };
    this.place.textContent = content;
  }
}

/** The result of a call, as typed by the user. */
class Result extends Turn {
  constructor(content, call) {
    super("tool");
    this.message = { role: "tool", content, tool_call_id: call.id };
    this.place.textContent = content;
  }
}

class Answer extends Turn {
  run = new Run();

  constructor() {
    super("assistant");
    this.redraw();
  }

  get message() {
    const { said, wholeCalls } = this.run;
    return { role: "assistant", content: said, ...(wholeCalls.length && { tool_calls: wholeCalls }) };
  }

  set isBusy(isBusy) {
    this.shown.setAttribute("aria-busy", isBusy);
  }

  draw() {
    if (field("show-origins").checked) showTokens(this.place, this.run);
    else this.place.replaceChildren(...shownThought(this.run), ...markdown(this.run.said), ...this.run.calls.map(shownCall));
  }

  redraw() {
    this.place.replaceChildren();
    this.place.classList.toggle("tokens", field("show-origins").checked);
    this.draw();
  }
}

function shownThought(run) {
  if (!run.thought) return [];
  const shown = element("details", element("summary", "thought"));
  shown.open = !run.said && !run.calls.length; // open until there is content
  shown.append(element("p", run.thought));
  return [shown];
}

function shownCall(call) {
  const shown = element("pre", `${call.function.name}(${call.function.arguments})`);
  shown.className = "call";
  return shown;
}

/** Return the calls without results. */
function openCalls() {
  const last = turns.findLastIndex((turn) => turn instanceof Answer);
  return last < 0 ? [] : turns[last].run.wholeCalls.slice(turns.length - last - 1);
}

function showWhatIsAsked() {
  const [call] = openCalls();
  field("message").placeholder = call ? `What ${call.function.name} returns` : "Say something";
}

async function ask(signal) {
  const typed = field("message").value;
  const [call, another] = openCalls();
  const question = call ? new Result(typed, call) : new Question(typed);
  if (another) {
    field("chat-form").reset();
    add(question);
    showWhatIsAsked();
    return [`and what ${another.function.name} returns?`, "good"];
  }
  const answer = new Answer();
  const body = { messages: messages(question), ...sampling() };
  if (tools().length) body.tools = tools();
  field("chat-form").reset();
  add(question, answer);
  answer.isBusy = true;
  try {
    await stream(answer.run, "v1/chat/completions", body, signal, () => follow(() => show(answer)));
  } catch (error) {
    if (!answer.run.tokens.length) takeBack(question, answer); // a partial answer stays
    throw error;
  } finally {
    answer.isBusy = false;
    showWhatIsAsked();
  }
  return [answer.run.ending, "good"];
}

function messages(question) {
  const system = field("system").value.trim();
  const said = [...turns, question].map((turn) => turn.message);
  return system ? [{ role: "system", content: system }, ...said] : said;
}

function add(...added) {
  turns.push(...added);
  field("messages").append(...added.map((turn) => turn.shown));
  scrollToEnd();
}

/** Move an unanswered question back into the input box. */
function takeBack(...taken) {
  turns = turns.filter((turn) => !taken.includes(turn));
  for (const turn of taken) turn.shown.remove();
  field("message").value ||= taken[0].message.content;
}

function show(answer) {
  answer.draw();
  showFigures(field("chat-figures"), answer.run.figures);
  showLegend(field("chat-legend"), answer.run);
}

function showOrigins() {
  const answers = turns.filter((turn) => turn instanceof Answer);
  for (const answer of answers) answer.redraw();
  showLegend(field("chat-legend"), answers.at(-1)?.run ?? new Run());
  field("chat-legend").hidden = !field("show-origins").checked;
}

/** Draw; scroll to the page's end if the reader was there. */
function follow(draw) {
  const page = document.scrollingElement;
  const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END;
  draw();
  if (isAtEnd && field("chat").checkVisibility()) scrollToEnd();
}

function scrollToEnd() {
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}
