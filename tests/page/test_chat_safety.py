"""What a model writes runs nothing: 50 payloads, as answers of a real model that a regex makes write them."""

from __future__ import annotations

from typing import Any

import pytest
from chat_page import Chat

from homeserve.server.page import POLICY

pytestmark = pytest.mark.timeout(600)

PAYLOADS = (
    "<script>alert(1)</script>",
    "<SCRIPT SRC=http://evil.invalid/x.js></SCRIPT>",
    "<img src=x onerror=alert(1)>",
    "<img src='http://evil.invalid/a.png'>",
    "<svg onload=alert(1)>",
    "<svg><script>alert(1)</script></svg>",
    "<svg><animate onbegin=alert(1) attributeName=x dur=1s>",
    "<math><mtext><table><mglyph><style><img src=x onerror=alert(1)>",
    "<math href='javascript:alert(1)'>x</math>",
    "<iframe src=javascript:alert(1)></iframe>",
    "<iframe srcdoc='<script>alert(1)</script>'></iframe>",
    "<object data='data:text/html,<script>alert(1)</script>'></object>",
    "<embed src='data:image/svg+xml,<svg onload=alert(1)>'>",
    "<details open ontoggle=alert(1)>x</details>",
    "<body onload=alert(1)>",
    "<input autofocus onfocus=alert(1)>",
    "<video><source onerror=alert(1)></video>",
    "<form action=javascript:alert(1)><button>x</button></form>",
    "<meta http-equiv=refresh content='0;url=http://evil.invalid'>",
    "<base href='http://evil.invalid/'>",
    "<link rel=stylesheet href='http://evil.invalid/a.css'>",
    "<style>@import 'http://evil.invalid/a.css';</style>",
    "<div style='background:url(http://evil.invalid/a)'>x</div>",
    "<a href='javascript:alert(1)'>x</a>",
    "[x](javascript:alert(1))",
    "[x](JaVaScRiPt:alert(1))",
    "[x](java\tscript:alert(1))",
    "[x](\x01javascript:alert(1))",
    "[x](&#106;avascript:alert(1))",
    "[x](&#x6a;&#x61;vascript&colon;alert(1))",
    "[x](<javascript:alert(1)>)",
    "[x](data:text/html,<script>alert(1)</script>)",
    "[x](vbscript:msgbox(1))",
    "[x](file:///etc/passwd)",
    "[x](blob:http://evil.invalid/1)",
    '[x](http://evil.invalid "onmouseover=alert(1) x=")',
    '[x](http://evil.invalid/"onmouseover="alert(1))',
    "![x](http://evil.invalid/a.png)",
    "![x](x\"onerror=\"alert(1))",
    "<javascript:alert(1)>",
    "<http://evil.invalid/\"onclick=alert(1)>",
    "[<img src=x onerror=alert(1)>](http://evil.invalid)",
    "[a](javascript:alert(1)//[b](http://evil.invalid))",
    "```html\n<script>alert(1)</script>\n```",
    "```\"><img src=x onerror=alert(1)>\nx\n```",
    "`<img src=x onerror=alert(1)>",
    "~~~\n```\n</code></pre><script>alert(1)</script>\n~~~",
    "| a |\n|---|\n| <img src=x onerror=alert(1)> |",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img src=x onerror=alert(1)&#62;",
    "${alert(1)} {{constructor.constructor('alert(1)')()}} \u2028alert(1)\u2029 \u202ealert(1)",
)  # fmt: skip


@pytest.fixture
def chat(browser: Any, server: Any) -> Any:
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    yield Chat(context.new_page(), server.url)
    context.close()


def test_fifty_payloads_as_output_of_a_model_run_nothing(chat: Chat) -> None:
    """Each is answered, streamed and drawn like any answer; all of them stay on the page together."""
    assert len(PAYLOADS) == len(set(PAYLOADS)) == 50
    chat.open()
    for payload in PAYLOADS:
        chat.literal(payload)
        chat.ask("go")
        chat.page.click("#new") if payload == PAYLOADS[24] else None
        kept = chat.page.evaluate("() => JSON.parse(sessionStorage.getItem('homeserve.conversation') ?? '[]').at(-1)")
        assert payload == PAYLOADS[24] or kept["content"] == payload, "the model wrote it, letter by letter"
        assert chat.foreign() == [], payload
        assert all(address.startswith(("http://", "https://")) for address in chat.addresses()), payload
    chat.page.reload()
    chat.page.locator(".turn").first.wait_for()
    assert chat.foreign() == [] and chat.events == []


def test_a_link_opens_elsewhere_and_tells_nothing(chat: Chat) -> None:
    chat.open().literal("[one](https://example.invalid/a) mailto <mailto:a@b.example> https://example.invalid/b.")
    chat.ask("go")
    assert chat.addresses() == ["https://example.invalid/a", "mailto:a@b.example", "https://example.invalid/b"]
    rels = chat.page.evaluate("() => [...document.querySelectorAll('.md a')].map((node) => [node.rel, node.target])")
    assert all("noopener" in rel and "noreferrer" in rel and target == "_blank" for rel, target in rels)


def test_the_policy_stops_what_would_get_through(chat: Chat) -> None:
    """Markup that is put into the page on purpose: neither its scripts nor its styles nor its pictures come."""
    headers: list[dict[str, str]] = []
    chat.page.on("response", lambda answer: headers.append(answer.headers) if answer.url == f"{chat.url}/" else None)
    chat.open()
    assert [each["content-security-policy"] for each in headers] == [POLICY]
    script = """() => { document.body.insertAdjacentHTML("beforeend",
        "<img src=x onerror='window.ran = 1'><p id=styled style='color: rgb(1, 2, 3)'>x</p>");
        const made = document.createElement("script"); made.textContent = "window.ran = 2";
        document.body.append(made); }"""
    chat.page.evaluate(script)
    chat.page.wait_for_timeout(300)
    assert chat.page.evaluate("window.ran ?? null") is None
    assert chat.page.evaluate("getComputedStyle(document.getElementById('styled')).color") != "rgb(1, 2, 3)"
    assert any("Content Security Policy" in each for each in chat.events)
