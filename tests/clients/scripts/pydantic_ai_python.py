"""`pydantic-ai`: text, an output by a native schema and by a tool, over chat and over responses."""

import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

url, name = sys.argv[1:3]


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
for model in (OpenAIChatModel(name, provider=provider), OpenAIResponsesModel(name, provider=provider)):
    limit = {"max_tokens": 120}
    assert Agent(model, model_settings=limit).run_sync("Say hello.").output
    for kind in (NativeOutput(City), ToolOutput(City)):
        agent = Agent(model, output_type=kind, model_settings=limit | {"parallel_tool_calls": False}, retries=0)
        assert agent.run_sync("Name a city.").output.city in ("Paris", "Rome")
print("pydantic-ai: ok")
