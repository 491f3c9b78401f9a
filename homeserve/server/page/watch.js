// What is known of the server: asked each second while something is going on, each five seconds else, and at once when
// the tab is shown again. A server that is away is asked on, so a page that stays open finds it again by itself.
//
// A state is {kind, text, models, started}: kind is one of `connecting`, `loading`, `ready`, `recovering` (a worker is
// being started again; open answers pause and go on), `draining`, `away` (not reached), `locked` (an API key is needed).

import {headers} from "./settings.js";

const SOON_MS = 1000;
const IDLE_MS = 5000;
const PATIENCE_MS = 8000;

const listeners = new Set();
let state = {kind: "connecting", text: "connecting …", models: []};
let timer = 0;
let busy = false;
let asking = null;

export function current() {
  return state;
}

// `listener(state)` is called now and at each answer. Returns what ends that.
export function onState(listener) {
  listeners.add(listener);
  listener(state);
  return () => listeners.delete(listener);
}

// Ask each second while an answer is being written.
export function setBusy(on) {
  busy = on;
  if (on) plan(SOON_MS);
}

export function watch() {
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) askNow();
  });
  addEventListener("online", askNow);
  askNow();
}

export async function askNow() {
  asking ??= ask().finally(() => { asking = null; });
  await asking;
}

async function ask() {
  clearTimeout(timer);
  state = await reading();
  for (const listener of listeners) listener(state);
  plan(busy || state.kind !== "ready" ? SOON_MS : IDLE_MS);
}

function plan(ms) {
  clearTimeout(timer);
  timer = setTimeout(() => {
    if (document.hidden && !busy) plan(IDLE_MS);
    else askNow();
  }, ms);
}

async function reading() {
  const signal = AbortSignal.timeout(PATIENCE_MS);
  try {
    const ready = await (await fetch("/ready", {signal, cache: "no-store"})).json();
    if (ready.status === "loading") return {kind: "loading", text: loadingText(ready), models: []};
    const answer = await fetch("/v1/models", {headers: headers(), signal, cache: "no-store"});
    if (answer.status === 401) return {kind: "locked", text: "needs an API key", models: []};
    const models = answer.ok ? (await answer.json()).data : [];
    const known = ["recovering", "draining"].includes(ready.status) ? ready.status : "ready";
    return {kind: known, text: textOf(known, models), models};
  } catch {
    return {kind: "away", text: "server not reached, trying again …", models: state.models};
  }
}

function textOf(kind, models) {
  if (kind === "recovering") return "a worker is being started again …";
  if (kind === "draining") return "shutting down";
  return models.length === 1 ? models[0].id : `${models.length} models`;
}

function loadingText(ready) {
  const share = ready.total_bytes ? ` ${Math.floor((100 * (ready.done_bytes ?? 0)) / ready.total_bytes)} %` : "";
  return `${ready.stage}${share} …`;
}
