// One turn as it is shown: a question, or an answer with its thought, its facts and what can be done with it.

import {button, make} from "./dom.js";
import {MarkdownView} from "./markdown.js";

const SHARE = 4;  // of the time, drawing may take one part in so many more

export class QuestionTurn {
  constructor(text) {
    this.actions = make("div", "actions");
    this.node = make("article", "turn user", make("div", "text", text), this.actions);
    this.node.setAttribute("aria-label", "Question");
  }

  offer(...buttons) {
    this.actions.replaceChildren(...buttons);
  }
}

export class AnswerTurn {
  // `follow(change)` makes a change and keeps the end in sight where it was.
  constructor(follow) {
    this.follow = follow;
    this.text = make("div", "md");
    this.actions = make("div", "actions");
    this.node = make("article", "turn assistant", this.text, this.actions);
    this.node.setAttribute("aria-label", "Answer");
    this.view = new MarkdownView(this.text);
    this.content = "";
    this.thought = "";
    this.fold = null;
    this.asked = false;
    this.free = 0;  // when the next drawing may be
  }

  waiting(on) {
    this.node.classList.toggle("waiting", on);
    this.node.setAttribute("aria-busy", String(on));
  }

  gain(more) {
    if (!this.content) this.closeThought();
    this.content += more;
    this.view.append(more);
    this.ask();
  }

  think(more) {
    this.thought += more;
    if (!this.fold) {
      this.fold = make("details", "thought", make("summary", "", "Thinking …"), make("div", "thought-text"));
      this.fold.open = true;
      this.text.before(this.fold);
    }
    this.follow(() => this.fold.lastChild.append(more));
  }

  closeThought() {
    if (!this.fold) return;
    this.fold.firstChild.textContent = "Thought";
    this.fold.open = false;
  }

  // Draw at the next frame, or later where drawing has become dear.
  ask() {
    if (this.asked) return;
    this.asked = true;
    const wait = this.free - performance.now();
    const frame = () => requestAnimationFrame(() => this.draw(false));
    if (wait > 16) setTimeout(frame, wait);
    else frame();
  }

  draw(done) {
    this.asked = false;
    if (this.done) return;
    this.done = done;
    const began = performance.now();
    this.follow(() => this.view.draw(done));
    const took = performance.now() - began;
    this.free = performance.now() + SHARE * took;
  }

  // The answer is over. `ending` as in kept.js; `facts` and `failure` {message, advice} may be null.
  end(ending, facts, failure) {
    this.waiting(false);
    this.closeThought();
    this.draw(true);
    this.follow(() => {
      if (ending === "stopped") this.note("facts", facts ? `stopped · ${facts}` : "stopped");
      else if (facts) this.note("facts", facts);
      if (failure) this.note("error", [failure.message, failure.advice].filter(Boolean).join(" "));
    });
  }

  note(kind, text) {
    this.actions.before(make("p", kind, text));
  }

  offer(...buttons) {
    this.actions.replaceChildren(...buttons);
  }
}

// Copies a text, and says so for a moment.
export async function copyText(text, shown) {
  const before = shown.textContent;
  try {
    await navigator.clipboard.writeText(text);
    shown.textContent = "Copied";
  } catch {
    shown.textContent = copyBySelection(text) ? "Copied" : "Not copied";
  }
  setTimeout(() => { shown.textContent = before === "Copied" ? "Copy" : before; }, 1500);
}

// A page that is not served over TLS, from another machine of the house, has no clipboard of its own.
function copyBySelection(text) {
  const field = make("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  const focused = document.activeElement;
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  return done;
}

export function copyButton(turn) {
  return button("Copy", (event) => copyText(turn.content, event.currentTarget));
}
