"""From a `ChatCall` to an `Ask`: the prompt as the model's template writes it, what the answer has to look like, and
how it will be read.

Three things must agree, and are made from the same call here: what the template tells the model of tools and of
thinking, what the grammar lets it write (`guides`), and what the reader takes for a thought or a call (`readers`).
"""

from __future__ import annotations

from typing import Any

from homeserve.server.ask import Ask, Terms, ask_for
from homeserve.server.chat_call import ChatCall, Reasoning
from homeserve.server.guides import guide_of, guiding_field
from homeserve.server.parts import Served
from homeserve.server.prefill import refuse_in_thought
from homeserve.server.prompts import Prompt, chat_prompt
from homeserve.server.readers import reader_maker
from homeserve.server.reasoning import SWITCHES
from homeserve.server.tool_messages import tool_messages


async def prompt_of_chat(served: Served, call: ChatCall) -> Prompt:
    """Raises InvalidField, ContextOverflow."""
    offered = [tool.for_template() for tool in call.tools.offered] if call.tools.callable else []
    own_form = served.dialect.call
    prompt = await chat_prompt(
        served.templates,
        served.tokenizer,
        await tool_messages(served.templates, own_form, call.messages, offered),
        bounds=served.bounds,
        tools=offered if own_form is not None else None,
        add_generation_prompt=call.add_generation_prompt,
        continue_last=call.continue_last,
        template_arguments=told_template(call.reasoning) | call.template_arguments,
        where=call.where.messages,
    )
    if call.continue_last:
        refuse_in_thought(served.dialect, prompt.text or "", call.messages[-1], call.where.messages)
    return prompt


def told_template(reasoning: Reasoning) -> dict[str, Any]:
    """Variables by which a template is told how much the model is to think; what a request gives itself goes before."""
    told: dict[str, Any] = {} if reasoning.effort is None else {"reasoning_effort": reasoning.effort}
    return told if reasoning.enabled is None else told | dict.fromkeys(SWITCHES, reasoning.enabled)


async def chat_ask(served: Served, call: ChatCall, request_id: str) -> Ask:
    """Raises InvalidField, ContextOverflow, SchemaUnsatisfiable."""
    prompt = await prompt_of_chat(served, call)
    terms = Terms(
        max_tokens=call.max_tokens,
        logprobs=call.logprobs,
        guide=await guide_of(served, call, prompt),
        make_reader=reader_maker(served, call, prompt),
        thought_told=call.reasoning.told,
        guided_by=guiding_field(call),
        where=call.where.messages,
    )
    return ask_for(call.fields, terms, [prompt], served.tokenizer, bounds=served.bounds, request_id=request_id)
