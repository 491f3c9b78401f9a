"""The page for everyone: axe-core's rules in both palettes and sizes, and everything by keyboard alone."""

from __future__ import annotations

from typing import Any

import pytest
from chat_page import ANSWER_MS, Chat
from playwright.sync_api import expect

pytestmark = pytest.mark.timeout(600)
SIZES = {"phone": {"width": 390, "height": 844}, "desk": {"width": 1440, "height": 900}}
TEXT = "# Plan\n\n**a** `b` [c](https://example.invalid)\n\n- [x] d\n\n> e\n\n"
TEXT += "| f |\n|---|\n| 1 |\n\n```python\nx = 1  # g\n```"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser: Any, server: Any, axe: str, scheme: str, size: str) -> None:
    context = browser.new_context(viewport=SIZES[size], color_scheme=scheme, bypass_csp=True)
    try:
        chat = Chat(context.new_page(), server.url).open()
        chat.literal(TEXT)
        chat.ask("Make me a plan")
        findings = {"chat": serious(chat.page, axe)}
        chat.page.click("#options")
        findings["settings"] = serious(chat.page, axe)
        chat.page.keyboard.press("Escape")
        chat.page.click('.views a[href="#box"]')
        chat.page.locator("#box-root .panel").first.wait_for()
        findings["box, empty"] = serious(chat.page, axe)
        chat.page.locator(".panel.memory .device").first.wait_for()
        findings["box"] = serious(chat.page, axe)
        assert not any(findings.values()), findings
        width = "document.documentElement.scrollWidth"
        assert chat.page.evaluate(width) <= SIZES[size]["width"], "no scrolling sideways"
    finally:
        context.close()


def serious(page: Any, axe: str) -> list[str]:
    page.evaluate(f"{axe}; 0")
    found = page.evaluate("async () => (await axe.run()).violations")
    return [
        f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:200]}"
        for each in found
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"]
    ]


def test_everything_by_keyboard_alone(browser: Any, server: Any) -> None:
    context = browser.new_context(viewport=SIZES["desk"])
    try:
        chat = Chat(context.new_page(), server.url).open()
        page, keys = chat.page, chat.page.keyboard
        expect(page.locator("#input")).to_be_focused()
        keys.type("Write a long story.")
        chat.more = {"max_tokens": 1200, "ignore_eos": True}
        keys.press("Enter")
        expect(page.locator(".md")).not_to_be_empty(timeout=ANSWER_MS)
        keys.press("Escape")
        chat.over()
        expect(page.locator(".facts")).to_contain_text("stopped")
        expect(page.locator("#input")).to_be_focused()
        tab_to(page, "#options", back=True)
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus is seen"
        keys.press("Enter")
        expect(page.locator("#settings")).to_be_visible()
        keys.press("Escape")
        expect(page.locator("#settings")).to_be_hidden()
        expect(page.locator("#options")).to_be_focused()
        tab_to(page, "#new", back=True)
        keys.press("Enter")
        expect(page.locator(".turn")).to_have_count(0)
        expect(page.locator("#input")).to_be_focused()
        tab_to(page, '.views a[href="#box"]', back=True)
        keys.press("Enter")
        expect(page.locator("#box-view")).to_be_visible()
        expect(page.locator("#chat-view")).to_be_hidden()
        page.reload()
        keys.press("Tab")
        expect(page.locator("#skip")).to_be_focused()
        keys.press("Enter")
        expect(page.locator("#main")).to_be_focused()
        assert page.url.endswith("#box") and chat.events == []
    finally:
        context.close()


def tab_to(page: Any, selector: str, back: bool = False) -> None:
    """Press Tab until it is there; every element on the way takes the focus."""
    for _ in range(60):
        page.keyboard.press("Shift+Tab" if back else "Tab")
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
    pytest.fail(f"{selector} is not reached by Tab")


def test_nothing_is_said_for_each_token(browser: Any, server: Any) -> None:
    """A screen reader hears that an answer is being written, and then the answer, once."""
    context = browser.new_context()
    try:
        chat = Chat(context.new_page(), server.url).open()
        chat.page.evaluate("""() => { window.said = []; new MutationObserver(() => window.said.push(
            document.getElementById('announcer').textContent)).observe(document.getElementById('announcer'),
            {childList: true, characterData: true, subtree: true}); }""")
        chat.literal("one two three four five six seven")
        chat.ask("count")
        expected = ["Answering …", "Answer: one two three four five six seven"]
        assert chat.page.evaluate("window.said") == expected
        live = "[...document.querySelectorAll('[aria-live], [role=status], [role=alert], [role=log]')]"
        assert chat.page.evaluate(f"{live}.filter((node) => node.querySelector('.turn')).length") == 0
    finally:
        context.close()
