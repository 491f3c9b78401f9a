"""`instructor`: an object of a schema by JSON schema and by tools."""

import sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel

url, name = sys.argv[1:3]


class City(BaseModel):
    city: Literal["Paris", "Rome"]


for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode)
    turn = [{"role": "user", "content": "Name a city."}]
    found = client.chat.completions.create(
        model=name, messages=turn, max_tokens=120, max_retries=0, response_model=City
    )
    assert found.city in ("Paris", "Rome"), mode
print("instructor: ok")
