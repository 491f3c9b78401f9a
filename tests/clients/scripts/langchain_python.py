"""`langchain-openai`: invoke, stream, structured output, a tool, embeddings."""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

url, name = sys.argv[1:3]
chat = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, max_completion_tokens=120)


class City(BaseModel):
    """A city."""

    city: Literal["Paris", "Rome"]


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Weather of a city."""
    return f"clear in {city}"


assert chat.invoke("Say hello.").content
assert "".join(chunk.content for chunk in chat.stream("Say hello."))
assert chat.with_structured_output(City, method="json_schema").invoke("Name a city.").city in ("Paris", "Rome")
called = chat.bind_tools([weather], tool_choice="required").invoke("What is the weather in Paris?")
assert called.tool_calls[0]["name"] == "weather"
embeddings = OpenAIEmbeddings(model=name, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False)
assert len(embeddings.embed_query("one")) > 100
over_responses = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_retries=0, use_responses_api=True)
assert over_responses.invoke("Say hello.", max_output_tokens=16).content
print("langchain-openai: ok")
