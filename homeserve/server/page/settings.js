// What a request is made with: the fields of the settings' sheet, kept in this tab. An empty field is not sent, so the
// server's default holds.

import {byId} from "./dom.js";

const NUMBERS = {
  temperature: "temperature",
  "max-tokens": "max_tokens",
  "top-p": "top_p",
  "top-k": "top_k",
  "min-p": "min_p",
  seed: "seed",
};
const KEPT = [...Object.keys(NUMBERS), "system", "effort", "key"];
const PREFIX = "homeserve.settings.";

// Headers of every request of this tab.
export function headers() {
  const made = {"Content-Type": "application/json"};
  const key = byId("key").value.trim();
  if (key) made.Authorization = `Bearer ${key}`;
  return made;
}

// The id of the model that is chosen; empty where there is one or none.
export function chosenModel() {
  return byId("models").hidden ? "" : byId("model").value;
}

export function systemPrompt() {
  return byId("system").value.trim();
}

// The fields of a request's body that are set. What is no number, or out of range, is not sent: the field says so.
export function parameters() {
  const made = {};
  for (const [id, name] of Object.entries(NUMBERS)) {
    const field = byId(id);
    if (field.value !== "" && field.validity.valid) made[name] = Number(field.value);
  }
  if (byId("effort").value) made.reasoning_effort = byId("effort").value;
  return made;
}

function reset() {
  for (const id of KEPT) {
    if (id === "key") continue;
    byId(id).value = "";
    sessionStorage.removeItem(PREFIX + id);
  }
  byId("temperature").focus();
}

function keep(id) {
  const value = byId(id).value;
  if (value) sessionStorage.setItem(PREFIX + id, value);
  else sessionStorage.removeItem(PREFIX + id);
}

// `onKey`: told when the API key has changed.
export function startSettings(onKey) {
  for (const id of KEPT) {
    byId(id).value = sessionStorage.getItem(PREFIX + id) ?? "";
    byId(id).addEventListener("input", () => keep(id));
  }
  byId("key").addEventListener("change", onKey);
  byId("options").addEventListener("click", openSettings);
  byId("close").addEventListener("click", () => byId("settings").close());
  byId("reset").addEventListener("click", reset);
  byId("panel").addEventListener("submit", (event) => {
    event.preventDefault();
    if (byId("panel").reportValidity()) byId("settings").close();
  });
  byId("settings").addEventListener("click", (event) => {
    if (event.target === byId("settings")) byId("settings").close();  // beside the sheet
  });
}

// Closing it, by Escape too, gives the focus back to where it was: that is what dialogs do.
export function openSettings(focused = "") {
  if (!byId("settings").open) byId("settings").showModal();
  if (typeof focused === "string" && focused) byId(focused).focus();
}
