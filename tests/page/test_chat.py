"""The chat view against real servers: what is asked and shown, and what it outlives."""

from __future__ import annotations

import json
import os
import signal
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from box import Box, children
from chat_page import ANSWER_MS, Chat
from playwright.sync_api import expect

pytestmark = pytest.mark.timeout(300)
COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
SIZES = ("--context", "1024", "--kv-tokens", "8192", "--max-running", "4", "--threads", "1", "--kv-type", "f32")
KEY = "open-sesame-open-sesame"
TWO = ("--devices", "cpu:2", "--layout", "pipeline", "--flip", "manual")
LONG = {"max_tokens": 700, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def open_chat(browser: Any) -> Iterator[Callable[[str], Chat]]:
    """`open_chat(url)`: the chat in a browser context of its own."""
    made = []

    def open_one(url: str) -> Chat:
        context = browser.new_context(viewport={"width": 1000, "height": 800}, accept_downloads=True)
        made.append(context)
        return Chat(context.new_page(), url).open()

    yield open_one
    for context in made:
        context.close()


def test_markdown_is_drawn_as_it_streams(server: Any, open_chat: Callable[[str], Chat]) -> None:
    chat = open_chat(server.url)
    chat.literal(
        "## Plan\n\nSome **bold**, *leaning*, ~~gone~~ and `code`.\nMore.\n\n1. one\n   - two\n2. three\n\n- [x] done\n"
        "\n> said\n\n| a | b |\n|:--|--:|\n| 1 | 2 |\n\n---\n\n```python\nx = 1  # one\n```"
    )
    chat.ask("Make a plan")
    assert chat.answer.evaluate("(node) => node.innerHTML") == (
        "<h4>Plan</h4>"
        "<p>Some <strong>bold</strong>, <em>leaning</em>, <del>gone</del> and <code>code</code>.<br>More.</p>"
        "<ol><li>one<ul><li>two</li></ul></li><li>three</li></ol>"
        '<ul><li class="task"><span class="check done" role="img" aria-label="done"></span>done</li></ul>'
        "<blockquote><p>said</p></blockquote>"
        '<div class="table" tabindex="0" role="group" aria-label="Table"><table><thead><tr><th>a</th>'
        '<th class="right">b</th></tr></thead><tbody><tr><td>1</td><td class="right">2</td></tr></tbody></table></div>'
        '<hr><div class="code"><div class="code-head"><span class="language">python</span>'
        '<button class="copy quiet" type="button">Copy</button></div><pre tabindex="0"><code>x = '
        '<span class="number">1</span>  <span class="remark"># one</span></code></pre></div>'
    )
    expect(chat.page.locator(".facts")).to_contain_text("tokens/s")
    assert chat.events == []


def test_a_text_is_drawn_the_same_in_pieces_and_at_a_cost_of_its_length(
    server: Any, open_chat: Callable[[str], Chat]
) -> None:
    """The parser's module alone, letter by letter. Nodes of blocks that are closed stay those that they were."""
    chat = open_chat(server.url)
    text = "# A *b*\n\nc **d\ne** `f` [g](https://h.example)\n\n- i\n\n  j\n- k\n\n> l\n\n"
    text += "|m|n|\n|-|-|\n|o|p|\n\n```js\nq\n```\n"
    script = """async ([text, times]) => {
        const {MarkdownView, renderMarkdown} = await import("/static/markdown.js");
        const whole = document.createElement("div"), pieces = document.createElement("div");
        renderMarkdown(whole, text.repeat(times));
        const view = new MarkdownView(pieces);
        let first = null, blocks = 0;
        for (let i = 0; i < times; i++) for (const mark of text) {
            view.append(mark); view.draw();
            blocks = Math.max(blocks, pieces.childNodes.length);
            if (pieces.childNodes.length < blocks - 1) throw new Error("something jumped");
            if (i === 1) first ??= pieces.firstChild;
        }
        view.draw(true);
        return [whole.innerHTML === pieces.innerHTML, first === pieces.firstChild, view.drawn];
    }"""
    same, stays, few = chat.page.evaluate(script, [text, 10])
    _, _, many = chat.page.evaluate(script, [text, 40])
    assert same and stays
    assert many < 4.5 * few, "twice the text is twice the work"


@pytest.mark.parametrize(
    ("begun", "shown"),
    [
        ("a **b", "<p>a <strong>b</strong></p>"),
        ("a **b*", "<p>a <strong>b</strong></p>"),
        ("a *b", "<p>a <em>b</em></p>"),
        ("a `b", "<p>a <code>b</code></p>"),
        ("a [b](https://ex", "<p>a b</p>"),
        ("a\n\n#", "<p>a</p>"),
        ("a\n\n--", "<p>a</p>"),
        ("| a | b", "<table><thead><tr><th>a</th><th>b</th></tr></thead></table>"),
        ("2 * 3 and 4*5", "<p>2 * 3 and 4*5</p>"),
        ("- a\n- ", "<ul><li>a</li><li></li></ul>"),
    ],
)
def test_what_has_only_begun_looks_as_it_will(
    server: Any, open_chat: Callable[[str], Chat], begun: str, shown: str
) -> None:
    chat = open_chat(server.url)
    script = """async (text) => { const {MarkdownView} = await import("/static/markdown.js");
        const root = document.createElement("div"); const view = new MarkdownView(root);
        view.append(text); view.draw(); return (root.querySelector(".table") ?? root).innerHTML; }"""
    assert chat.page.evaluate(script, begun) == shown


def test_edit_regenerate_settings_reload_and_export(server: Any, open_chat: Callable[[str], Chat]) -> None:
    chat = open_chat(server.url)
    bodies: list[dict[str, Any]] = []
    chat.page.on("request", lambda each: bodies.append(each.post_data_json) if each.method == "POST" else None)
    chat.page.click("#options")
    for field, value in (("temperature", "0"), ("top-p", "0.5"), ("top-k", "7"), ("min-p", "0.1"), ("seed", "3")):
        chat.page.fill(f"#{field}", value)
    chat.page.fill("#max-tokens", "5")
    chat.page.fill("#system", "Be short.")
    chat.page.click("#done")
    chat.ask("Say one")
    sent = bodies[0]
    assert {name: sent[name] for name in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")} == {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "seed": 3, "max_tokens": 5,
    }  # fmt: skip
    assert sent["messages"][0] == {"role": "system", "content": "Be short."}
    before = chat.text()
    chat.page.get_by_role("button", name="Regenerate").click()
    chat.over()
    assert chat.text() == before and len(bodies) == 2 and bodies[1]["messages"] == sent["messages"]
    chat.page.get_by_role("button", name="Edit").click()
    expect(chat.page.locator("#input")).to_have_value("Say one")
    chat.ask("Say two")
    assert [each["content"] for each in bodies[2]["messages"]] == ["Be short.", "Say two"]
    assert chat.page.locator(".turn").count() == 2
    chat.page.reload()
    expect(chat.page.locator(".turn.user .text")).to_have_text("Say two")
    with chat.page.expect_download() as download:
        chat.page.click("#export")
    saved = Path(download.value.path()).read_text()
    assert "## Question\n\nSay two\n\n## Answer\n\n" in saved
    chat.page.click("#options")
    chat.page.click("#reset")
    expect(chat.page.locator("#top-k")).to_have_value("")
    assert chat.events == []


def test_an_error_is_told_with_what_to_do(server: Any, open_chat: Callable[[str], Chat]) -> None:
    chat = open_chat(server.url)
    chat.send("word " * 4000)
    chat.over()
    expect(chat.page.locator(".error")).to_contain_text("edit the question to be shorter")


@pytest.fixture
def two(box: Box) -> Iterator[Any]:
    run = box.up(str(COUNTER), *TWO, *SIZES)
    yield run
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err


def flip(run: Any, to: str) -> None:
    data = json.dumps({"to": to}).encode()
    request = urllib.request.Request(f"{run.url}/v1/homeserve/flip", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.status == 202


def partly(chat: Chat, length: int) -> None:
    """Wait until so much of the answer is there."""
    script = "(least) => (document.querySelector('.turn.assistant:last-child .md')?.textContent.length ?? 0) >= least"
    chat.page.wait_for_function(script, arg=length, timeout=ANSWER_MS)


def test_an_answer_crosses_a_flip_and_the_death_of_a_worker(
    two: Any, open_chat: Callable[[str], Chat], wait_until: Callable[..., Any]
) -> None:
    """The same answer as without either, drawn by the page while it happens."""
    chat = open_chat(two.url)
    chat.more = LONG
    chat.ask("count 17:")
    known = chat.text()
    assert len(known) > 300
    chat.page.click("#new")
    chat.send("count 17:")
    partly(chat, 40)
    flip(two, "tensor")
    partly(chat, 150)
    chat.over()
    assert chat.text() == known
    expect(chat.page.locator(".facts")).to_contain_text("flip crossed")
    chat.page.click("#new")
    chat.send("count 17:")
    partly(chat, 40)
    rank = two.get("/v1/homeserve/status")[1]["ranks"][1]["pid"]
    assert rank in children(two.pid)
    os.kill(rank, signal.SIGKILL)
    chat.over()
    assert chat.text() == known
    expect(chat.page.locator(".facts")).to_contain_text("restart")
    assert chat.events == []


def test_a_page_left_open_over_a_restart_of_the_server_finds_it_again(
    box: Box, open_chat: Callable[[str], Chat]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
    run = box.up(str(COUNTER), *SIZES, "--port", port)
    chat = open_chat(run.url)
    chat.more = LONG
    chat.send("count 17:")
    partly(chat, 20)
    for pid in children(run.pid) | {run.pid}:
        os.kill(pid, signal.SIGKILL)
    chat.over()
    expect(chat.page.locator(".error")).to_contain_text("Retry asks again")
    kept = chat.text()
    assert len(kept) >= 20
    expect(chat.page.locator("#state-dot")).to_have_attribute("data-kind", "away", timeout=ANSWER_MS)
    again = box.up(str(COUNTER), *SIZES, "--port", port)
    expect(chat.page.locator("#state-dot")).to_have_attribute("data-kind", "ready", timeout=ANSWER_MS)
    expect(chat.page.locator("#notice")).to_contain_text("is back")
    assert chat.text() == kept
    chat.page.get_by_role("button", name="Retry").click()
    chat.over()
    assert chat.text().startswith(kept) and chat.page.locator(".error").count() == 0
    again.send(signal.SIGTERM)
    assert again.wait() == 0


def test_a_server_with_keys_asks_for_one(box: Box, open_chat: Callable[[str], Chat], browser: Any) -> None:
    keys = box.folder / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    run = box.up(str(COUNTER), *SIZES, "--api-key-file", str(keys))
    page = browser.new_context().new_page()
    try:
        chat = Chat(page, run.url)
        page.goto(run.url)
        expect(page.locator("#state-dot")).to_have_attribute("data-kind", "locked", timeout=ANSWER_MS)
        chat.more = {"max_tokens": 8, "temperature": 0}
        chat.ask("count 17:")
        expect(page.locator("#settings")).to_be_visible()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#state-dot")).to_have_attribute("data-kind", "ready", timeout=ANSWER_MS)
        page.get_by_role("button", name="Retry").click()
        chat.over()
        expect(page.locator(".facts")).to_contain_text("tokens")
        assert page.evaluate("Object.keys(localStorage).length") == 0, "the key stays in this tab"
    finally:
        page.context.close()
    run.send(signal.SIGTERM)
    assert run.wait() == 0
