// Inline Markdown: a text becomes nodes. One pass finds what can have a meaning, a second one pairs the marks of
// emphasis (the rules of CommonMark, with its bound on looking back), a third builds the nodes. Each is linear in the text,
// whatever a model writes.
//
// Nodes are made by name from this file alone, and text becomes text: tags in it are shown as they are written, but `<br>`.
// A link is followed only where its address is http, https or mailto after the browser itself has read it; pictures are
// links, since a page that fetches what an answer names tells others that it was read.
//
// `open`: more of this text is to come. Then a mark that is not closed yet counts as closed at the end, and one that has
// only begun is held back, so that nothing jumps when the rest arrives.

import {make} from "./dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const URL_MOST = 2048;
const DEPTH_MOST = 24;
const SPECIAL = /[\\`*_~[\]!<&\n]|https?:\/\/|www\./g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const SPACE = /[\s\u00a0]/;
const PUNCTUATION = /[\p{P}\p{S}]/u;
const BARE = /(?:https?:\/\/|www\.)[^\s<>\u0000-\u001f]{1,2048}/y;
const ANGLE = /<((?:https?:\/\/|mailto:)[^\s<>]{1,2048}|[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+)>/y;
const BREAK = /<br ?\/?>/iy;
const ENTITY = /&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]{2,8}));/y;
const NAMED = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", reg: "®", trade: "™", hellip: "…", mdash: "—",
  ndash: "–", lsquo: "‘", rsquo: "’", ldquo: "“", rdquo: "”", times: "×", deg: "°", plusmn: "±", middot: "·", bull: "•",
  rarr: "→", larr: "←", le: "≤", ge: "≥", ne: "≠", euro: "€", pound: "£", sect: "§", para: "¶", frac12: "½",
};

// The address that a link may have, as the browser reads it; null for any other.
export function safeUrl(text) {
  if (text.length > URL_MOST) return null;
  let url;
  try {
    url = new URL(text);
  } catch {
    return null;
  }
  return SCHEMES.has(url.protocol) ? url.href : null;
}

// The nodes of one text.
export function inline(text, open = false) {
  return build(new Scan(open ? withoutBegun(text) : text, open).parts());
}

// A mark at the very end may be the first half of one.
function withoutBegun(text) {
  let end = text.length;
  while (end > 0 && "*_~`".includes(text[end - 1])) end -= 1;
  if (end === text.length && text.endsWith("![")) return text.slice(0, -2);
  return end === text.length && /[[\\!]/.test(text[end - 1]) ? text.slice(0, -1) : text.slice(0, end);
}

// ---------------------------------------------------------------------------------------------------------------- scan
// Parts: {text}, {node}, {run: "*", count, canOpen, canClose, inWord, opens: [], closes: []}, {bracket, image}.

class Scan {
  constructor(text, open) {
    this.text = text;
    this.open = open;
    this.at = 0;
    this.found = [];
    this.brackets = [];  // places in `found`
    this.lastTarget = text.lastIndexOf("](");
    this.lastTicks = new Map();
    for (const {0: run, index} of text.matchAll(/`+/g)) this.lastTicks.set(run.length, index);
  }

  parts() {
    while (this.at < this.text.length) {
      SPECIAL.lastIndex = this.at;
      const next = SPECIAL.exec(this.text);
      this.plain(this.text.slice(this.at, next ? next.index : this.text.length));
      if (!next) break;
      this.at = next.index;
      this.special(next[0]);
    }
    pair(this.found, 0, this.open);
    return this.found;
  }

  special(mark) {
    if (mark === "`") return this.ticks();
    if (mark === "*" || mark === "_" || mark === "~") return this.run(mark);
    if (mark === "\n") return this.line();
    if (mark === "\\") return this.escape();
    if (mark === "[") return this.bracket(false, 1);
    if (mark === "!") return this.text[this.at + 1] === "[" ? this.bracket(true, 2) : this.take("!");
    if (mark === "]") return this.closeBracket();
    if (mark === "<") return this.angle();
    if (mark === "&") return this.entity();
    return this.bare();
  }

  plain(text) {
    if (text) this.found.push({text});
  }

  take(text, length = text.length) {
    this.plain(text);
    this.at += length;
  }

  node(node, length) {
    this.found.push({node});
    this.at += length;
  }

  line() {
    const last = this.found.at(-1);
    if (last?.text !== undefined) last.text = last.text.trimEnd();
    this.node(make("br"), 1);
  }

  escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") {
      this.at += 1;
      this.line();
    } else if (ESCAPABLE.test(next)) this.take(next, 2);
    else this.take("\\");
  }

  // A span of code ends at a run of as many ticks.
  ticks() {
    const run = /`+/y;
    run.lastIndex = this.at;
    const length = run.exec(this.text)[0].length;
    const from = this.at + length;
    if ((this.lastTicks.get(length) ?? -1) < from) {
      if (!this.open || from >= this.text.length) return this.take("`".repeat(length));
      return this.node(make("code", "", codeText(this.text.slice(from))), this.text.length - this.at);
    }
    const runs = /`+/g;
    runs.lastIndex = from;
    let end = runs.exec(this.text);
    while (end[0].length !== length) end = runs.exec(this.text);
    this.node(make("code", "", codeText(this.text.slice(from, end.index))), end.index + length - this.at);
  }

  run(mark) {
    let end = this.at;
    while (this.text[end] === mark) end += 1;
    const before = this.at ? [...this.text.slice(Math.max(0, this.at - 2), this.at)].at(-1) : " ";
    const after = end < this.text.length ? String.fromCodePoint(this.text.codePointAt(end)) : " ";
    const [spaceBefore, spaceAfter] = [SPACE.test(before), SPACE.test(after)];
    const [markBefore, markAfter] = [PUNCTUATION.test(before), PUNCTUATION.test(after)];
    const left = !spaceAfter && (!markAfter || spaceBefore || markBefore);
    const right = !spaceBefore && (!markBefore || spaceAfter || markAfter);
    const count = end - this.at;
    const known = mark !== "~" || count === 2;
    this.found.push({
      run: mark,
      count,
      canOpen: known && left && (mark !== "_" || !right || markBefore),
      canClose: known && right && (mark !== "_" || !left || markAfter),
      inWord: left && right,
      opens: [],
      closes: [],
    });
    this.at = end;
  }

  bracket(image, length) {
    this.brackets.push(this.found.length);
    this.found.push({bracket: image ? "![" : "[", image});
    this.at += length;
  }

  closeBracket() {
    const place = this.brackets.pop();
    if (place === undefined) return this.take("]");
    const opener = this.found[place];
    const target = linkTarget(this.text, this.at + 1);
    if (target === null || opener.dead || (target.unfinished && !this.open)) return this.take("]");
    pair(this.found, place + 1, false);
    const inner = build(this.found.splice(place + 1));
    this.found.pop();
    const address = target.unfinished ? null : safeUrl(target.address);
    if (address === null) for (const node of inner) this.found.push({node});
    else this.found.push({node: link(address, inner)});
    for (let i = this.brackets.length - 1; i >= 0 && !this.found[this.brackets[i]].dead; i -= 1) {
      this.found[this.brackets[i]].dead = true;  // no link inside another
    }
    this.at = target.end;
  }

  angle() {
    BREAK.lastIndex = ANGLE.lastIndex = this.at;
    const line = BREAK.exec(this.text);
    if (line) return this.node(make("br"), line[0].length);
    const found = ANGLE.exec(this.text);
    if (!found) return this.take("<");
    const address = safeUrl(/^(https?:|mailto:)/.test(found[1]) ? found[1] : `mailto:${found[1]}`);
    if (address === null) return this.take("<");
    this.node(link(address, [found[1]]), found[0].length);
  }

  entity() {
    ENTITY.lastIndex = this.at;
    const found = ENTITY.exec(this.text);
    const text = found ? entityText(found) : null;
    if (text === null) this.take("&");
    else this.take(text, found[0].length);
  }

  bare() {
    BARE.lastIndex = this.at;
    const found = BARE.exec(this.text);
    const before = this.text[this.at - 1] ?? " ";
    const shown = found && /[\s(*_~"'|]/.test(before) ? trimmed(found[0]) : "";
    const address = shown && !this.inLink() ? safeUrl(shown.startsWith("www.") ? `https://${shown}` : shown) : null;
    if (address === null) return this.take(this.text.startsWith("www.", this.at) ? "www." : "http");
    this.node(link(address, [shown]), shown.length);
  }

  // Inside brackets an address may be the text of a link, which holds no other.
  inLink() {
    return this.brackets.length > 0 && this.lastTarget > this.at;
  }
}

function link(address, inner) {
  const made = make("a", "", ...inner);
  made.href = address;
  made.rel = "noopener noreferrer nofollow";
  made.target = "_blank";
  made.title = address;
  return made;
}

function codeText(text) {
  const flat = text.replace(/\n/g, " ");
  return flat.startsWith(" ") && flat.endsWith(" ") && flat.trim() ? flat.slice(1, -1) : flat;
}

function entityText([, decimal, hex, name]) {
  if (name !== undefined) return Object.hasOwn(NAMED, name) ? NAMED[name] : null;
  const point = decimal !== undefined ? Number(decimal) : parseInt(hex, 16);
  const isText = point >= 32 && point <= 0x10ffff && !(point >= 0xd800 && point <= 0xdfff) && !(point >= 127 && point < 160);
  return isText || point === 9 || point === 10 ? String.fromCodePoint(point) : "\ufffd";
}

// What ends a sentence or closes a bracket around an address is none of the address.
function trimmed(address) {
  let unmatched = 0;
  for (const mark of address) unmatched += mark === ")" ? 1 : mark === "(" ? -1 : 0;
  let end = address.length;
  while (end > 0) {
    const last = address[end - 1];
    if (last === ")" && unmatched > 0) unmatched -= 1;
    else if (!/[?!.,:;*_~'"|\]`]/.test(last)) break;
    end -= 1;
  }
  return address.slice(0, end);
}

// `(address "title")` from `at`: {address, end}, {unfinished, end} where the text ends before it does, or null.
function linkTarget(text, at) {
  if (text[at] !== "(") return null;
  const most = Math.min(text.length, at + URL_MOST);
  let depth = 0;
  for (let i = at; i < most; i += 1) {
    if (text[i] === "\n" && text[i + 1] === "\n") return null;
    if (text[i] === "\\") i += 1;
    else if (text[i] === "(") depth += 1;
    else if (text[i] === ")") depth -= 1;
    if (depth === 0) return {address: addressOf(text.slice(at + 1, i)), end: i + 1};
  }
  return most === text.length ? {unfinished: true, end: most} : null;
}

function addressOf(inner) {
  const all = inner.trim();
  const found = [/^<([^<>\n]*)>/.exec(all), /^(\S*)/.exec(all)].find((each) => each && endsOrTitled(all.slice(each[0].length)));
  return (found ? found[1] : "")
    .replace(/\\([!-/:-@[-`{-~])/g, "$1")
    .replace(/&(?:#(\d{1,7})|#[xX]([0-9a-fA-F]{1,6})|([a-zA-Z]{2,8}));/g, (whole, ...groups) => entityText([whole, ...groups]) ?? whole);
}

// Whether nothing follows an address, or a title does.
function endsOrTitled(rest) {
  return rest === "" || (SPACE.test(rest[0]) && /^(?:"[^"]*"|'[^']*'|\([^()]*\))?$/.test(rest.trim()));
}

// ------------------------------------------------------------------------------------------------------------ emphasis

// Pairs the runs of `found` from a place on; `open`: those that stay open last to the end.
function pair(found, from, open) {
  const stack = [];
  const bottoms = new Map();
  for (let i = from; i < found.length; i += 1) {
    const closer = found[i];
    if (!closer.run || closer.paired) continue;
    closer.paired = true;
    closer.left = closer.count;
    if (closer.canClose) closeWith(closer, stack, bottoms);
    if (closer.canOpen && closer.left) stack.push(closer);
  }
  if (open) for (const run of stack) lastToTheEnd(run);
}

function closeWith(closer, stack, bottoms) {
  while (closer.left) {
    const key = `${closer.run}${closer.canOpen}${closer.count % 3}`;
    const bottom = bottoms.get(key) ?? 0;
    let place = stack.length - 1;
    while (place >= bottom && !fits(stack[place], closer)) place -= 1;
    if (place < bottom) {
      bottoms.set(key, stack.length);
      return;
    }
    const opener = stack[place];
    const used = closer.run === "~" ? 2 : Math.min(opener.left, closer.left, 2);
    const name = closer.run === "~" ? "del" : used === 2 ? "strong" : "em";
    opener.left -= used;
    closer.left -= used;
    opener.opens.push(name);
    closer.closes.push(name);
    stack.length = opener.left ? place + 1 : place;
    for (const [each, value] of bottoms) if (value > stack.length) bottoms.set(each, stack.length);
  }
}

function fits(opener, closer) {
  if (opener.run !== closer.run) return false;
  const both = opener.canClose || closer.canOpen;
  return !(both && (opener.count + closer.count) % 3 === 0 && (opener.count % 3 || closer.count % 3));
}

function lastToTheEnd(run) {
  if (run.inWord || run.left > 3) return;
  if (run.run === "~") run.opens.push("del");
  else if (run.left === 1) run.opens.push("em");
  else if (run.left === 2) run.opens.push("strong");
  else run.opens.push("em", "strong");
  run.left = 0;
}

// --------------------------------------------------------------------------------------------------------------- build

function build(parts) {
  const top = document.createDocumentFragment();
  const stack = [top];
  for (const part of parts) {
    if (part.node) stack.at(-1).append(part.node);
    else if (part.text !== undefined) stack.at(-1).append(part.text);
    else if (part.bracket) stack.at(-1).append(part.bracket);
    else marks(part, stack);
  }
  top.normalize();
  return [...top.childNodes];
}

function marks(run, stack) {
  for (const _ of run.closes) stack.pop();
  if (run.left) stack.at(-1).append(run.run.repeat(run.left));
  for (const name of run.opens.toReversed()) {
    const made = stack.length < DEPTH_MOST ? make(name) : stack.at(-1);
    if (made !== stack.at(-1)) stack.at(-1).append(made);
    stack.push(made);
  }
}
