// AI SDK with `@ai-sdk/openai-compatible`: text, a stream with usage, an object of a schema, a tool, embeddings.
import assert from "node:assert/strict";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embed, generateText, Output, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "homeserve", baseURL: `${process.argv[2]}/v1`, includeUsage: true, supportsStructuredOutputs: true,
});
const model = provider(process.argv[3]);
const prompt = "What is the weather in Paris?";
const common = { model, prompt, maxRetries: 0 };

const text = await generateText({ ...common, maxOutputTokens: 8 });
assert.ok(text.text);
assert.equal(text.usage.outputTokens, 8);

const streamed = streamText({ ...common, maxOutputTokens: 8, onError: ({ error }) => { throw error; } });
let whole = "";
for await (const part of streamed.textStream) whole += part;
assert.ok(whole);
assert.equal((await streamed.usage).outputTokens, 8);

const schema = z.object({ city: z.enum(["Paris", "Rome"]) });
const shaped = await generateText({ ...common, maxOutputTokens: 60, output: Output.object({ schema }) });
assert.ok(["Paris", "Rome"].includes(shaped.output.city));

const weather = tool({ description: "Weather of a city", inputSchema: schema });
const called = await generateText({ ...common, maxOutputTokens: 120, tools: { weather }, toolChoice: "required" });
assert.equal(called.toolCalls[0].toolName, "weather");

const { embedding } = await embed({ model: provider.embeddingModel(process.argv[3]), value: "one", maxRetries: 0 });
assert.ok(embedding.length > 100);
console.log("@ai-sdk/openai-compatible: ok");
