"""The server answers as its document says, whatever is sent to it: no 500, no hang, nothing that is not described.

500 cases here, 5 000 in `slow`. The seed is the tier's (`HOMESERVE_TEST_SEED`).
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# The test folders are no package (pytest's importlib mode); what tests of the contract share lies here.
sys.path.insert(0, str(Path(__file__).parent))

from contract_rig import GENERATING, POSTS, QUESTIONS, WORKING, Contract

SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow"
CASES = 5000 if SLOW else 500
KINDS = ("as told", "broken", "grafted")
SHARE = math.ceil(CASES / (len(POSTS) * len(KINDS)))
"""Cases of each kind for each route that takes a body; those of the others come on top."""
pytestmark = pytest.mark.timeout(3000 if SLOW else 300)


@pytest.fixture(scope="module")
def contract(server: Any) -> Iterator[Contract]:
    """At the end nothing has failed in it, died or been lost; but where a grammar had no token, that request ended, and
    its client was told why. Each of its choices counts, so the log tells whether another failed."""
    failed = server.get("/v1/homeserve/status")[1]["requests"]["failed"]
    said = len(server.err)
    yield (made := Contract(server.url))
    made.session.close()
    _, status = server.get("/v1/homeserve/status")
    assert all(rank["restarts"] == 0 for rank in status["ranks"])
    assert status["requests"]["failed"] == failed or made.undrawn, server.err
    assert re.search(r"^\S+ ERROR ", server.err[said:], re.MULTILINE) is None, server.err
    assert "Traceback" not in server.err, server.err


def test_the_document_is_openapi(contract: Contract) -> None:
    contract.schema.validate()
    assert contract.document["openapi"].startswith("3.1")


def test_every_route_with_a_body_has_a_working_one() -> None:
    assert set(POSTS) <= set(WORKING)


@pytest.mark.parametrize("path", POSTS)
def test_a_working_body_works(contract: Contract, path: str) -> None:
    answer = contract.post(path, WORKING[path])
    expected = {
        "/v1/homeserve/flip": 409,
        "/v1/homeserve/models/{id}/unload": 404,
    }  # one rank; a model that is not there
    assert answer.status_code == expected.get(path, 200), answer.text


def test_a_grammar_that_the_model_cannot_write_is_the_clients_error(contract: Contract) -> None:
    """The default model has no token for the first byte of this character."""
    before = contract.undrawn
    answer = contract.post("/v1/completions", WORKING["/v1/completions"] | {"guided_regex": "\U00040000"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "guided_regex", answer.text
    assert contract.undrawn == before + 1


@pytest.mark.parametrize("path", GENERATING)
def test_a_stream_is_what_the_document_says(contract: Contract, path: str) -> None:
    answer = contract.post(path, WORKING[path] | {"stream": True})
    assert answer.status_code == 200 and answer.headers["content-type"][0].startswith("text/event-stream")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", POSTS)
def test_bodies(contract: Contract, path: str, kind: str) -> None:
    before = contract.told.copy()
    sent = contract.run("POST", path, kind, SHARE)
    told = {status: count for (of, status), count in (contract.told - before).items() if of == kind}
    print(f"{path}, {kind}: {sent} cases, {told}")
    assert sent >= SHARE
    assert sum(told.values()) == sent
    if kind == "broken":
        assert max(told) < 500 and min(told) >= 400
    if kind == "grafted" and path in GENERATING:
        assert told.get(200, 0) >= SHARE // 5, "hardly any case reached the engine"


@pytest.mark.parametrize("method, path", QUESTIONS)
def test_questions(contract: Contract, method: str, path: str) -> None:
    assert contract.run(method, path, "as told", 5) >= 1
