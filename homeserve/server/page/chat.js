// The chat page: one conversation, kept in this tab. What the model writes reaches the document as text only
// (textContent), never as markup, whatever it contains.
"use strict";

const $ = (id) => document.getElementById(id);
const log = $("log"), input = $("input"), send = $("send"), stop = $("stop");
const messages = [];
let running = null;

// ---------------------------------------------------------------------------------------------------------- settings

const kept = {temperature: "0.7", "max-tokens": "", system: "", key: ""};
for (const id of Object.keys(kept)) {
  $(id).value = sessionStorage.getItem(id) ?? kept[id];
  $(id).addEventListener("input", () => {
    sessionStorage.setItem(id, $(id).value);
    showTemperature();
  });
}
$("key").addEventListener("change", () => watchHealth());

function showTemperature() {
  $("temperature-value").value = Number($("temperature").value).toFixed(2);
}
showTemperature();

function headers() {
  const made = {"Content-Type": "application/json"};
  const key = $("key").value.trim();
  if (key) made.Authorization = `Bearer ${key}`;
  return made;
}

$("options").addEventListener("click", () => showPanel($("panel").hidden));
$("panel").addEventListener("submit", (event) => event.preventDefault());

function showPanel(open) {
  $("panel").hidden = !open;
  $("options").setAttribute("aria-expanded", String(open));
}

// ------------------------------------------------------------------------------------------------------ server state

let watching = 0;

async function watchHealth() {
  const mine = ++watching;
  while (mine === watching) {
    const text = await serverState();
    if (mine !== watching) return;
    $("model").textContent = text.model ?? text.wait;
    if (text.model !== undefined) return;
    await new Promise((resolve) => setTimeout(resolve, 1000));
  }
}

async function serverState() {
  try {
    const health = await fetch("/health");
    const state = await health.json();
    if (state.status === "loading") return {wait: loadingText(state)};
    if (!health.ok) return {wait: state.status};
    const models = await fetch("/v1/models", {headers: headers()});
    if (models.status === 401) {
      showPanel(true);
      return {model: "needs an API key"};
    }
    const found = (await models.json()).data[0];
    return {model: found ? found.id : "no model"};
  } catch {
    return {wait: "server not reached"};
  }
}

function loadingText(state) {
  const share = state.total_bytes ? ` ${Math.floor(100 * (state.done_bytes ?? 0) / state.total_bytes)} %` : "";
  return `${state.stage}${share} …`;
}

watchHealth();

// ------------------------------------------------------------------------------------------------------ conversation

function addTurn(role) {
  $("empty").hidden = true;
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const text = document.createElement("div");
  text.className = "text";
  turn.append(text);
  log.append(turn);
  return {turn, text};
}

// Code between ``` fences goes into <pre>; everything else stays plain text.
function render(target, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  const nodes = parts.map((part, i) => {
    const node = document.createElement(i % 2 ? "pre" : "span");
    const from = i > 0 ? part.replace(/^\n+/, "") : part;
    node.textContent = i < parts.length - 1 || i % 2 ? from.replace(/\n+$/, "") : from;
    return node;
  });
  target.replaceChildren(...nodes);
}

function note(turn, kind, text) {
  const line = document.createElement("div");
  line.className = kind;
  if (kind === "error") line.setAttribute("role", "alert");
  line.textContent = text;
  turn.append(line);
}

function atEnd() {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 60;
}

function follow(change) {
  const wasAtEnd = atEnd();
  change();
  if (wasAtEnd) log.scrollTop = log.scrollHeight;
}

$("new").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  for (const turn of log.querySelectorAll(".turn")) turn.remove();
  $("empty").hidden = false;
  input.focus();
});

// ------------------------------------------------------------------------------------------------------------ asking

function body() {
  const system = $("system").value.trim();
  const made = {
    messages: system ? [{role: "system", content: system}, ...messages] : messages,
    temperature: Number($("temperature").value),
    stream: true,
    stream_options: {include_usage: true},
  };
  const limit = parseInt($("max-tokens").value, 10);
  if (limit > 0) made.max_tokens = limit;
  return JSON.stringify(made);
}

async function ask(question) {
  messages.push({role: "user", content: question});
  addTurn("user").text.textContent = question;
  const {turn, text} = addTurn("assistant");
  turn.classList.add("waiting");
  log.scrollTop = log.scrollHeight;
  const control = new AbortController();
  running = control;
  busy(true);
  let answer = "", drawn = true;
  const draw = () => { drawn = true; follow(() => render(text, answer)); };
  const gain = (more) => {
    answer += more;
    if (drawn) { drawn = false; requestAnimationFrame(draw); }
  };
  let facts = null, failure = null;
  try {
    facts = await stream(control.signal, gain);
  } catch (error) {
    if (!control.signal.aborted) failure = error.message || String(error);
  }
  if (running === control) running = null;
  if (!turn.isConnected) return busy(running !== null);
  turn.classList.remove("waiting");
  follow(() => {
    render(text, answer);
    if (control.signal.aborted) note(turn, "facts", "stopped");
    if (facts) note(turn, "facts", facts);
    if (failure) note(turn, "error", failure);
  });
  if (answer) messages.push({role: "assistant", content: answer});
  else messages.pop();
  if (failure && !answer) input.value = input.value || question;
  busy(running !== null);
  fit();
}

// Reads one answer; `gain` gets each piece of text. Returns a line of facts. Throws Error with the server's message.
async function stream(signal, gain) {
  const response = await fetch("/v1/chat/completions", {method: "POST", headers: headers(), body: body(), signal});
  if (!response.ok) throw new Error(await errorText(response));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", facts = null, done = false, finish = null;
  while (!done) {
    const read = await reader.read();
    if (read.done) break;
    const lines = (rest + read.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") { done = true; continue; }
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      const more = chunk.choices[0]?.delta?.content;
      if (more) gain(more);
      finish = chunk.choices[0]?.finish_reason ?? finish;
      if (chunk.homeserve) facts = factsText(chunk, finish);
    }
  }
  if (!done) throw new Error("the connection ended before the answer did");
  return facts;
}

function factsText({usage, homeserve: made}, finish) {
  const parts = [`${usage.completion_tokens} tokens`];
  if (made.decode_tok_s) parts.push(`${made.decode_tok_s.toFixed(1)} a second`);
  if (made.ttft_ms !== null) parts.push(`first after ${Math.round(made.ttft_ms)} ms`);
  if (finish === "length") parts.push("cut off by the limit of tokens");
  return parts.join(" · ");
}

async function errorText(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

function busy(on) {
  send.hidden = on;
  stop.hidden = !on;
  send.disabled = !input.value.trim();
}

function submit() {
  const question = input.value.trim();
  if (!question || running) return;
  input.value = "";
  fit();
  ask(question);
}

function fit() {
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  send.disabled = !input.value.trim();
}

// ---------------------------------------------------------------------------------------------------------- keyboard

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
stop.addEventListener("click", () => running?.abort());
input.addEventListener("input", fit);
input.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    submit();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
fit();
