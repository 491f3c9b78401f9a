"""`/v1/embeddings` over sockets: what is taken and refused, how inputs are fed, how vectors are told; and what a
model's files say of pooling."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from http_world import World, serving

from homeserve.checkpoint.pooling import pooling_of
from homeserve.errors import InvalidModelFile
from homeserve.server import embeddings
from homeserve.server.embeddings import answer_pieces, floats_of, pooling_said, shortened
from homeserve.server.embeddings_fields import INPUTS_LIMIT
from homeserve.server.held import HELD_BYTES_MAX
from homeserve.wire.records import LaneRows, NewLane, Sample, unpack_ints

HIDDEN = 8
PATH = "/v1/embeddings"


def vector(tokens: tuple[int, ...], pooling: str) -> bytes:
    """What the ranks of this world answer: told apart by text and pooling."""
    kinds = {"mean": 1.0, "last": 2.0, "cls": 3.0}
    raw = [kinds[pooling], float(sum(tokens)), float(len(tokens)), *([1.0] * (HIDDEN - 3))]
    length = math.sqrt(sum(value * value for value in raw))
    return struct.pack(f"<{HIDDEN}f", *(value / length for value in raw))


def of_text(text: str, pooling: str = "last") -> list[float]:
    return list(floats_of(vector(tuple(text.encode()), pooling)))


@asynccontextmanager
async def world_of(of_model: str = "", **settings: Any) -> AsyncIterator[World]:
    async with serving(**settings) as world:
        engine, fleet = world.model.engine, world.fleet
        engine.limits = replace(engine.limits, hidden=HIDDEN)
        world.change(model=replace(world.model.model, pooling=of_model))
        lanes: dict[int, NewLane] = {}
        seen: dict[int, list[int]] = {}
        issue, draw = fleet.issue, fleet._sample

        def remembering(
            kind: Any, *, new: tuple[NewLane, ...] = (), rows: tuple[LaneRows, ...] = (), **more: Any
        ) -> int:
            lanes.update({lane.lane: lane for lane in new})
            seen.update({lane.request: [] for lane in new})
            for row in rows:
                seen[row.request] += unpack_ints(row.tokens) if row.tokens else []
            return issue(kind, new=new, rows=rows, **more)

        def sample(row: LaneRows) -> Sample:
            pooling = lanes[row.lane].pooling
            if not pooling:
                return draw(row)
            return Sample(row.lane, row.request, 1, -1, embedding=vector(tuple(seen[row.request]), pooling))

        fleet.issue, fleet._sample = remembering, sample  # type: ignore[method-assign]
        yield world


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


def told(body: Mapping[str, Any]) -> list[list[float]]:
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return [each["embedding"] for each in body["data"]]


def test_every_form_of_input_is_taken() -> None:
    async def main() -> None:
        async with world_of() as world:
            for given, texts in (
                ("abc", ["abc"]),
                (["abc", "de"], ["abc", "de"]),
                ([97, 98, 99], ["abc"]),
                ([[97, 98, 99], [100, 101]], ["abc", "de"]),
            ):
                status, body = await world.post(PATH, {"input": given, "model": "tiny", "user": "somebody"})
                assert status == 200 and told(body) == [of_text(text) for text in texts]
                count = sum(map(len, texts))
                assert body["usage"] == {"prompt_tokens": count, "total_tokens": count}
                assert (body["object"], body["model"]) == ("list", "tiny")
                assert all(each["object"] == "embedding" for each in body["data"])

    run(main)


def test_base64_has_the_same_numbers_as_little_endian_float32() -> None:
    async def main() -> None:
        async with world_of() as world:
            _, floats = await world.post(PATH, {"input": ["abc", "d"], "encoding_format": "float"})
            _, packed = await world.post(PATH, {"input": ["abc", "d"], "encoding_format": "base64"})
            for numbers, text in zip(told(floats), told(packed), strict=True):
                raw = base64.b64decode(text)  # type: ignore[arg-type]
                assert [struct.unpack_from("<f", raw, 4 * at)[0] for at in range(HIDDEN)] == numbers
                assert len(raw) == 4 * HIDDEN

    run(main)


def test_fewer_dimensions_are_the_first_ones_of_length_1() -> None:
    async def main() -> None:
        async with world_of() as world:
            _, body = await world.post(PATH, {"input": "abc", "dimensions": 3})
            (cut,) = told(body)
            whole = of_text("abc")[:3]
            assert cut == pytest.approx([value / math.hypot(*whole) for value in whole], rel=1e-6)
            assert math.hypot(*cut) == pytest.approx(1, abs=1e-6)
            _, body = await world.post(PATH, {"input": "abc", "dimensions": HIDDEN})
            assert told(body) == [of_text("abc")]
            status, body = await world.post(PATH, {"input": "abc", "dimensions": HIDDEN + 1})
            assert (status, body["error"]["param"]) == (400, "dimensions") and "have 8" in body["error"]["message"]

    run(main)


@pytest.mark.parametrize(("setting", "model", "field", "pooling"), [
    ("auto", "", None, "last"), ("auto", "mean", None, "mean"), ("cls", "mean", None, "cls"),
    ("cls", "mean", "last", "last"), ("auto", "mean", "cls", "cls"),
])  # fmt: skip
def test_the_request_the_setting_and_the_model_say_how_to_pool_in_this_order(
    setting: str, model: str, field: str | None, pooling: str
) -> None:
    async def main() -> None:
        async with world_of(model, pooling=setting) as world:
            _, body = await world.post(PATH, {"input": "abc", "pooling": field})
            assert told(body) == [of_text("abc", pooling)]

    run(main)
    assert pooling_said("auto", "") == "last"


@pytest.mark.parametrize(("fields", "param", "code"), [
    ({}, "input", "invalid_field"),
    ({"input": []}, "input", "invalid_field"),
    ({"input": ""}, "input", "invalid_field"),
    ({"input": ["a", ""]}, "input[1]", "invalid_field"),
    ({"input": [[]]}, "input[0]", "invalid_field"),
    ({"input": ["a", 3]}, "input", "invalid_field"),
    ({"input": ["a", [3]]}, "input", "invalid_field"),
    ({"input": 7}, "input", "invalid_field"),
    ({"input": {"text": "a"}}, "input", "invalid_field"),
    ({"input": [[1, "a"]]}, "input[0][1]", "invalid_field"),
    ({"input": [[1], [2, 257]]}, "input[1][1]", "invalid_field"),
    ({"input": [-1]}, "input[0]", "invalid_field"),
    ({"input": "a" * 300}, "input", "context_overflow"),
    ({"input": ["a", "a" * 300]}, "input[1]", "context_overflow"),
    ({"input": [[1], [2] * 257]}, "input[1]", "context_overflow"),
    ({"input": ["a"] * (INPUTS_LIMIT + 1)}, "input", "invalid_field"),
    ({"input": "a", "encoding_format": "hex"}, "encoding_format", "invalid_field"),
    ({"input": "a", "dimensions": 0}, "dimensions", "invalid_field"),
    ({"input": "a", "pooling": "max"}, "pooling", "invalid_field"),
    ({"input": "a", "add_special_tokens": "yes"}, "add_special_tokens", "invalid_field"),
    ({"input": "a", "model": "other"}, "model", "model_not_found"),
])  # fmt: skip
def test_what_cannot_be_embedded_is_refused_by_name(fields: dict[str, Any], param: str, code: str) -> None:
    async def main() -> None:
        async with world_of() as world:
            status, body = await world.post(PATH, fields)
            assert status == (404 if code == "model_not_found" else 400), body
            assert (body["error"]["param"], body["error"]["code"]) == (param, code), body
            assert not world.running, "nothing of it was computed"

    run(main)


def test_an_input_may_fill_the_context() -> None:
    async def main() -> None:
        async with world_of() as world:
            status, body = await world.post(PATH, {"input": ["b" * 256]})
            assert status == 200 and told(body) == [of_text("b" * 256)]

    run(main)


def test_many_inputs_are_fed_in_turn_and_take_few_places() -> None:
    async def main() -> None:
        async with world_of(waiting=6) as world:
            most = 0

            async def watch() -> None:
                nonlocal most
                while True:
                    most = max(most, world.running)
                    await asyncio.sleep(0)

            watching = asyncio.create_task(watch())
            status, body = await world.post(PATH, {"input": [f"text {at}" for at in range(200)]})
            watching.cancel()
            assert status == 200 and told(body) == [of_text(f"text {at}") for at in range(200)]
            assert 1 < most <= 8, "two windows of the four that run together"
            assert not world.running

    run(main)


def test_where_the_queue_is_short_inputs_wait_for_their_own() -> None:
    async def main() -> None:
        async with world_of(waiting=0) as world:
            status, body = await world.post(PATH, {"input": [f"text {at}" for at in range(30)]})
            assert status == 200 and told(body) == [of_text(f"text {at}") for at in range(30)]
            world.fleet.held = True
            open_ones = [asyncio.create_task(world.complete(max_tokens=2)) for _ in range(4)]
            await world.wait_for(lambda: world.running == 4)
            status, body = await world.post(PATH, {"input": ["a", "b"]})
            assert (status, body["error"]["code"]) == (429, "queue_full")
            world.fleet.held = False
            world.fleet.release()
            assert [status for status, _ in await asyncio.gather(*open_ones)] == [200] * 4

    run(main)


def test_what_requests_keep_together_is_bounded() -> None:
    """Told by a model that is as wide as it takes."""

    async def main() -> None:
        async with world_of() as world:
            engine = world.model.engine
            engine.limits = replace(engine.limits, hidden=HELD_BYTES_MAX // 4 // 5)
            world.fleet.held = True
            body = {"input": ["a"] * 6, "dimensions": HIDDEN}
            first = asyncio.create_task(world.post(PATH, body))  # alone, whatever it keeps
            await world.wait_for(lambda: world.running == 6)
            status, told = await world.post(PATH, {"input": "b", "dimensions": HIDDEN})
            assert (status, told["error"]["code"]) == (429, "queue_full") and "hold" in told["error"]["message"]
            world.fleet.held = False
            world.fleet.release()
            assert (await first)[0] == 200
            assert (await world.post(PATH, {"input": "b", "dimensions": HIDDEN}))[0] == 200, "nothing is held any more"

    run(main)


def test_a_client_that_leaves_takes_all_of_its_inputs_along() -> None:
    async def main() -> None:
        async with world_of() as world:
            world.fleet.held = True
            leaving = asyncio.create_task(world.post(PATH, {"input": [f"text {at}" for at in range(20)]}))
            await world.wait_for(lambda: world.running == 8)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            await world.wait_for(lambda: not world.running)
            world.fleet.held = False
            world.fleet.release()
            status, body = await world.post(PATH, {"input": "abc"})
            assert status == 200 and told(body) == [of_text("abc")]

    run(main)


def test_an_input_without_an_embedding_fails_the_request_and_nobody_else() -> None:
    async def main() -> None:
        async with world_of() as world:
            whole = world.fleet._sample

            def failing(row: LaneRows) -> Sample:
                made = whole(row)
                return replace_failed(made) if made.embedding else made

            def replace_failed(made: Sample) -> Sample:
                return Sample(made.lane, made.request, made.position, -1, failed="no numbers")

            world.fleet._sample = failing  # type: ignore[method-assign]
            status, body = await world.post(PATH, {"input": ["a", "b", "c"]})
            assert (status, body["error"]["code"]) == (500, "server_error") and "numbers" not in body["error"][
                "message"
            ]
            await world.wait_for(lambda: not world.running)
            status, _ = await world.complete(max_tokens=2)
            assert status == 200

    run(main)


def test_a_long_answer_comes_in_pieces_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "WHOLE_FLOATS", 10 * HIDDEN)

    async def main() -> None:
        async with world_of() as world:
            for inputs in (10, 11, 40):
                body = {"input": [[at] for at in range(inputs)]}
                async with world.client.post(world.url(PATH), json=body) as got:
                    answer = json.loads(await got.read())
                    assert got.status == 200 and got.content_type == "application/json"
                    assert (got.headers.get("Content-Length") is None) == (inputs > 10)
                assert told(answer) == [list(floats_of(vector((at,), "last"))) for at in range(inputs)]

    run(main)


def test_a_bug_behind_the_head_ends_the_connection_and_is_no_second_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Iterator[bytes]:
        yield b'{"object":'
        raise RuntimeError("a bug")

    async def scenario() -> None:
        monkeypatch.setattr(embeddings, "WHOLE_FLOATS", 0)
        monkeypatch.setattr(embeddings, "answer_pieces", broken)
        async with world_of() as world:
            got = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                async with world.client.post(world.url(PATH), json={"input": "a"}) as response:
                    assert response.status == 200
                    async for data in response.content.iter_any():
                        got += data
            assert got == b'{"object":'

    asyncio.run(scenario())


def test_pieces_of_an_answer_are_one_json() -> None:
    vectors = [vector((at,), "mean") for at in range(5)]
    body = json.loads(b"".join(answer_pieces(vectors, 'a "model"', 9, 3, None)))
    assert body["model"] == 'a "model"' and body["usage"]["total_tokens"] == 9
    assert [each["embedding"] for each in body["data"]] == [list(floats_of(shortened(each, 3))) for each in vectors]
    assert shortened(struct.pack("<3f", 0, 0, 1), 2) == bytes(8), "what has no length stays what it is"


# ------------------------------------------------------------------------------------------------- what the files say


@pytest.mark.parametrize(
    ("said", "pooling"), [(None, ""), (0, ""), (1, "mean"), (2, "cls"), (3, "last"), (4, ""), ("x", "")]
)
def test_a_gguf_says_how_to_pool_by_its_key(said: object, pooling: str) -> None:
    metadata = {} if said is None else {"llama.pooling_type": said, "qwen2.pooling_type": 1}
    assert pooling_of("model.gguf", "llama", metadata) == pooling


def folder(path: Path, modules: object, config: object) -> str:
    (path / "1_Pooling").mkdir()
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return str(path)


MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]


@pytest.mark.parametrize(("flags", "pooling"), [
    ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
    ({"pooling_mode_cls_token": True}, "cls"),
    ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
    ({"pooling_mode_max_tokens": True}, ""),
    ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ""),
    ({}, ""),
])  # fmt: skip
def test_a_folder_says_how_to_pool_by_its_modules(tmp_path: Path, flags: object, pooling: str) -> None:
    assert pooling_of(folder(tmp_path, MODULES, {"word_embedding_dimension": 8, **flags}), "llama", {}) == pooling  # type: ignore[dict-item]


def test_a_folder_without_modules_says_nothing(tmp_path: Path) -> None:
    assert pooling_of(str(tmp_path), "llama", {"llama.pooling_type": 1}) == ""
    (tmp_path / "modules.json").write_text(json.dumps(MODULES[:1]))
    assert pooling_of(str(tmp_path), "llama", {}) == ""


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "", ".."])
def test_a_module_that_lies_elsewhere_is_refused(tmp_path: Path, path: str) -> None:
    made = folder(tmp_path, [{**MODULES[1], "path": path}], {"pooling_mode_mean_tokens": True})
    with pytest.raises(InvalidModelFile, match="is no folder beside it"):
        pooling_of(made, "llama", {})


def test_damaged_modules_are_named(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[{")
    with pytest.raises(InvalidModelFile, match="modules.json"):
        pooling_of(str(tmp_path), "llama", {})
