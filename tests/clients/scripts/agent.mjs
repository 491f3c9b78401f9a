// An agent of AI SDK that uses tools until it is done, over /v1/responses and over /v1/messages. A model as small as the
// default one does not decide by itself when to call: the first two steps have to, the third must not.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { stepCountIs, tool, ToolLoopAgent } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const options = { baseURL: `${url}/v1`, apiKey: "none" };
const models = {
  responses: createOpenAI(options).responses(name),
  messages: createAnthropic(options)(name),
};
for (const [route, model] of Object.entries(models)) {
  const asked = [];
  const weather = tool({
    description: "Weather of a city",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => { asked.push(city); return { city, sky: "clear", degrees: 21 }; },
  });
  const agent = new ToolLoopAgent({
    model,
    instructions: "Ask for the weather before you answer.",
    tools: { weather },
    maxOutputTokens: 120,
    maxRetries: 0,
    providerOptions: { openai: { store: false, parallelToolCalls: false }, anthropic: { disableParallelToolUse: true } },
    stopWhen: stepCountIs(3),
    prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber < 2 ? "required" : "none" }),
  });
  const result = await agent.generate({ prompt: "Compare the weather in Paris and in Rome." });
  assert.equal(result.steps.length, 3, JSON.stringify(result.steps.map((step) => step.finishReason)));
  assert.ok(asked.length >= 2);
  assert.ok(result.text);
  const streamed = await agent.stream({ prompt: "Compare the weather in Paris and in Rome." });
  for await (const part of streamed.fullStream) if (part.type === "error") throw part.error;
  assert.equal((await streamed.steps).length, 3);
  console.log(`agent over ${route}: ok, ${asked.length} calls`);
}
