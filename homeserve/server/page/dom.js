// Ways to build the document. Text reaches it as text (textContent), never as markup, whatever it contains.

export const byId = (id) => document.getElementById(id);

// An element with a class and children; strings become text.
export function make(name, className = "", ...children) {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

// A button that does something.
export function button(text, action, className = "quiet") {
  const made = make("button", className, text);
  made.type = "button";
  made.addEventListener("click", action);
  return made;
}
