// The chat view: one conversation, asked turn by turn. What is said lives in `turns` (kept.js); `shown` has the turn on the
// page for each of them. One answer at a time is being written: `running`.

import {byId, button, make} from "./dom.js";
import {asMarkdown, keep, keptTurns, messagesOf} from "./kept.js";
import {chosenModel, openSettings, parameters, startSettings, systemPrompt} from "./settings.js";
import {AnswerFailed, factsText, streamAnswer} from "./stream.js";
import {AnswerTurn, QuestionTurn, copyButton, copyText} from "./turn.js";
import {askNow, current, setBusy} from "./watch.js";

const KEEP_MS = 1000;
const QUIET_MS = 1500;
const SPOKEN_MOST = 2000;
const NEAR_PX = 60;

const log = byId("log");
const input = byId("input");
let turns = [];
let shown = [];
let running = null;  // {control, heard, turn}
let editing = false;
let wasAway = "";

export function startChat(api) {
  startSettings(() => { byId("notice").hidden = true; askNow(); });
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  byId("stop").addEventListener("click", stop);
  byId("new").addEventListener("click", startNew);
  byId("export").addEventListener("click", exportChat);
  input.addEventListener("input", fit);
  input.addEventListener("keydown", onKey);
  document.addEventListener("keydown", onEscape);
  log.addEventListener("click", onCopyCode);
  byId("model").addEventListener("change", () => sessionStorage.setItem("homeserve.model", byId("model").value));
  addEventListener("pagehide", () => keep(turns));
  for (const turn of keptTurns()) restore(turn);
  api.onState(onState);
  setInterval(quiet, 500);
  offer();
  fit();
  log.scrollTop = log.scrollHeight;
}

// ------------------------------------------------------------------------------------------------------------- turns

function show(turn) {
  byId("empty").hidden = true;
  shown.push(turn);
  log.append(turn.node);
  return turn;
}

// A turn of before the page was loaded. One that was being written then was cut by that.
function restore(turn) {
  turns.push(turn);
  if (turn.role === "user") return show(new QuestionTurn(turn.content));
  const answer = show(new AnswerTurn(follow));
  if (turn.thought) answer.think(turn.thought);
  if (turn.content) answer.gain(turn.content);
  const isCut = !turn.ending;
  if (isCut) Object.assign(turn, {ending: "cut", error: {message: "The page was loaded again while this was written.", advice: "Retry asks again."}});
  answer.end(turn.ending, turn.facts, turn.error ?? null);
  return answer;
}

// What can be done with the turns as they are now.
function offer() {
  shown.forEach((turn, i) => {
    const last = i >= shown.length - 2 && !running;
    if (turn instanceof QuestionTurn) {
      turn.offer(...(last ? [button("Edit", edit)] : []));
      return;
    }
    if (turn === running?.turn) return turn.offer();
    const again = turns[i].ending === "done" || turns[i].ending === "stopped" ? "Regenerate" : "Retry";
    const copy = turns[i].content ? [copyButton(turn)] : [];
    turn.offer(...copy, ...(last ? [button(again, regenerate)] : []));
  });
  byId("export").disabled = !turns.length;
  byId("send").hidden = running !== null;
  byId("stop").hidden = running === null;
}

function drop(count) {
  turns.splice(turns.length - count);
  for (const turn of shown.splice(shown.length - count)) turn.node.remove();
}

function follow(change) {
  const near = log.scrollHeight - log.scrollTop - log.clientHeight < NEAR_PX;
  change();
  if (near) log.scrollTop = log.scrollHeight;
}

// ------------------------------------------------------------------------------------------------------------ asking

function submit() {
  const question = input.value.trim();
  if (!question || running) return;
  if (editing) leaveEdit(2);
  input.value = "";
  fit();
  turns.push({role: "user", content: question});
  show(new QuestionTurn(question));
  answer();
}

async function answer() {
  const messages = messagesOf(turns, systemPrompt());
  const model = chosenModel();
  const body = {...(model ? {model} : {}), messages, ...parameters(), stream: true, stream_options: {include_usage: true}};
  const turn = show(new AnswerTurn(follow));
  const told = {role: "assistant", content: "", thought: ""};
  turns.push(told);
  const mine = {control: new AbortController(), heard: performance.now(), turn};
  running = mine;
  turn.waiting(true);
  notice("");
  announce("Answering …");
  setBusy(true);
  offer();
  log.scrollTop = log.scrollHeight;
  const keeping = setInterval(() => keep(turns), KEEP_MS);
  const hear = (name, gain) => (more) => {
    mine.heard = performance.now();
    told[name] += more;
    gain(more);
  };
  const on = {text: hear("content", (more) => turn.gain(more)), thought: hear("thought", (more) => turn.think(more))};
  await finish(told, turn, mine, streamAnswer(body, mine.control.signal, on));
  clearInterval(keeping);
  if (running !== mine) return;  // a new chat was begun meanwhile
  running = null;
  setBusy(false);
  quiet();
  follow(offer);
  if (!keep(turns)) notice("This conversation has become too long to be kept over a reload. Export saves it.");
}

async function finish(told, turn, mine, streamed) {
  try {
    const facts = await streamed;
    told.facts = factsText(facts);
    told.ending = "done";
  } catch (error) {
    const stopped = mine.control.signal.aborted;
    told.ending = stopped ? "stopped" : error.code === "cut" ? "cut" : "failed";
    if (!stopped) told.error = {message: error.message, advice: error.advice ?? ""};
    if (!stopped && !(error instanceof AnswerFailed)) console.error(error);
    if (error.code === "unauthorized" && running === mine) openSettings("key");
    if (!stopped) askNow();
  }
  turn.end(told.ending, told.facts ?? null, told.error ?? null);
  if (running === mine) announce(spoken(told));
}

function spoken(told) {
  if (told.error) return `${told.error.message} ${told.error.advice}`;
  const text = told.content.slice(0, SPOKEN_MOST);
  return told.ending === "stopped" ? `Stopped. ${text}` : `Answer: ${text}`;
}

function announce(text) {
  byId("announcer").textContent = text;
}

function stop() {
  running?.control.abort();
  input.focus();
}

function regenerate() {
  drop(1);
  answer();
  input.focus();
}

function edit() {
  editing = true;
  input.value = turns.findLast((turn) => turn.role === "user").content;
  notice("Editing your last question: sending it takes the place of the last answer.", button("Leave it as it was", () => leaveEdit(0)));
  fit();
  input.focus();
}

function leaveEdit(count) {
  editing = false;
  if (count) drop(Math.min(count, turns.length));
  else input.value = "";
  notice("");
  fit();
  input.focus();
}

function startNew() {
  running?.control.abort();
  running = null;
  setBusy(false);
  drop(turns.length);
  keep(turns);
  byId("empty").hidden = false;
  leaveEdit(0);
  offer();
  announce("New chat");
}

function exportChat() {
  const model = chosenModel() || current().models[0]?.id || "";
  const link = make("a");
  link.href = URL.createObjectURL(new Blob([asMarkdown(turns, model)], {type: "text/markdown"}));
  link.download = `chat-${new Date().toISOString().slice(0, 10)}.md`;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// ------------------------------------------------------------------------------------------------------- server's state

function notice(text, ...more) {
  const line = byId("notice");
  line.hidden = !text;
  line.replaceChildren(text, ...more);
}

function onState(state) {
  if (state.kind !== "connecting") showModels(state.models);
  if (state.kind === "away" && !wasAway) wasAway = time();
  if (state.kind === "ready" && wasAway) {
    if (turns.length) notice(`The server was away from ${wasAway} to ${time()} and is back. Your conversation is as it was.`);
    wasAway = "";
  }
  quiet();
}

const time = () => new Date().toLocaleTimeString([], {hour: "2-digit", minute: "2-digit"});

// A stream that pauses while a worker is started again goes on by itself.
function quiet() {
  const line = byId("notice");
  const pauses = running !== null && performance.now() - running.heard > QUIET_MS;
  const waits = pauses && current().kind === "recovering";
  const loads = pauses && current().models.find((model) => model.homeserve?.state === "loading");
  if (waits) say("A worker is being started again. The answer goes on by itself.");
  else if (loads) say(`${loads.id} is being loaded. The answer comes when it is there.`);
  else if (line.dataset.quiet) {
    delete line.dataset.quiet;
    notice("");
  }
}

function say(text) {
  if (byId("notice").textContent !== text) notice(text);
  byId("notice").dataset.quiet = "yes";
}

function showModels(models) {
  const select = byId("model");
  const chosen = select.value || sessionStorage.getItem("homeserve.model") || "";
  const options = models.map((model) => {
    const state = model.homeserve?.state ?? "loaded";
    const option = make("option", "", state === "loaded" ? model.id : `${model.id} (${state})`);
    option.value = model.id;
    return option;
  });
  const same = options.length === select.options.length && options.every((each, i) => each.textContent === select.options[i].textContent);
  if (!same) {
    select.replaceChildren(...options);
    select.value = models.some((model) => model.id === chosen) ? chosen : (models[0]?.id ?? "");
  }
  byId("models").hidden = models.length < 2;
}

// ----------------------------------------------------------------------------------------------------------- keyboard

function fit() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  byId("send").disabled = !input.value.trim();
}

function onKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
}

function onEscape(event) {
  if (event.key !== "Escape" || byId("settings").open) return;
  if (running) stop();
  else if (editing) leaveEdit(0);
}

function onCopyCode(event) {
  const pressed = event.target.closest("button.copy");
  if (pressed) copyText(pressed.closest(".code").querySelector("pre").textContent, pressed);
}
