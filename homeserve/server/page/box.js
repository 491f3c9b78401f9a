// The box view: what this server runs on, what it holds, and how it does. It asks the server each second while it is
// shown, and never twice at once:
//
//   status   each second        budget   each 10 s, because a measurement walks the page tables of all processes
//   corridor each 5 s           flips    when the status says that something has changed, each second during one
//
// A tab that is hidden asks nothing. A server that is not reached is asked less and less often, down to each 15 s, and
// at once when the tab is shown again, when the network is back, or when somebody says so. What was shown stays, and
// says that it is old. A slow server is asked no more than half of the time.

import {Ring} from "./facts.js";
import {Flips, refusalText, underWay} from "./flips.js";
import {Head, RANGES} from "./head.js";
import {Corridor, Memory} from "./memory.js";
import {Events, Ranks, Speed} from "./panels.js";
import {openSettings} from "./settings.js";
import {askNow} from "./watch.js";

const STATUS_MS = 1000,
  BUDGET_MS = 10_000,
  CORRIDOR_MS = 5000,
  FLIPS_MS = 15_000,
  AWAY_MAX_MS = 15_000,
  PATIENCE_MS = 10_000;
const NOT_IN = [404, 409]; // of a model: unknown, or not loaded
const NOTES_MAX = 32;
const SHORTEST_S = 20; // of the time that is shown
const RANKS_S = 5; // over which what ranks do is a mean
const KEPT = "homeserve.box.range";
const ROUTE = "/v1/homeserve";

let shown = null;
const ring = new Ring(); // outlives a change of the view

export function startBox(root, api) {
  stopBox();
  shown = new Box(root, api);
  shown.run();
}

export function stopBox() {
  shown?.stop();
  shown = null;
}

class Box {
  constructor(root, api) {
    this.api = api;
    this.root = root;
    this.ended = new AbortController();
    this.wake = null;
    this.due = {budget: 0, corridor: 0, flips: 0};
    this.failures = 0;
    this.heard = null; // what the frame has last found
    this.past = []; // statuses of the last seconds
    this.state = {
      status: null,
      before: null,
      budget: null,
      corridor: null,
      flips: null,
      ring,
      away: null,
      missing: null,
      models: [],
      chosen: "",
      notes: [],
      flipAnswer: null,
      from: 0,
      to: 1,
    };
    this.range = keptRange();
    this.head = new Head(
      {
        onModel: (id) => this.choose(id),
        onLoad: (id, what) => this.load(id, what),
        onRange: (seconds) => this.setRange(seconds),
        onRetry: () => this.now(),
        onKey: () => openSettings("key"),
      },
      this.range,
    );
    this.parts = [
      this.head,
      new Speed(),
      new Memory({onMeasure: () => this.measure()}),
      new Corridor(),
      new Flips({onFlip: (to) => this.flip(to)}),
      new Ranks(),
      new Events(),
    ];
    root.replaceChildren(this.head.notice, ...this.parts.map((part) => part.node));
    const {signal} = this.ended;
    document.addEventListener("visibilitychange", () => document.hidden || this.now(), {signal});
    addEventListener("online", () => this.now(), {signal});
    this.unlisten = api.onState((known) => this.hear(known));
  }

  stop() {
    this.ended.abort();
    this.unlisten?.();
    this.wake?.();
    for (const part of this.parts) part.close();
    this.root.replaceChildren();
  }

  // The frame asks the server, too: when it finds it again, or with a key that fits, there is no reason to wait.
  hear(known) {
    this.state.models = known.models ?? [];
    if (this.state.away && known.kind === "ready" && this.heard !== "ready") this.now();
    this.heard = known.kind;
  }

  // ------------------------------------------------------------------------------------------------------------ asking

  async run() {
    while (!this.ended.signal.aborted) {
      const began = performance.now();
      if (!document.hidden) await this.turn();
      if (this.ended.signal.aborted) return;
      const took = performance.now() - began;
      await this.sleep(
        document.hidden
          ? 3_600_000
          : this.state.away
            ? this.patience()
            : Math.max(STATUS_MS - took, Math.min(took, AWAY_MAX_MS), 100),
      );
    }
  }

  patience() {
    return Math.min(AWAY_MAX_MS, STATUS_MS * 2 ** Math.min(this.failures - 1, 6));
  }

  sleep(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  now() {
    this.wake?.();
  }

  async turn() {
    try {
      await this.askStatus();
      if (this.state.status && !this.state.away && !this.state.missing) await this.askMore();
    } catch (error) {
      if (this.ended.signal.aborted) return;
      if (!(error instanceof NotReached)) throw error;
      this.isAway(error);
    }
    if (!this.ended.signal.aborted) this.show();
  }

  async askStatus() {
    const {state} = this,
      told = await this.ask(`${ROUTE}/status?plans=0${this.query("&")}`);
    state.missing = null;
    if (state.chosen && NOT_IN.includes(told.status)) {
      state.missing = told.body?.error?.message ?? "the server does not say why";
      Object.assign(state, {status: null, budget: null, flips: null, away: null});
      this.failures = 0;
      return;
    }
    if (told.status !== 200) throw new NotReached(told);
    this.isBack(told.body);
    this.past = [...(state.status ? this.past : []), told.body].filter((each) => told.body.at - each.at <= RANKS_S + 5);
    state.before = this.past.findLast((each) => told.body.at - each.at >= RANKS_S) ?? this.past[0];
    state.status = told.body;
    ring.push(told.body);
  }

  async askMore() {
    const {state, due} = this,
      {status} = state,
      at = performance.now();
    const changed = [
      status.epoch,
      status.flip.committed,
      JSON.stringify(status.flip.abandoned),
      status.layout,
      status.started,
      status.model.id,
    ].join();
    if (changed !== this.changed) {
      this.changed = changed;
      due.flips = due.corridor = due.budget = 0;
    }
    if (status.state === "loading") due.flips = due.corridor = due.budget = 0;
    if (at >= due.corridor) await this.fetch("corridor", "/corridor", CORRIDOR_MS);
    if (at >= due.flips || underWay(state.flips)) await this.fetch("flips", `/flip${this.query("?")}`, FLIPS_MS);
    if (at >= due.budget) await this.fetch("budget", `/budget${this.query("?")}`, BUDGET_MS);
  }

  // What is not there, or not yet, says why.
  async fetch(name, path, every) {
    const told = await this.ask(ROUTE + path);
    this.due[name] = performance.now() + every;
    this.state[name] = told.status === 200 ? told.body : null;
    if (told.status === 200) this.state[`${name}At`] = this.state.status.at;
    this.state[`${name}Why`] =
      told.status === 200 ? null : (told.body?.error?.message ?? `the server answered ${told.status}`);
  }

  async ask(path, more = {}) {
    const signal = AbortSignal.any([this.ended.signal, AbortSignal.timeout(PATIENCE_MS)]);
    try {
      const answer = await fetch(path, {headers: this.api.headers(), cache: "no-store", signal, ...more});
      return {status: answer.status, body: await answer.json().catch(() => null)};
    } catch {
      throw new NotReached(null);
    }
  }

  query(first) {
    return this.state.chosen ? `${first}model=${encodeURIComponent(this.state.chosen)}` : "";
  }

  // --------------------------------------------------------------------------------------------------- away and back

  isAway({told}) {
    const {state} = this,
      locked = told?.status === 401;
    this.failures += 1;
    if (!state.away && state.status && !locked) this.note("the server is not reached");
    const since = state.away?.since ?? Date.now();
    const what = told
      ? `The server answered ${told.status}: ${told.body?.error?.message ?? "no reason given"}`
      : "The server is not reached";
    const text = locked
      ? "This server asks for an API key."
      : `${what}, since ${new Date(since).toLocaleTimeString()}. What is shown is old.`;
    state.away = {since, locked, text};
  }

  // Another process has flips, events and memory of its own.
  isBack(status) {
    const {state} = this,
      other = state.status && state.status.started !== status.started;
    if (other) {
      state.budget = state.flips = state.corridor = state.flipAnswer = null;
      state.status = null;
    }
    if (state.away && !state.away.locked)
      this.note(other ? "another server answers here: counts begin anew" : "the server is reached again", status.at);
    else if (other) this.note("another server answers here: counts begin anew", status.at);
    state.away = null;
    this.failures = 0;
  }

  note(text, at = Date.now() / 1000) {
    const {notes} = this.state;
    notes.push({at, kind: "page", rank: null, seq: null, text, folder: null});
    if (notes.length > NOTES_MAX) notes.shift();
  }

  // --------------------------------------------------------------------------------------------------------- showing

  show() {
    const {state} = this,
      last = state.status?.at ?? Date.now() / 1000;
    const start = state.corridor?.began ?? state.status?.started ?? last - 60;
    state.to = last;
    state.from = Math.min(last - SHORTEST_S, Math.max(start, this.range === null ? 0 : last - this.range));
    this.root.classList.toggle("old", Boolean(state.away));
    this.root.classList.toggle("absent", Boolean(state.missing));
    for (const part of this.parts) part.show(state);
  }

  setRange(seconds) {
    this.range = seconds;
    sessionStorage.setItem(KEPT, RANGES.find(([, each]) => each === seconds)[0]);
    this.show();
  }

  choose(id) {
    Object.assign(this.state, {
      chosen: id,
      status: null,
      before: null,
      budget: null,
      flips: null,
      flipAnswer: null,
      modelAnswer: null,
      missing: null,
    });
    this.changed = null;
    this.now();
  }

  async load(id, what) {
    const {state} = this;
    try {
      const told = await this.ask(`${ROUTE}/models/${encodeURIComponent(id)}/${what}`, {method: "POST", body: ""});
      const begun = [200, 202].includes(told.status);
      state.modelAnswer = begun ? "" : (told.body?.error?.message ?? `the server answered ${told.status}`);
    } catch (error) {
      if (!(error instanceof NotReached) || this.ended.signal.aborted) return;
      state.modelAnswer = "the server was not reached";
    }
    this.changed = null;
    await askNow(); // of the frame, which knows the models
    this.now();
  }

  measure() {
    this.due.budget = 0;
    this.now();
  }

  async flip(to) {
    const {state} = this;
    state.flipAnswer = {text: `Asking for a flip to ${to} …`};
    this.show();
    try {
      const told = await this.ask(`${ROUTE}/flip${this.query("?")}`, {method: "POST", body: JSON.stringify({to})});
      const begun = told.status === 202;
      state.flipAnswer = begun
        ? {text: `Flip ${told.body.id} to ${to} is accepted.`, id: told.body.id}
        : {text: refusalText(told.status, told.body?.error), bad: true};
    } catch (error) {
      if (!(error instanceof NotReached) || this.ended.signal.aborted) return;
      state.flipAnswer = {text: "Not begun, or not known: the server was not reached.", bad: true};
    }
    this.due.flips = this.due.corridor = 0;
    this.now();
  }
}

class NotReached extends Error {
  constructor(told) {
    super("not reached");
    this.told = told;
  }
}

function keptRange() {
  const known = RANGES.find(([name]) => name === sessionStorage.getItem(KEPT));
  return known ? known[1] : 600;
}
