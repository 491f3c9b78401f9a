// The frame of the page: which view is shown, and what all views know of the server. Views are sections of index.html;
// the part of the address behind `#` says which one is shown.

import {startBox, stopBox} from "./box.js";
import {startChat} from "./chat.js";
import {byId} from "./dom.js";
import {chosenModel, headers} from "./settings.js";
import {onState, watch} from "./watch.js";

const VIEWS = {chat: "chat-view", box: "box-view"};
const TITLES = {chat: "homeserve", box: "Box · homeserve"};
// What views get: `headers()` of a request with the tab's key, `onState(listener)` (see watch.js; returns what ends it), and
// `model()`, the id of the model that is chosen ("" where there is no choice).
const api = {headers, onState, model: chosenModel};
let shown = null;

function wanted() {
  const name = location.hash.slice(1);
  return Object.hasOwn(VIEWS, name) ? name : "chat";
}

// At the start the message box gets the focus, where that does not raise a keyboard on the screen.
function show(name, atStart) {
  if (name === shown) return;
  if (shown === "box") stopBox();
  shown = name;
  for (const [each, id] of Object.entries(VIEWS)) byId(id).hidden = each !== name;
  for (const link of document.querySelectorAll(".views a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = TITLES[name];
  if (name === "box") startBox(byId("box-root"), api);
  if (atStart && name === "chat" && matchMedia("(pointer: fine)").matches) byId("input").focus();
}

function showState(state) {
  byId("state-dot").dataset.kind = state.kind;
  const line = byId("state-text");
  if (line.textContent !== state.text) line.textContent = state.text;
}

byId("skip").addEventListener("click", (event) => {
  event.preventDefault();  // the address says which view is shown
  byId("main").focus();
});
addEventListener("hashchange", () => show(wanted(), false));
onState(showState);
startChat(api);
show(wanted(), true);
watch();
