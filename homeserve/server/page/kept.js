// The conversation of this tab, kept over a reload. Turns are {role, content}; an answer also has `thought`, `facts`,
// `ending` (`done`, `stopped`, `cut`, `failed`) and, where it failed, `error`.

const KEY = "homeserve.conversation";

export function keptTurns() {
  try {
    const turns = JSON.parse(sessionStorage.getItem(KEY) ?? "[]");
    return Array.isArray(turns) ? turns.filter((turn) => typeof turn?.content === "string" && typeof turn.role === "string") : [];
  } catch {
    return [];  // written by another version of the page
  }
}

// Whether there was room for it.
export function keep(turns) {
  try {
    if (turns.length) sessionStorage.setItem(KEY, JSON.stringify(turns));
    else sessionStorage.removeItem(KEY);
    return true;
  } catch {
    return false;
  }
}

// What is sent to the server.
export function messagesOf(turns, system) {
  const messages = system ? [{role: "system", content: system}] : [];
  for (const turn of turns) {
    const message = {role: turn.role, content: turn.content};
    if (turn.thought) message.reasoning_content = turn.thought;
    messages.push(message);
  }
  return messages;
}

export function asMarkdown(turns, model) {
  const day = new Date().toISOString().slice(0, 16).replace("T", " ");
  const parts = [`# Chat with ${model || "homeserve"}, ${day} UTC`];
  for (const turn of turns) {
    parts.push(turn.role === "user" ? "## Question" : "## Answer", turn.content.trim() || "(nothing)");
  }
  return `${parts.join("\n\n")}\n`;
}
