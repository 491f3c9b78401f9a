"""`homeserve up` on two cards of one vendor that are fakes: they copy to each other, and where such copies lie that is
said and the host's way is taken. The answer is the same.
"""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fake_box import environment_of
from fake_cards import FakeCards, fake_cards

COUNTER = Path(__file__).parents[1] / "data" / "counter.gguf"
SMALL = ("--max-running", "2", "--kv-tokens", "1024", "--context", "512", "--chunk", "32")
ASKED = {"prompt": "1 2 3 4 5", "max_tokens": 8, "temperature": 0}
SAID = " 6 7 8 9"
READY_S = 240.0


def served(box: Any, cards: FakeCards) -> tuple[Any, str, list[dict[str, Any]]]:
    """(run, what it answers in the tensor layout, events of its status)."""
    devices = ("--devices", "cuda:0,cuda:1", "--layout", "tensor", "--flip", "off")
    run = box.start("up", str(COUNTER), *devices, *SMALL, **environment_of(cards))
    run.wait_ready(READY_S)
    body = json.dumps(ASKED).encode()
    request = urllib.request.Request(run.url + "/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        text = json.load(answer)["choices"][0]["text"]
    return run, text, run.get("/v1/homeserve/status")[1]["events"]


def ended(run: Any) -> None:
    run.send(signal.SIGTERM)
    assert run.wait() == 0, run.err
    assert run.left_behind() == []


@pytest.mark.timeout(300)
def test_two_cards_of_one_vendor_copy_to_each_other(box: Any, tmp_path: Path) -> None:
    run, text, events = served(box, fake_cards(tmp_path, cuda=2, rocm=0, mib=4096))
    assert text == SAID
    assert not [event for event in events if "copies between" in event["text"]]
    ended(run)
    for rank in range(2):
        assert f"transport of rank {rank} of 2: peer (copies between all cards were seen to arrive)" in run.err


@pytest.mark.timeout(300)
def test_a_copy_that_lies_is_in_the_status_and_the_host_is_used(box: Any, tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=2, rocm=0, mib=4096)
    cards.lie("nvidia", 1)
    run, text, events = served(box, cards)
    assert text == SAID
    told = [event for event in events if "copies between the cards cannot be trusted" in event["text"]]
    assert {event["rank"] for event in told} == {0, 1}, events
    ended(run)
    assert "transport of rank 1 of 2: host" in run.err
