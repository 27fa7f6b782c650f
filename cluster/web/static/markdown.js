// Markdown as elements: the subset that models write. Everything else stays text; no text becomes markup.

import { element } from "./dom.js";

const MAX_DEPTH = 8; // of nested lists and marks: a model in a loop writes "- - - -" without end
const FENCE = /^( *)(`{3,}|~{3,})[^`]*$/;
const HEADING = /^ {0,3}(#{1,6}) +(.*)$/;
const RULE = /^ {0,3}(-{3,}|\*{3,}|_{3,}) *$/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])(?: +(.*)|)$/;
const FIRST_HEADING = 3; // the page's titles have the levels above
const SCHEMES = ["http", "https"];
const INLINE = new RegExp(
  [
    /\\(?<escaped>[\\`*_[\]()#+\-.!~>|{}])/,
    /(?<!`)(?<ticks>`+)(?!`)(?<code>.+?)(?<!`)\k<ticks>(?!`)/,
    /\[(?<label>[^\]]+)\]\((?<address>[^\s()]+(?:\([^\s()]*\)[^\s()]*)*)\)/,
    /(?<stars>\*{1,3})(?![\s*])(?<starred>.+?)(?<![\s*])\k<stars>(?!\*)/,
    /(?<!\w)(?<lines>_{1,3})(?![\s_])(?<lined>.+?)(?<![\s_])\k<lines>(?!\w)/,
  ]
    .map((part) => part.source)
    .join("|"),
  "gs",
);
const EMPHASIS = [["em"], ["strong"], ["em", "strong"]]; // for one, two and three marks, the innermost first

/** Return the elements of a text, which may end anywhere while it streams. */
export function markdown(text) {
  return blocks(text.split("\n"), 0);
}

function blocks(lines, depth) {
  const rest = [...lines];
  const made = [];
  while (rest.length) {
    if (rest[0].trim()) made.push(takeBlock(rest, depth));
    else rest.shift();
  }
  return made;
}

// Each of these removes its block's lines from the front of `rest`.

function takeBlock(rest, depth) {
  if (FENCE.test(rest[0])) return takeCode(rest);
  if (HEADING.test(rest[0])) return takeHeading(rest);
  if (RULE.test(rest[0])) return takeRule(rest);
  if (ITEM.test(rest[0]) && depth < MAX_DEPTH) return takeList(rest, depth);
  return takeParagraph(rest);
}

function takeCode(rest) {
  const [, indent, fence] = FENCE.exec(rest.shift());
  const isEnd = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  const end = rest.findIndex(isEnd);
  const lines = rest.splice(0, end < 0 ? rest.length : end);
  rest.shift();
  const code = element("pre", element("code", lines.map((line) => dedented(line, indent.length)).join("\n")));
  code.tabIndex = 0; // so that the keyboard can scroll long lines
  return code;
}

function takeHeading(rest) {
  const [, marks, text] = HEADING.exec(rest.shift());
  return holding(`h${Math.min(6, FIRST_HEADING - 1 + marks.length)}`, inline(text));
}

function takeRule(rest) {
  rest.shift();
  return document.createElement("hr");
}

function takeList(rest, depth) {
  const start = ITEM.exec(rest[0])[3];
  const list = document.createElement(start === undefined ? "ul" : "ol");
  if (start !== undefined) list.start = Number(start);
  const continues = (line) => ITEM.test(line) && !RULE.test(line) && !ITEM.exec(line)[3] === !start;
  while (rest.length && continues(rest[0])) list.append(takeItem(rest, depth));
  return list;
}

function takeItem(rest, depth) {
  const [, indent, mark, , text] = ITEM.exec(rest.shift());
  const belongs = (line) => !line.trim() || line.startsWith("\t") || line.startsWith(`${indent}  `);
  const lines = [text ?? ""];
  while (rest.length && belongs(rest[0])) lines.push(dedented(rest.shift(), indent.length + mark.length + 1));
  const [first, ...others] = blocks(lines, depth + 1);
  const opening = first?.tagName === "P" ? first.childNodes : first ? [first] : [];
  return holding("li", [...opening, ...others]);
}

function takeParagraph(rest) {
  const lines = [rest.shift()];
  const ends = (line) => !line.trim() || [FENCE, HEADING, RULE, ITEM].some((block) => block.test(line));
  while (rest.length && !ends(rest[0])) lines.push(rest.shift());
  return holding("p", inline(lines.join("\n").trim()));
}

function dedented(line, width) {
  return line.startsWith("\t") && width ? line.slice(1) : line.replace(new RegExp(`^ {0,${width}}`), "");
}

/** Return a text's nodes and strings. */
function inline(text, depth = 0) {
  if (depth === MAX_DEPTH) return [text];
  const made = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    made.push(text.slice(end, match.index), marked(match, depth + 1));
    end = match.index + match[0].length;
  }
  return [...made, text.slice(end)];
}

function marked({ 0: whole, groups }, depth) {
  if (groups.escaped) return groups.escaped;
  if (groups.code) return element("code", groups.code);
  if (groups.label) return isWeb(groups.address) ? link(groups.address, inline(groups.label, depth)) : whole;
  const marks = groups.stars ?? groups.lines;
  const content = inline(groups.starred ?? groups.lined, depth);
  return EMPHASIS[marks.length - 1].reduce((held, tag) => [holding(tag, held)], content)[0];
}

function isWeb(address) {
  return URL.canParse(address) && SCHEMES.includes(new URL(address).protocol.slice(0, -1));
}

function link(address, content) {
  const made = holding("a", content);
  made.href = address;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  return made;
}

/** Make an element of nodes and of strings, which stay text. */
function holding(tag, content) {
  const made = document.createElement(tag);
  made.append(...content);
  return made;
}
