// Markdown becomes nodes while it is being written.
//
// A text is a row of blocks. A block that another one follows changes no more, so its nodes stay; only the last one, the
// open block, is built again when more of it has come, and `morph` carries what is new over into the nodes that are there:
// nothing flickers, a selection stays, and the cost of an answer is that of its blocks, not of its length squared.
//
// What is known: headings, paragraphs (a line break is one), quotes, lists (nested, with tasks), tables, fenced code, rules,
// and what inline.js knows. What is not: HTML (shown as written), code by indentation, reference links, headings by `---`,
// which models write as a rule. docs/decisions/0009-page-markdown.md says why this is our own.

import {make} from "./dom.js";
import {highlight} from "./highlight.js";
import {inline} from "./inline.js";

const FENCE = /^( *)(`{3,}|~{3,})[ ]*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?: (.*))?$/;
const RULE = /^ {0,3}(?:(?:- *){3,}|(?:\* *){3,}|(?:_ *){3,})$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const TASK = /^\[([ xX])\] +/;
const UNDERLINE = /^ {0,3}=+ *$/;
const DELIMITERS = /^\|?(?: *:?-+:? *\|)+(?: *:?-+:?)?$|^\| *:?-+:?$/;  // of a line without its margins
const BEGUN = /^ {0,3}(?:[-+*=_>|`~]{1,2}|#{1,6}|\d{1,9}[.)]?|[-+*] \[[ xX]?\]?) *$/;
const DEPTH_MOST = 12;
const FIRST_HEADING = 3;  // the page and its view have the first two levels

export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.open = "";  // source of the open block, and all behind it
    this.kept = 0;  // nodes of `root` that change no more
    this.drawn = 0;  // characters that were parsed: what the drawing costs
  }

  append(text) {
    this.open += text;
  }

  // Show all that was appended. `done`: nothing follows.
  draw(done = false) {
    this.drawn += this.open.length;
    const lines = linesOf(this.open);
    const blocks = blocksOf(lines, 0, !done);
    let closed = 0;
    while (closed < blocks.length - 1 && blocks[closed + 1].from < lines.length - 1) closed += 1;
    const nodes = blocks.map((block, i) => block.node(!done && i === blocks.length - 1));
    morphChildren(this.root, nodes.filter((node) => node !== null), this.kept);
    if (closed && !done) {
      this.kept += nodes.slice(0, closed).filter((node) => node !== null).length;
      this.open = sourceFrom(this.open, blocks[closed].from);
    }
  }
}

// All of a text at once.
export function renderMarkdown(root, text) {
  const view = new MarkdownView(root);
  view.append(text);
  view.draw(true);
}

function linesOf(text) {
  return text.split(/\r\n|\r|\n/).map((line) => (line.includes("\t") ? untabbed(line) : line));
}

// Tabs that indent; others are text.
function untabbed(line) {
  const indent = /^[ \t]*/.exec(line)[0];
  let width = 0;
  for (const mark of indent) width = mark === "\t" ? width + 4 - (width % 4) : width + 1;
  return " ".repeat(width) + line.slice(indent.length);
}

function sourceFrom(text, line) {
  const ends = /\r\n|\r|\n/g;
  for (let i = 0; i < line; i += 1) ends.exec(text);
  return text.slice(ends.lastIndex);
}

// -------------------------------------------------------------------------------------------------------------- blocks
// A block is {from, to, node(open)}: lines, the last one excluded, and what makes its node; null for nothing to show yet.

function blocksOf(lines, depth, open) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (blank(lines[at])) {
      at += 1;
      continue;
    }
    const block = blockAt(lines, at, depth, open);
    found.push(block);
    at = block.to;
  }
  return found;
}

function blockAt(lines, at, depth, open) {
  const line = lines[at];
  if (depth >= DEPTH_MOST) return paragraph(lines, at, depth);
  if (FENCE.test(line)) return fence(lines, at);
  if (HEADING.test(line)) return heading(lines, at);
  if (RULE.test(line)) return {from: at, to: at + 1, node: () => make("hr")};
  if (QUOTE.test(line)) return quote(lines, at, depth);
  if (ITEM.test(line)) return list(lines, at, depth, open);
  if (tableAt(lines, at, open)) return table(lines, at);
  return paragraph(lines, at, depth);
}

const blank = (line) => line.trim() === "";

// Whether a line ends the paragraph before it.
function interrupts(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  if (item) return item[0].length < line.length && (!/\d/.test(item[2]) || parseInt(item[2], 10) === 1);
  return tableAt(lines, at, false);
}

function fence(lines, at) {
  const [, indent, mark, info] = FENCE.exec(lines[at]);
  const end = new RegExp(`^ *${mark[0]}{${mark.length},} *$`);
  let to = at + 1;
  while (to < lines.length && !end.test(lines[to])) to += 1;
  const closed = to < lines.length;
  const inner = lines.slice(at + 1, to).map((line) => line.slice(Math.min(indent.length, line.search(/[^ ]|$/))));
  const language = info.trim().split(/\s+/)[0].replace(/^\{?\.?|\}$/g, "").slice(0, 40);
  const node = (open) => {
    if (open && !closed && inner.length && /^ *(`{1,}|~{1,}) *$/.test(inner.at(-1))) inner.pop();  // its end has begun
    return code(inner.join("\n"), language);
  };
  return {from: at, to: closed ? to + 1 : to, node};
}

function code(text, language) {
  const copy = make("button", "copy quiet", "Copy");
  copy.type = "button";
  const head = make("div", "code-head", make("span", "language", language || "text"), copy);
  const pre = make("pre", "", make("code", "", ...highlight(text, language)));
  pre.tabIndex = 0;
  return make("div", "code", head, pre);
}

function heading(lines, at) {
  const [, marks, text] = HEADING.exec(lines[at]);
  const level = Math.min(6, marks.length + FIRST_HEADING - 1);
  const inner = (text ?? "").trim().replace(/(^| )#+$/, "");
  return {from: at, to: at + 1, node: (open) => titled(level, inner.trim(), open)};
}

function titled(level, text, open) {
  return text || !open ? make(`h${level}`, "", ...inline(text, open)) : null;
}

function paragraph(lines, at, depth) {
  let to = at + 1;
  while (to < lines.length && !blank(lines[to]) && !UNDERLINE.test(lines[to])) {
    if (depth < DEPTH_MOST && interrupts(lines, to)) break;
    to += 1;
  }
  const shown = lines.slice(at, to).map((line) => line.trimStart());
  if (to < lines.length && UNDERLINE.test(lines[to])) {
    return {from: at, to: to + 1, node: () => titled(FIRST_HEADING, shown.join("\n").trimEnd(), false)};
  }
  const node = (open) => {
    const last = lines[lines.length - 1];
    const held = open && to === lines.length && BEGUN.test(last) ? shown.slice(0, -1) : shown;
    const text = held.join("\n").trimEnd();
    return text ? make("p", "", ...inline(text, open)) : null;
  };
  return {from: at, to, node};
}

function quote(lines, at, depth) {
  const inner = [];
  let to = at;
  while (to < lines.length && !blank(lines[to])) {
    if (QUOTE.test(lines[to])) inner.push(lines[to].replace(QUOTE, ""));
    else if (blank(inner.at(-1)) || interrupts(lines, to)) break;
    else inner.push(lines[to]);
    to += 1;
  }
  return {from: at, to, node: (open) => make("blockquote", "", ...nodesOf(inner, depth + 1, open))};
}

function nodesOf(lines, depth, open) {
  const blocks = blocksOf(lines, depth, open);
  return blocks.map((block, i) => block.node(open && i === blocks.length - 1)).filter((node) => node !== null);
}

// --------------------------------------------------------------------------------------------------------------- lists

function list(lines, at, depth, open) {
  const first = ITEM.exec(lines[at]);
  const kind = kindOf(first[2]);
  const items = [];
  let to = at;
  let loose = false;
  for (let next = at; next < lines.length; ) {
    const mark = ITEM.exec(lines[next]);
    if (!mark || kindOf(mark[2]) !== kind || RULE.test(lines[next])) break;
    const item = itemAt(lines, next, mark);
    items.push(item.lines);
    to = item.to;
    next = to;
    while (next < lines.length && blank(lines[next])) next += 1;
    const goes = next < lines.length && ITEM.exec(lines[next]);
    loose ||= item.loose || (next > to && Boolean(goes) && kindOf(goes[2]) === kind);
  }
  const node = (isOpen) => {
    const made = make(kind === "." || kind === ")" ? "ol" : "ul");
    const start = parseInt(first[2], 10);
    if (made.localName === "ol" && start !== 1) made.start = start;
    items.forEach((each, i) => made.append(item(each, depth, loose, isOpen && i === items.length - 1)));
    return made;
  };
  return {from: at, to, node};
}

const kindOf = (mark) => mark.at(-1);

// The lines of one item without its indentation. A nested list may be indented by less than the item's text is.
function itemAt(lines, at, mark) {
  const space = mark[3].length > 4 || mark[3] === "" ? 1 : mark[3].length;
  const width = mark[1].length + mark[2].length + space;
  const least = mark[1].length + 2;
  const inner = [lines[at].slice(width)];
  let to = at + 1;
  let gap = 0;
  let loose = false;
  for (let next = at + 1; next < lines.length; next += 1) {
    const line = lines[next];
    if (blank(line)) {
      gap += 1;
      continue;
    }
    const indent = line.search(/[^ ]/);
    const inside = indent >= width || (indent >= least && (ITEM.test(line) || FENCE.test(line)));
    if (!inside && (gap || interrupts(lines, next) || ITEM.test(line))) break;
    if (gap && !ITEM.test(line)) loose = true;
    inner.push(...Array(gap).fill(""), line.slice(Math.min(indent, width)));
    gap = 0;
    to = next + 1;
  }
  return {lines: inner, to, loose};
}

function item(lines, depth, loose, open) {
  const task = TASK.exec(lines[0]);
  const shown = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
  const made = make("li", task ? "task" : "");
  if (task) made.append(check(task[1] !== " "));
  for (const node of nodesOf(shown, depth + 1, open)) {
    if (!loose && node.localName === "p") made.append(...node.childNodes);
    else made.append(node);
  }
  return made;
}

function check(done) {
  const made = make("span", done ? "check done" : "check");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", done ? "done" : "to do");
  return made;
}

// -------------------------------------------------------------------------------------------------------------- tables

// A row of delimiters makes a table of the line before. While that row is still to come, a line that begins with `|` does.
function tableAt(lines, at, open) {
  const line = lines[at];
  if (!line.includes("|")) return false;
  const next = lines[at + 1];
  if (next !== undefined && DELIMITERS.test(next.trim()) && next.includes("|")) return cellsOf(next).length === cellsOf(line).length;
  if (!open || !/^ *\|/.test(line)) return false;
  return at + 1 >= lines.length || (at + 2 === lines.length && /^[|:\- ]*$/.test(next));
}

function table(lines, at) {
  const head = cellsOf(lines[at]);
  const sides = (lines[at + 1] === undefined ? [] : cellsOf(lines[at + 1])).map(sideOf);
  let to = Math.min(at + 2, lines.length);
  while (to < lines.length && !blank(lines[to]) && !interrupts(lines, to)) to += 1;
  const rows = lines.slice(at + 2, to);
  const node = (open) => {
    const made = make("table", "", make("thead", "", row("th", head, head.length, sides, open && !rows.length)));
    const body = rows.map((line, i) => row("td", cellsOf(line), head.length, sides, open && i === rows.length - 1));
    if (body.length) made.append(make("tbody", "", ...body));
    const frame = make("div", "table", made);
    frame.tabIndex = 0;
    frame.setAttribute("role", "group");
    frame.setAttribute("aria-label", "Table");
    return frame;
  };
  return {from: at, to, node};
}

function row(name, cells, width, sides, open) {
  const made = make("tr");
  for (let i = 0; i < width; i += 1) {
    made.append(make(name, sides[i] ?? "", ...inline(cells[i] ?? "", open && i >= cells.length - 1)));
  }
  return made;
}

function sideOf(cell) {
  if (cell.endsWith(":")) return cell.startsWith(":") ? "middle" : "right";
  return "";
}

function cellsOf(line) {
  const cells = line.trim().replace(/^\|/, "").split(/(?<!\\)\|/);
  if (cells.length > 1 && blank(cells.at(-1))) cells.pop();
  return cells.map((cell) => cell.trim().replaceAll("\\|", "|"));
}

// --------------------------------------------------------------------------------------------------------------- morph

// Makes the children of `root` from `from` on equal to `wanted`, and leaves those that are so already.
function morphChildren(root, wanted, from = 0) {
  wanted.forEach((node, i) => {
    const there = root.childNodes[from + i];
    if (there === undefined) root.append(node);
    else if (!morph(there, node)) there.replaceWith(node);
  });
  while (root.childNodes.length > from + wanted.length) root.lastChild.remove();
}

// Whether `there` could be made equal to `wanted`.
function morph(there, wanted) {
  if (there.nodeName !== wanted.nodeName) return false;
  if (there.nodeType === Node.TEXT_NODE) {
    if (there.data !== wanted.data) {
      if (wanted.data.startsWith(there.data)) there.appendData(wanted.data.slice(there.data.length));
      else there.data = wanted.data;
    }
    return true;
  }
  if (there.attributes.length !== wanted.attributes.length) return false;
  for (const {name, value} of wanted.attributes) if (there.getAttribute(name) !== value) return false;
  morphChildren(there, [...wanted.childNodes]);
  return true;
}
