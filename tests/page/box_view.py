"""The box view in a browser, and what tests read of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
SIZES = ("--context", "1024", "--kv-tokens", "8192", "--max-running", "8", "--threads", "1", "--kv-type", "f32")
TWO = ("--devices", "cpu:2", "--layout", "pipeline", "--flip", "manual", *SIZES)
ROUTE = "/v1/homeserve"
THIN = "\u202f"
OTHER = {"pipeline": "tensor", "tensor": "pipeline"}


def told(run: Any, path: str, method: str = "GET", body: Any = None) -> Any:
    """What a route answers, whatever its status."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(run.url + path, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return json.load(error)


def count(run: Any, start: int, tokens: int) -> dict[str, Any]:
    """A greedy answer that is no stream."""
    body = {"prompt": f"count {start}:", "max_tokens": tokens, "temperature": 0}
    return dict(told(run, "/v1/completions", "POST", body))


def shown(value: float, digits: int = 0) -> str:
    """A number as the page writes it."""
    text = str(Decimal(abs(value)).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))
    whole, _, rest = text.partition(".")
    whole = f"{int(whole):,}".replace(",", THIN)
    minus = "-" if value < 0 and float(text) else ""
    return minus + (f"{whole}.{rest}" if rest else whole)


def mib(value: float | None) -> str:
    return "unknown" if value is None else shown(value, 1 if abs(value) < 1000 else 0)


def signed(value: float | None) -> str:
    if value is None:
        return "unknown"
    return ("+" if value > 0 else "−" if value < 0 else "±") + shown(abs(value), 1)


class View:
    """The box view of the server at `url`. `budgets` are the answers of the budget route that the page got."""

    def __init__(self, page: Any, url: str, wait_until: Callable[..., Any]) -> None:
        self.page, self.url, self.wait_until = page, url, wait_until
        self.budgets: list[dict[str, Any]] = []
        self.asked: list[str] = []
        """Paths that the page has asked for."""
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._heard)
        page.on("request", lambda request: self.asked.append(request.url.removeprefix(self.url)))
        page.route(f"**{ROUTE}/budget*", self._record)

    def open(self, ready: bool = True) -> View:
        self.page.goto(f"{self.url}/#box")
        if ready:
            self.page.locator(".panel.memory .device").first.wait_for()
        return self

    def text(self, selector: str) -> str:
        return str(self.page.locator(selector).first.text_content())

    def chip(self, name: str) -> str | None:
        found = self.page.locator(f".chip.{name}")
        return str(found.get_attribute("data-value")) if found.count() else None

    def rows(self, panel: str) -> dict[str, list[str]]:
        """Cells of each row of a panel's last table, by the row's key."""
        script = """(panel) => [...[...document.querySelectorAll(panel + " table")].at(-1).tBodies[0].rows]
            .map((row) => [row.dataset.key, [...row.cells].map((cell) => cell.textContent)])"""
        return dict(self.page.evaluate(script, f".panel.{panel}"))

    def memory(self, device: int) -> dict[str, list[str]]:
        """Cells of a device's table of lines, by line."""
        script = """(device) => [...document.querySelectorAll(`[data-device="${device}"] table tbody tr`)]
            .map((row) => [row.dataset.key, [...row.cells].map((cell) => cell.textContent)])"""
        return dict(self.page.evaluate(script, device))

    def bar(self, device: int, key: str) -> list[tuple[str, float]]:
        """(line, MiB) of each part of a device's bar."""
        script = "(all) => all.map((box) => [box.dataset.line, Number(box.dataset.mib)])"
        parts = self.page.locator(f'[data-device="{device}"] rect[data-bar="{key}"]').evaluate_all(script)
        return [(line, value) for line, value in parts]

    def stops(self) -> list[str]:
        """What the timeline has signs of."""
        script = "() => [...document.querySelectorAll('.sign[data-stop]')].map((sign) => sign.dataset.stop)"
        return list(self.page.evaluate(script))

    def module(self, name: str, script: str, *values: Any) -> Any:
        """What a function of a module of the page gives: `script` is the body of one whose `m` is the module and whose
        `a` are the values."""
        return self.page.evaluate(
            f"async (a) => {{ const m = await import('/static/{name}.js'); {script} }}", list(values)
        )

    def hide(self, hidden: bool) -> None:
        """As a tab that goes behind another one, or comes back."""
        script = """(hidden) => { Object.defineProperty(document, "hidden", {value: hidden, configurable: true});
            document.dispatchEvent(new Event("visibilitychange")); }"""
        self.page.evaluate(script, hidden)

    def check(self) -> None:
        """No script failed, and nothing was refused by the content policy."""
        assert self.errors == []

    def _heard(self, message: Any) -> None:
        away = "Failed to load resource" in message.text  # what tests do to the server
        if message.type in ("error", "warning") and not away:
            self.errors.append(message.text)

    def _record(self, route: Any) -> None:
        answer = route.fetch()
        if answer.status == 200:
            self.budgets.append(answer.json())
        route.fulfill(response=answer)
