"""Pictures of the page's box view: a real server of two ranks, under load, that flips and loses a worker.

    python scripts/benchmarks/box_pictures.py [--out docs/pictures] [--chromium PATH]

It needs the package `playwright` and a Chromium. What is seen is what the page shows; nothing is put in.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "data" / "counter.gguf"
FLAGS = ("--devices", "cpu:2", "--layout", "pipeline", "--flip", "manual", "--threads", "1", "--max-running", "8")
SIZES = ("--context", "1024", "--kv-tokens", "8192")
SCHEMES, WIDTHS = ("light", "dark"), (390, 1440)
START_S, END_S = 120.0, 60.0
WATCHED_S, FLIP_EVERY_S = 75.0, 9.0
LOST_AT_S = 40.0
STREAMS = 5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with server() as url, busy(url):
        take(url, options.out, options.chromium)
    return 0


@contextmanager
def server() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        ready, log_file = Path(folder) / "ready.json", Path(folder) / "log"
        command = [sys.executable, "-m", "homeserve", "up", str(MODEL), "--port", "0", "--ready-file", str(ready)]
        environ = os.environ | {"HOME": folder, "PYTHONPATH": str(ROOT)}
        with log_file.open("wb") as log:
            process = subprocess.Popen([*command, *FLAGS, *SIZES], env=environ, stdout=log, stderr=log)
        try:
            end = time.monotonic() + START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the server did not start:\n{log_file.read_text()}")
                time.sleep(0.1)
            yield str(json.loads(ready.read_text())["url"])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(END_S)


@contextmanager
def busy(url: str) -> Iterator[None]:
    """Requests of several clients, a flip now and then, and once the death of a worker."""
    ended = threading.Event()
    work = [threading.Thread(target=client, args=(url, lane, ended)) for lane in range(STREAMS)]
    work.append(threading.Thread(target=trouble, args=(url, ended)))
    for thread in work:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in work:
            thread.join()


def client(url: str, lane: int, ended: threading.Event) -> None:
    """Longer and shorter prompts in turns, with pauses; what they have in common is found in the prefix cache."""
    series = " ".join(f"series {n} step 4:" for n in range(lane, lane + 20))
    turn = 0
    while not ended.wait(0.2 + 0.6 * ((lane + turn) % 3)):
        turn += 1
        prompt = f"{series}<|endoftext|>count {turn * 7}:" if turn % 2 else f"count {turn * 13 + lane}:"
        ask(url, "/v1/completions", {"prompt": prompt, "max_tokens": 80 + 90 * (turn % 4), "temperature": 0})


def trouble(url: str, ended: threading.Event) -> None:
    began, lost = time.monotonic(), False
    to = "tensor"
    while not ended.wait(FLIP_EVERY_S):
        if not lost and time.monotonic() - began > LOST_AT_S:
            lost = True
            os.kill(ask(url, "/v1/homeserve/status")["ranks"][1]["pid"], signal.SIGKILL)
            to = "tensor"
            continue
        ask(url, "/v1/homeserve/flip", {"to": to})
        to = "pipeline" if to == "tensor" else "tensor"


def ask(url: str, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def take(url: str, out: Path, chromium: str) -> None:
    """Every page is open from the beginning, so that each has watched as long."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium)
        pages = []
        for scheme in SCHEMES:
            for width in WIDTHS:
                context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
                page = context.new_page()
                page.goto(f"{url}/#box")
                pages.append((f"box-{scheme}-{width}.png", page, width))
        pages[0][1].wait_for_timeout(WATCHED_S * 1e3)
        for name, page, width in pages:
            # The view scrolls inside its frame: a window that is as high as the view shows all of it.
            high = page.evaluate("document.getElementById('box-view').scrollHeight + innerHeight - main.clientHeight")
            page.set_viewport_size({"width": width, "height": high})
            page.wait_for_timeout(1500)
            page.screenshot(path=out / name)
            print(out / name)
        browser.close()


if __name__ == "__main__":
    raise SystemExit(main())
