"""The official `openai` package for Python: chat, streams, completions, a schema, tools, responses, embeddings."""

import json
import sys

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=120)
model = client.models.list().data[0].id
TURN = [{"role": "user", "content": "What is the weather in Paris?"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}


class City(BaseModel):
    city: str


answer = client.chat.completions.create(model=model, messages=TURN, max_tokens=8)
assert answer.choices[0].message.content and answer.usage.completion_tokens == 8

chunks = list(
    client.chat.completions.create(
        model=model, messages=TURN, max_tokens=8, stream=True, stream_options={"include_usage": True}
    )
)
assert chunks[-1].usage.completion_tokens == 8

text = client.completions.create(model=model, prompt=["One, two,", "A, B,"], max_tokens=4, logprobs=2, echo=True)
assert len(text.choices) == 2 and text.choices[0].text.startswith("One, two,")

schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
shaped = client.chat.completions.create(model=model, messages=TURN, max_tokens=40, response_format=schema)
assert json.loads(shaped.choices[0].message.content)["city"] in ("Paris", "Rome")

parsed = client.chat.completions.parse(model=model, messages=TURN, max_tokens=200, temperature=0, response_format=City)
assert parsed.choices[0].message.parsed.city

tools = [{"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": CITY}}]
asked = {"model": model, "messages": TURN, "max_tokens": 120, "tools": tools, "tool_choice": "required"}
asked["parallel_tool_calls"] = False
call = client.chat.completions.create(**asked).choices[0].message.tool_calls[0]
assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
with client.chat.completions.stream(**asked) as stream:
    final = stream.get_final_completion()
assert final.choices[0].message.tool_calls[0].function.name == "weather"

response = client.responses.create(model=model, input="Say hello.", max_output_tokens=16)
assert response.output_text
with client.responses.stream(model=model, input="Say hello.", max_output_tokens=16) as stream:
    names = [event.type for event in stream]
assert names[0] == "response.created" and names[-1] in ("response.completed", "response.incomplete")

vectors = client.embeddings.create(model=model, input=["one", "two"]).data
assert len(vectors) == 2 and abs(sum(x * x for x in vectors[0].embedding) - 1) < 1e-3

try:
    client.chat.completions.create(model="another", messages=TURN)
except openai.NotFoundError as error:
    assert error.code == "model_not_found"
else:
    raise AssertionError("a model that is not here was answered")
print(f"openai {openai.__version__}: ok")
