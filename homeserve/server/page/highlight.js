// Colours for code: comments, strings, numbers and words that most languages reserve. One expression for a family of
// languages, one pass; what is not known stays plain. A wrong guess costs a colour, never a character.

import {make} from "./dom.js";

const TEXT_MOST = 60_000;  // longer code stays plain
const STRINGS = String.raw`"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?`;
const NUMBER = String.raw`\b(?:0[xX][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b`;
const WORDS = {
  python: "and as assert async await break class continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise return try while with yield None True False self",
  c: "abstract as async await auto bool break case catch char class const continue default defer delete do double else enum export extends extern false final finally float fn for func function go if impl implements import in int interface let long match mod mut namespace new nil null of package private protected pub public return self short signed static struct super switch template this throw trait true try type typedef typeof undefined union unsigned use using var virtual void volatile where while yield",
  shell: "case do done elif else esac exit export fi for function if in local return set then until while cd echo sudo",
  sql: "ADD ALTER AND AS ASC BETWEEN BY CASE CREATE DELETE DESC DISTINCT DROP ELSE END EXISTS FROM FULL GROUP HAVING IN INNER INSERT INTO IS JOIN LEFT LIKE LIMIT NOT NULL ON OR ORDER OUTER PRIMARY KEY RIGHT SELECT SET TABLE THEN UNION UPDATE VALUES WHEN WHERE WITH",
  data: "true false null yes no on off",
};
const FAMILIES = {
  python: [String.raw`#[^\n]*`, String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|` + STRINGS, WORDS.python, ""],
  c: [String.raw`//[^\n]*|/\*[\s\S]*?(?:\*/|$)`, "`(?:\\\\.|[^`\\\\])*`?|" + STRINGS, WORDS.c, ""],
  shell: [String.raw`(?<![^\s;])#[^\n]*`, STRINGS, WORDS.shell, ""],
  sql: [String.raw`--[^\n]*|/\*[\s\S]*?(?:\*/|$)`, STRINGS, WORDS.sql, "i"],
  data: [String.raw`(?<![^\s])#[^\n]*`, STRINGS, WORDS.data, ""],
};
const LANGUAGES = {
  python: "python", py: "python", ruby: "python", rb: "python",
  bash: "shell", sh: "shell", shell: "shell", zsh: "shell", console: "shell", dockerfile: "shell", makefile: "shell",
  sql: "sql",
  json: "data", yaml: "data", yml: "data", toml: "data", ini: "data",
};
for (const name of "c h cpp c++ cc cs csharp cuda d dart go java javascript js jsx kotlin kt mjs php rs rust scala swift ts tsx typescript zig css".split(" ")) {
  LANGUAGES[name] = "c";
}
const made = new Map();

// Nodes of the code: spans of a class, and text.
export function highlight(text, language) {
  const name = language.toLowerCase();
  const family = Object.hasOwn(LANGUAGES, name) ? LANGUAGES[name] : null;
  if (family === null || text.length > TEXT_MOST) return text ? [text] : [];
  const nodes = [];
  let at = 0;
  for (const found of text.matchAll(expression(family))) {
    if (found.index > at) nodes.push(text.slice(at, found.index));
    const kind = Object.keys(found.groups).find((group) => found.groups[group] !== undefined);
    nodes.push(make("span", kind, found[0]));
    at = found.index + found[0].length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes;
}

function expression(family) {
  if (!made.has(family)) {
    const [comment, string, words, flags] = FAMILIES[family];
    const reserved = String.raw`(?<![\w.$-])(?:${words.split(" ").join("|")})(?![\w-])`;
    const parts = `(?<remark>${comment})|(?<string>${string})|(?<number>${NUMBER})|(?<word>${reserved})`;
    made.set(family, new RegExp(parts, `g${flags}`));
  }
  return made.get(family);
}
