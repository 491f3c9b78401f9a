// The chat view.

export function startChat() {}
