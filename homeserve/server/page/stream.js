// One answer as it streams: a request to /v1/chat/completions, and what its events tell.

import {headers} from "./settings.js";

// What went wrong, in words, with what to do. `code` is the server's; `away` where the server was not reached, `cut` where
// the connection ended before the answer did.
export class AnswerFailed extends Error {
  constructor(message, code, advice = "") {
    super(message);
    this.code = code;
    this.advice = advice;
  }
}

const ADVICE = {
  unauthorized: "Give the API key in the settings.",
  context_overflow: "Start a new chat, edit the question to be shorter, or allow fewer tokens of an answer.",
  body_too_large: "Start a new chat, or edit the question to be shorter.",
  loading: "The model is still being loaded; retry when it is there.",
  draining: "The server is shutting down. This page stays, and finds it again when it is back.",
  model_not_found: "Choose another model.",
  invalid_field: "Change that in the settings.",
};

// `on.text(more)`, `on.thought(more)` as they come. Returns {usage, homeserve, finish}. Throws AnswerFailed, and what an
// abort of `signal` throws.
export async function streamAnswer(body, signal, on) {
  const response = await reached(body, signal);
  if (!response.ok) throw await refusal(response);
  const told = {usage: null, homeserve: null, finish: null};
  let done = false;
  for await (const data of events(response, signal)) {
    if (data === "[DONE]") {
      done = true;
      break;
    }
    take(JSON.parse(data), told, on);
  }
  if (!done) throw cut();
  return told;
}

async function reached(body, signal) {
  try {
    return await fetch("/v1/chat/completions", {method: "POST", headers: headers(), body: JSON.stringify(body), signal});
  } catch (error) {
    if (signal.aborted) throw error;
    throw new AnswerFailed("The server was not reached.", "away", "Retry when it is back; this page looks for it.");
  }
}

function cut() {
  return new AnswerFailed("The connection ended before the answer did.", "cut", "Retry asks again.");
}

async function* events(response, signal) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let read;
    try {
      read = await reader.read();
    } catch (error) {
      if (signal.aborted) throw error;
      throw cut();
    }
    if (read.done) return;
    const lines = (rest + read.value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
  }
}

function take(chunk, told, on) {
  if (chunk.error) throw failure(chunk.error);
  const choice = chunk.choices?.[0];
  if (choice?.delta?.reasoning_content) on.thought(choice.delta.reasoning_content);
  if (choice?.delta?.content) on.text(choice.delta.content);
  told.finish = choice?.finish_reason ?? told.finish;
  told.usage = chunk.usage ?? told.usage;
  told.homeserve = chunk.homeserve ?? told.homeserve;
}

async function refusal(response) {
  let error = null;
  try {
    ({error} = await response.json());
  } catch {
    // a proxy's page, perhaps: the status is what is known
  }
  if (!error) return new AnswerFailed(`The server answered ${response.status}.`, "status");
  const wait = response.headers.get("Retry-After");
  const failed = failure(error);
  if (response.status === 429 && wait) failed.advice = `Retry in ${wait} s.`;
  return failed;
}

function failure(error) {
  return new AnswerFailed(error.message, error.code, Object.hasOwn(ADVICE, error.code) ? ADVICE[error.code] : "");
}

export function factsText({usage, homeserve: made, finish}) {
  const parts = [];
  if (usage) parts.push(plural(usage.completion_tokens, "token"));
  if (made?.decode_tok_s) parts.push(`${made.decode_tok_s.toFixed(1)} tokens/s`);
  if (made && made.ttft_ms !== null) parts.push(`first after ${Math.round(made.ttft_ms)} ms`);
  if (made?.flips_crossed) parts.push(`${plural(made.flips_crossed, "flip")} crossed`);
  if (made?.restarts) parts.push(`${plural(made.restarts, "restart")} of a worker survived`);
  if (finish === "length") parts.push("cut off by the limit of tokens");
  return parts.join(" · ");
}

function plural(count, noun) {
  return `${count} ${noun}${count === 1 ? "" : "s"}`;
}
