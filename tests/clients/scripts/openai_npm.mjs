// The official `openai` package for JavaScript: models, chat, a stream, tools, responses, embeddings, an error.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0, timeout: 120_000 });
const model = (await client.models.list()).data[0].id;
const messages = [{ role: "user", content: "What is the weather in Paris?" }];

const answer = await client.chat.completions.create({ model, messages, max_tokens: 8 });
assert.equal(answer.usage.completion_tokens, 8);
assert.ok(answer.choices[0].message.content);

const stream = await client.chat.completions.create({
  model, messages, max_tokens: 8, stream: true, stream_options: { include_usage: true },
});
let last;
for await (const chunk of stream) last = chunk;
assert.equal(last.usage.completion_tokens, 8);

const parameters = {
  type: "object",
  properties: { city: { type: "string", enum: ["Paris", "Rome"] } },
  required: ["city"],
  additionalProperties: false,
};
const tools = [{ type: "function", function: { name: "weather", description: "Weather of a city", parameters } }];
const runner = client.chat.completions.stream({
  model, messages, max_tokens: 120, tools, tool_choice: "required", parallel_tool_calls: false,
});
const called = (await runner.finalChatCompletion()).choices[0].message.tool_calls[0];
assert.equal(called.function.name, "weather");
assert.ok(["Paris", "Rome"].includes(JSON.parse(called.function.arguments).city));

const response = await client.responses.create({ model, input: "Say hello.", max_output_tokens: 16 });
assert.ok(response.output_text);
const names = [];
for await (const event of await client.responses.create({ model, input: "Hi.", max_output_tokens: 8, stream: true }))
  names.push(event.type);
assert.equal(names[0], "response.created");

const vectors = await client.embeddings.create({ model, input: ["one", "two"] });
assert.equal(vectors.data.length, 2);
assert.equal(typeof vectors.data[0].embedding[0], "number");

await assert.rejects(client.chat.completions.create({ model: "another", messages }), { status: 404 });
console.log("openai (npm): ok");
