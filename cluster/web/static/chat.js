// A conversation: all of it goes along with each question, and an answer is shown as Markdown or as its tokens.

import { Activity } from "./activity.js";
import { element, field, showFigures } from "./dom.js";
import { markdown } from "./markdown.js";
import { areValid, sampling } from "./options.js";
import { Run, showLegend, showTokens, stream } from "./run.js";

const NEAR_END = 48; // pixels: whoever is this close to the end follows it

let activity;
let turns = []; // questions and answers, oldest first

/** Start the mode; return what stops it. */
export function startChat() {
  activity = new Activity(field("send"), field("chat-stop"), field("chat-status"));
  field("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!activity.isRunning && areValid()) activity.run(ask);
  });
  field("message").addEventListener("keydown", sendOnEnter);
  field("new-chat").addEventListener("click", begin);
  field("show-origins").addEventListener("change", showOrigins);
  showOrigins(); // a browser may restore the box of before a reload
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
    this.content = content;
    this.place.textContent = content;
  }
}

class Answer extends Turn {
  run = new Run();

  constructor() {
    super("assistant");
    this.redraw();
  }

  get content() {
    return this.run.text;
  }

  set isBusy(isBusy) {
    this.shown.setAttribute("aria-busy", isBusy);
  }

  draw() {
    if (field("show-origins").checked) showTokens(this.place, this.run);
    else this.place.replaceChildren(...markdown(this.content));
  }

  redraw() {
    this.place.replaceChildren();
    this.place.classList.toggle("tokens", field("show-origins").checked);
    this.draw();
  }
}

async function ask(signal) {
  const question = new Question(field("message").value);
  const answer = new Answer();
  const body = { messages: messages(question), ...sampling() };
  field("chat-form").reset();
  add(question, answer);
  answer.isBusy = true;
  try {
    await stream(answer.run, "v1/chat/completions", body, signal, () => follow(() => show(answer)));
  } catch (error) {
    if (!answer.content) takeBack(question, answer); // what was stopped within its answer stays
    throw error;
  } finally {
    answer.isBusy = false;
  }
  return [answer.run.ending, "good"];
}

function messages(question) {
  const system = field("system").value.trim();
  const said = [...turns, question].map(({ role, content }) => ({ role, content }));
  return system ? [{ role: "system", content: system }, ...said] : said;
}

function add(...added) {
  turns.push(...added);
  field("messages").append(...added.map((turn) => turn.shown));
  scrollToEnd();
}

/** Give a question that nobody answered back to the box it came from. */
function takeBack(...taken) {
  turns = turns.filter((turn) => !taken.includes(turn));
  for (const turn of taken) turn.shown.remove();
  field("message").value ||= taken[0].content;
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

/** Draw, and stay at the page's end if that is where the reader was. */
function follow(draw) {
  const page = document.scrollingElement;
  const isAtEnd = page.scrollHeight - page.scrollTop - page.clientHeight < NEAR_END;
  draw();
  if (isAtEnd && field("chat").checkVisibility()) scrollToEnd();
}

function scrollToEnd() {
  document.scrollingElement.scrollTop = document.scrollingElement.scrollHeight;
}
