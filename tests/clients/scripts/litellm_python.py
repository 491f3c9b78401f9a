"""`litellm`: chat, a stream, a tool, embeddings, over its `openai/` provider; messages over its `anthropic/` one."""

import json
import sys

import litellm

url, name = sys.argv[1:3]
litellm.telemetry = False
common = {"model": f"openai/{name}", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0, "timeout": 120}
TURN = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}}, "required": ["city"]}

answer = litellm.completion(messages=TURN, max_tokens=8, **common)
assert answer.choices[0].message.content and answer.usage.completion_tokens == 8
streamed = litellm.completion(messages=TURN, max_tokens=8, stream=True, **common)
assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
tools = [{"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}]
called = litellm.completion(messages=TURN, max_tokens=120, tools=tools, tool_choice="required", **common)
assert json.loads(called.choices[0].message.tool_calls[0].function.arguments)["city"] in ("Paris", "Rome")
assert len(litellm.embedding(input=["one"], **common).data[0]["embedding"]) > 100
other = common | {"model": f"anthropic/{name}", "api_base": url}
assert litellm.completion(messages=TURN, max_tokens=8, **other).choices[0].message.content
print("litellm: ok")
