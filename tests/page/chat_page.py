"""The chat view in a browser: asks, waits, reads, and notes whatever a payload could have done."""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import expect

ANSWER_MS = 90_000
# Everything that an answer may become. What is not here was made by markup of the model.
ALLOWED = set(
    "a blockquote br button code del div em h3 h4 h5 h6 hr li ol p pre span strong "
    "table tbody td th thead tr ul".split()
)
ATTRIBUTES = {"class", "href", "rel", "target", "title", "tabindex", "role", "aria-label", "type", "start"}


class Chat:
    """A page at `url`. `guide` is a regex that the next answers have to be: a real model then writes any text."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.guide: str | None = None
        self.more: dict[str, Any] = {}
        self.events: list[str] = []
        """Dialogs, errors, refusals by the policy, and requests to elsewhere."""
        page.set_default_timeout(60_000)
        page.on("dialog", self._dialog)
        page.on("pageerror", lambda error: self.events.append(f"error {error}"))
        page.on("console", self._console)
        page.on("request", self._request)
        page.on("popup", lambda popup: self.events.append(f"popup {popup.url}"))
        page.route("**/v1/chat/completions", self._add)

    def open(self) -> Chat:
        self.page.goto(self.url)
        expect(self.page.locator("#state-dot")).to_have_attribute("data-kind", "ready", timeout=ANSWER_MS)
        return self

    def send(self, question: str) -> None:
        self.page.fill("#input", question)
        self.page.keyboard.press("Enter")

    def ask(self, question: str) -> None:
        """Ask, and wait until the answer is over."""
        self.send(question)
        self.over()

    def over(self) -> None:
        expect(self.page.locator("#send")).to_be_visible(timeout=ANSWER_MS)
        expect(self.page.locator(".turn.waiting")).to_have_count(0)

    @property
    def answer(self) -> Any:
        return self.page.locator(".turn.assistant .md").last

    def text(self) -> str:
        return str(self.answer.evaluate("(node) => node.textContent"))

    def literal(self, text: str) -> None:
        """The next answers are exactly this text."""
        self.guide = literal(text)

    def foreign(self) -> list[str]:
        """Elements and attributes of answers that no Markdown makes."""
        script = """() => [...document.querySelectorAll('.md *')].flatMap((node) =>
            [node.localName, ...[...node.attributes].map((each) => "@" + each.name)])"""
        allowed = ALLOWED | {f"@{name}" for name in ATTRIBUTES}
        return sorted(set(self.page.evaluate(script)) - allowed)

    def addresses(self) -> list[str]:
        return list(self.page.evaluate("() => [...document.querySelectorAll('.md a')].map((node) => node.href)"))

    def _add(self, route: Any) -> None:
        body = route.request.post_data_json | self.more
        if self.guide is not None:
            body |= {"structured_outputs": {"regex": self.guide}, "max_tokens": 900}
        route.continue_(post_data=json.dumps(body))

    def _dialog(self, dialog: Any) -> None:
        self.events.append(f"dialog {dialog.message}")
        dialog.dismiss()

    def _console(self, message: Any) -> None:
        if "Failed to load resource" not in message.text:  # what tests do to the server
            self.events.append(f"console {message.text}")

    def _request(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:,", "blob:")):
            self.events.append(f"request {request.url}")


def literal(text: str) -> str:
    """A regex of the server's dialect that fits this text alone."""
    special = r"\.+*?()|[]{}^$"
    return "".join(f"\\{mark}" if mark in special else "\\n" if mark == "\n" else mark for mark in text)


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
