// Ways to build what the box view shows: HTML and SVG elements, and tables that are filled again and again.
//
// Only nodes are made, attributes set and text assigned; styles stand in box.css, by class. What is there already is
// kept: a table that is filled once a second keeps its scroll position, its focus and what a person has selected in it.

const SVG = "http://www.w3.org/2000/svg";

// An HTML element; attributes that are null or false are left out, `on*` are listeners, children are nodes or text.
export function h(name, attributes = {}, ...children) {
  return dressed(document.createElement(name), attributes, children);
}

export function s(name, attributes = {}, ...children) {
  return dressed(document.createElementNS(SVG, name), attributes, children);
}

function dressed(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

// Text of a node, touched only where it differs: what a person has selected stays selected.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  const text = value === null || value === undefined || value === false ? null : String(value);
  if (node.getAttribute(name) === text) return;
  if (text === null) node.removeAttribute(name);
  else node.setAttribute(name, text);
}

// A table in a region of its own that scrolls, and that the keyboard reaches. `columns`: [{name, number}].
export function table(label, columns) {
  const body = h("tbody");
  const heads = columns.map((column) => h("th", {scope: "col", class: column.number ? "number" : null}, column.name));
  const whole = h("table", {}, h("caption", {class: "unseen"}, label), h("thead", {}, h("tr", {}, ...heads)), body);
  const node = h("div", {class: "scroll", role: "region", tabindex: "0", "aria-label": label}, whole);
  return {node, fill: (rows) => fillRows(body, columns, rows)};
}

// Rows are {key, cells, class}; a cell is text, or {text, ...attributes}. Rows and cells that are there are kept.
function fillRows(body, columns, rows) {
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((row, at) => {
    const line = body.rows[at] ?? body.appendChild(madeRow(columns));
    setAttribute(line, "class", row.class ?? null);
    setAttribute(line, "data-key", row.key ?? null);
    row.cells.forEach((cell, column) => {
      const {text, ...attributes} = typeof cell === "object" ? cell : {text: cell};
      setText(line.cells[column], text);
      for (const [name, value] of Object.entries(attributes)) setAttribute(line.cells[column], name, value);
    });
  });
}

function madeRow(columns) {
  const cell = (column, at) =>
    at === 0 ? h("th", {scope: "row"}) : h("td", {class: column.number ? "number" : (column.class ?? null)});
  return h("tr", {}, ...columns.map(cell));
}
