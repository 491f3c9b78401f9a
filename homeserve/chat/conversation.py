"""What was said, as the server is told it: a list of messages that grows by a question and its answer at a time.

Pure. An answer that was cut short counts as far as it came; a question without any answer is kept aside, so that it can
be asked again and nothing that was typed is lost.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

MESSAGES_MAX = 512
"""Of a request: the context runs out long before."""
FILE_VERSION = 1


class BadFile(ValueError):
    """What is no kept conversation, and why."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass
class Conversation:
    """`system` stays over a reset."""

    system: str = ""
    messages: list[Message] = field(default_factory=list)
    unanswered: str = ""
    """The last question, while nothing has been answered to it."""

    def asking(self, question: str) -> list[dict[str, str]]:
        """The messages of a request that asks `question`, which is unanswered from here on."""
        self.unanswered = question
        said = [*self.messages[-(MESSAGES_MAX - 2) :], Message("user", question)]
        if self.system:
            said.insert(0, Message("system", self.system))
        return [{"role": message.role, "content": message.content} for message in said]

    def answered(self, answer: str) -> None:
        """To the unanswered question; empty: nothing came."""
        if not answer:
            return
        self.messages += [Message("user", self.unanswered), Message("assistant", answer)]
        self.unanswered = ""

    def undo(self) -> str:
        """Take back the last question with its answer, and return it; empty where there is none."""
        if self.unanswered:
            question, self.unanswered = self.unanswered, ""
            return question
        if not self.messages:
            return ""
        question = self.messages[-2].content
        del self.messages[-2:]
        return question

    def reset(self) -> None:
        self.messages, self.unanswered = [], ""

    @property
    def last_answer(self) -> str:
        return self.messages[-1].content if self.messages else ""

    # ------------------------------------------------------------------------------------------------------------ files

    def as_markdown(self) -> str:
        """For people."""
        titles = {"user": "You", "assistant": "Answer"}
        parts = [f"*{self.system}*"] if self.system else []
        parts += [f"## {titles[message.role]}\n\n{message.content}" for message in self.messages]
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> str:
        """For `read`."""
        said = [{"role": message.role, "content": message.content} for message in self.messages]
        return json.dumps({"schema": FILE_VERSION, "system": self.system, "messages": said}, indent=1) + "\n"

    def read(self, text: str) -> None:
        """Become the conversation that `as_json` wrote. Raises BadFile, and is what it was then."""
        try:
            found = json.loads(text)
            said = [Message(entry["role"], entry["content"]) for entry in found["messages"]]
            system = found["system"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise BadFile("is no conversation that /save has written as .json") from error
        if not isinstance(system, str) or not all(isinstance(each.content, str) for each in said):
            raise BadFile("has what is no text among its messages")
        if [each.role for each in said] != ["user", "assistant"] * (len(said) // 2):
            raise BadFile("has other messages than questions with their answers")
        self.system, self.messages, self.unanswered = system, said, ""
