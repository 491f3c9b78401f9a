"""Pictures of the page's chat: a real server of the default model, whose second answer a regex makes show all Markdown.

    python scripts/benchmarks/chat_pictures.py URL [--out docs/pictures] [--chromium PATH]

It needs a server of `homeserve up`, the package `playwright` and a Chromium.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SCHEMES, SIZES = ("light", "dark"), {390: 844, 1440: 900}
ANSWER_MS = 120_000
TEXT = """### Weekend plan

Bread needs **time**, *not* work. Start on `Friday`:

1. Mix flour, water and salt
   - 500 g flour
   - 350 g water
2. Fold it twice

- [x] buy flour
- [ ] feed the starter

| hour | what | degrees |
|:-----|:-----|--------:|
| 8 | rest | 22 |
| 20 | bake | 240 |

```python
def water(flour, share=0.7):  # grams
    return round(flour * share)
```

> Recipe: [bread](https://example.org/bread)"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for scheme in SCHEMES:
            for width, height in SIZES.items():
                context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": height})
                take(context.new_page(), options.url, options.out / f"chat-{scheme}-{width}.png")
                context.close()
        browser.close()
    return 0


def take(page: Any, url: str, file: Path) -> None:
    more: dict[str, Any] = {"temperature": 0, "max_tokens": 60}
    route = "**/v1/chat/completions"
    page.route(route, lambda each: each.continue_(post_data=json.dumps(each.request.post_data_json | more)))
    page.goto(url)
    ask(page, "What is the capital of France?", 1)
    special = r"\.+*?()|[]{}^$"
    regex = "".join(f"\\{mark}" if mark in special else "\\n" if mark == "\n" else mark for mark in TEXT)
    more |= {"structured_outputs": {"regex": regex}, "max_tokens": 900}
    ask(page, "Plan a weekend of baking bread, with everything that I need.", 2)
    page.screenshot(path=file)
    print(f"{file}: {file.stat().st_size} bytes")


def ask(page: Any, question: str, answers: int) -> None:
    page.fill("#input", question)
    page.keyboard.press("Enter")
    page.locator(".facts").nth(answers - 1).wait_for(timeout=ANSWER_MS)


if __name__ == "__main__":
    raise SystemExit(main())
