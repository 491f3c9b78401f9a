"""The items of a response's output while they are written: what opens, continues and closes each in a stream.

    message         output_item.added, content_part.added, output_text.delta…, output_text.done,
                    content_part.done, output_item.done
    reasoning       the same with reasoning_text; told as a summary: reasoning_summary_part and reasoning_summary_text
    function_call   output_item.added, function_call_arguments.delta…, function_call_arguments.done, output_item.done

What an item's `done` says is what its deltas said, joined: both come from the same list. Events are plain objects
without their sequence numbers, which the response counts (`responses_shape`).
"""

from __future__ import annotations

from typing import Any

from homeserve.text.answer import Part, PartKind

Json = dict[str, Any]


class OutputItem:
    """One item. `index` is its place in the output."""

    prefix = ""

    def __init__(self, index: int, name: str) -> None:
        self.id = f"{self.prefix}_{name}_{index}"
        self.index = index
        self.status = "in_progress"
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def takes(self, part: Part) -> bool:
        """Whether `part` continues this item."""
        raise NotImplementedError

    def opening(self) -> list[Json]:
        return [{"type": "response.output_item.added", "output_index": self.index, "item": self.as_json()}]

    def add(self, text: str, logprobs: list[Json]) -> list[Json]:
        """The event of more text; none where there is nothing."""
        if not text and not logprobs:
            return []
        self._texts.append(text)
        return [self._delta(text, logprobs)]

    def closing(self, status: str, logprobs: list[Json]) -> list[Json]:
        """`logprobs`: of tokens behind the last text. The item has its `status` from here on."""
        self.status = status
        done = {"type": "response.output_item.done", "output_index": self.index, "item": self.as_json()}
        return [*self._done(), done]

    def as_json(self) -> Json:
        raise NotImplementedError

    def _delta(self, text: str, logprobs: list[Json]) -> Json:
        raise NotImplementedError

    def _done(self) -> list[Json]:
        raise NotImplementedError

    def _event(self, kind: str, **more: Any) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **more}


class MessageItem(OutputItem):
    """The answer's text."""

    prefix = "msg"

    def __init__(self, index: int, name: str) -> None:
        super().__init__(index, name)
        self._logprobs: list[Json] = []

    def takes(self, part: Part) -> bool:
        return part.kind is PartKind.TEXT

    def opening(self) -> list[Json]:
        return [*super().opening(), self._event("content_part.added", content_index=0, part=self._content())]

    def closing(self, status: str, logprobs: list[Json]) -> list[Json]:
        self._logprobs.extend(logprobs)
        return super().closing(status, logprobs)

    def as_json(self) -> Json:
        content = [] if self.status == "in_progress" else [self._content()]
        return {"id": self.id, "type": "message", "status": self.status, "role": "assistant", "content": content}

    def _content(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self._logprobs)}

    def _delta(self, text: str, logprobs: list[Json]) -> Json:
        self._logprobs.extend(logprobs)
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _done(self) -> list[Json]:
        content = self._content()
        return [
            self._event("output_text.done", content_index=0, text=content["text"], logprobs=content["logprobs"]),
            self._event("content_part.done", content_index=0, part=content),
        ]


class ThoughtItem(OutputItem):
    """A thought, told as it was."""

    prefix = "rs"

    def takes(self, part: Part) -> bool:
        return part.kind is PartKind.THOUGHT

    def opening(self) -> list[Json]:
        return [*super().opening(), self._event("content_part.added", content_index=0, part=self._content())]

    def as_json(self) -> Json:
        content = [] if self.status == "in_progress" else [self._content()]
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": [], "content": content}

    def _content(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def _delta(self, text: str, logprobs: list[Json]) -> Json:
        return self._event("reasoning_text.delta", content_index=0, delta=text)

    def _done(self) -> list[Json]:
        content = self._content()
        return [
            self._event("reasoning_text.done", content_index=0, text=content["text"]),
            self._event("content_part.done", content_index=0, part=content),
        ]


class SummaryItem(ThoughtItem):
    """A thought, told whole where a summary was asked for: nothing here could shorten it."""

    def opening(self) -> list[Json]:
        begun = self._event("reasoning_summary_part.added", summary_index=0, part=self._content())
        return [*OutputItem.opening(self), begun]

    def as_json(self) -> Json:
        summary = [] if self.status == "in_progress" else [self._content()]
        return {"id": self.id, "type": "reasoning", "status": self.status, "summary": summary}

    def _content(self) -> Json:
        return {"type": "summary_text", "text": self.text}

    def _delta(self, text: str, logprobs: list[Json]) -> Json:
        return self._event("reasoning_summary_text.delta", summary_index=0, delta=text)

    def _done(self) -> list[Json]:
        content = self._content()
        return [
            self._event("reasoning_summary_text.done", summary_index=0, text=content["text"]),
            self._event("reasoning_summary_part.done", summary_index=0, part=content),
        ]


class CallItem(OutputItem):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, index: int, name: str, part: Part) -> None:
        super().__init__(index, name)
        self._call = part.call
        self._call_id = part.id or f"call_{name}_{index}"
        self._function = part.name

    def takes(self, part: Part) -> bool:
        return part.kind is PartKind.CALL and part.call == self._call

    def as_json(self) -> Json:
        arguments = "" if self.status == "in_progress" else self.text
        named = {"call_id": self._call_id, "name": self._function, "arguments": arguments}
        return {"id": self.id, "type": "function_call", "status": self.status, **named}

    def _delta(self, text: str, logprobs: list[Json]) -> Json:
        return self._event("function_call_arguments.delta", delta=text)

    def _done(self) -> list[Json]:
        return [self._event("function_call_arguments.done", name=self._function, arguments=self.text)]
