"""The official `anthropic` package for Python: messages, a stream, a count, and a tool loop of two calls."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0, timeout=120)
model = sys.argv[2]
TURN = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "name": "weather",
    "description": "Weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}

answer = client.messages.create(model=model, messages=TURN, max_tokens=8)
assert answer.content[0].text and answer.usage.output_tokens == 8 and answer.stop_reason == "max_tokens"

with client.messages.stream(model=model, messages=TURN, max_tokens=8) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text and final.usage.output_tokens == 8

count = client.messages.count_tokens(model=model, messages=TURN)
assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

turns, calls = list(TURN), 0
while calls < 2:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    step = client.messages.create(model=model, messages=turns, max_tokens=120, tools=[WEATHER], tool_choice=choice)
    used = [block for block in step.content if block.type == "tool_use"]
    assert used and used[0].input["city"] in ("Paris", "Rome") and step.stop_reason == "tool_use"
    calls += len(used)
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "Sunny, 21 degrees."} for block in used]
    turns += [{"role": "assistant", "content": step.content}, {"role": "user", "content": results}]
last = client.messages.create(model=model, messages=turns, max_tokens=24, tools=[WEATHER], tool_choice={"type": "none"})
assert last.content and last.content[0].type == "text"

try:
    client.messages.create(model="another", messages=TURN, max_tokens=1)
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
else:
    raise AssertionError("a model that is not here was answered")
print(f"anthropic {anthropic.__version__}: ok, {calls} calls")
