"""How the answer of a chat is read: which formats of the model its text may be in."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from homeserve.server.chat_call import ChatCall
from homeserve.server.parts import Served
from homeserve.server.prompts import Prompt
from homeserve.text.answer import AnswerReader, PlainReader
from homeserve.text.dialects import GENERIC, CallForm, Dialect
from homeserve.text.marks import Marks, marks_of
from homeserve.text.reading import DialectReader

if TYPE_CHECKING:
    from homeserve.text.tokenizer import Tokenizer

_marks: WeakKeyDictionary[Tokenizer, dict[Dialect, Marks]] = WeakKeyDictionary()
_PROMPT_CHARS = 1024
"""Of a prompt's end, in which a message's header or a thought's mark stands if the answer begins behind one."""


def call_form(served: Served, call: ChatCall) -> CallForm | None:
    """How the answer calls tools, None where it cannot. A template without calls is told of the generic form."""
    return (served.dialect.call or GENERIC) if call.tools.callable else None


def reader_maker(served: Served, call: ChatCall, prompt: Prompt) -> Callable[[], AnswerReader]:
    """Makes the reader of one choice."""
    dialect = Dialect(served.dialect.thought, call_form(served, call))
    if dialect.thought is None and dialect.call is None:
        return PlainReader
    tools = {tool.name: tool.parameters for tool in call.tools.offered} if call.tools.callable else None
    marks = dialect_marks(served.tokenizer, dialect)
    end = (prompt.text or "")[-_PROMPT_CHARS:]
    parallel = call.tools.parallel

    def make() -> AnswerReader:
        return DialectReader(dialect, marks, prompt=end, tools=tools, parallel=parallel)

    return make


def dialect_marks(tokenizer: Tokenizer, dialect: Dialect) -> Marks:
    """The dialect's marks among the model's control tokens."""
    of_tokenizer = _marks.setdefault(tokenizer, {})
    if dialect not in of_tokenizer:
        control = [(token, tokenizer.token_text(token)) for token in sorted(tokenizer.special_ids)]
        of_tokenizer[dialect] = marks_of(dialect.marks, control)
    return of_tokenizer[dialect]
