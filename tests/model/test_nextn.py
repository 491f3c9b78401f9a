"""The drafting block of a model: its logits are those of an independent forward, whatever backend, ranks and layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleet_rig import Fleet
from flipping_ranks import Flipping, copy_home
from nextn_oracle import Oracle, read
from ranks import Group, on_paper, over_memory
from wide_models import DRAFTING, wide

from backends.base import Backend, OpenOptions, WeightHome
from backends.reference.backend import ReferenceBackend
from backends.registry import open_backend
from homeserve import checkpoint
from homeserve.models import registry

TINY = Path(__file__).parent.parent / "data" / "tiny"
FILES = ("qwen3_5_text_mtp", "qwen3_next_mtp")
TOLERANCE = {"reference": 1e-5, "cpu": 1e-4}
DRAFTS = 3
PROMPT = [(7 * at * at + 31 * at + 5) % 512 for at in range(40)]
OTHER_PROMPT = [(11 * at * at + 3 * at + 9) % 512 for at in range(40)]


def device(name: str) -> Callable[[], Backend]:
    extra = {"dtype": "float64"} if name == "reference" else {}
    return lambda: open_backend(name, OpenOptions(threads=1, extra=extra))


def floats() -> Backend:
    return ReferenceBackend(OpenOptions())


@pytest.fixture
def acts() -> Iterator[Callable[[str, int], Group]]:
    """How ranks of a backend exchange."""
    with ExitStack() as stack:

        def group(backend: str, ranks: int) -> Group:
            if backend == "reference":
                return on_paper(ranks)
            native = stack.enter_context(closing(device("cpu")()))
            return stack.enter_context(over_memory(native.library, ranks))  # type: ignore[attr-defined]

        yield group


def chains(fleet: Fleet, tokens: Sequence[int], drafted: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits of the trunk `[tokens, vocab]`, and of a chain `[chunks, drafts, vocab]` where each chunk begins, from the
    token there on and then on the `drafted` ones."""
    trunk, found = [], []
    for at in range(0, len(tokens), chunk):
        chain = [int(tokens[at]), *drafted[at]]
        steps = [fleet.draft([(1, at + step, chain[step], 0 if step else -1)]) for step in range(DRAFTS)]
        found.append(np.concatenate(steps))
        trunk.append(fleet.run([(1, at, tokens[at : at + chunk])]))
    return np.concatenate(trunk), np.array(found)


@cache
def known(path: str) -> tuple[Oracle, list[int]]:
    ids = np.random.default_rng(5).integers(0, 512, 30).tolist()
    return read(path), ids


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", FILES)
def test_drafts_are_those_of_an_independent_forward(
    measured: Callable[[str], None], name: str, backend: str, chunk: int
) -> None:
    """At every position of a prompt, or where each of its chunks begins: the row of the known token, and two drafts
    that go on from its hidden state."""
    path = str(TINY / f"{name}.f32.gguf")
    oracle, ids = known(path)
    wanted, drafted = oracle.chains(ids, DRAFTS)
    opened = checkpoint.open(path, registry.folder_families)
    family = registry.family(opened.arch)
    fleet = Fleet(family, family.config_from(opened.metadata), opened.tensors, backend=device(backend), drafts=True)
    trunk, found = chains(fleet, ids, drafted, chunk)
    fleet.close()
    opened.close()
    error = float(np.abs(found - wanted[::chunk]).max())
    measured(f"{name}, drafts on {backend}: logits within {error:.1e} of NumPy, of {np.abs(wanted).max():.2f}")
    assert error < TOLERANCE[backend]
    assert np.abs(trunk - oracle.logits(oracle.hidden(ids))).max() < TOLERANCE[backend]
    assert np.array_equal(found.argmax(axis=2), drafted[::chunk])
    assert len({tuple(each) for each in drafted}) > len(ids) // 2, "the drafts depend on the text"


MTP_NAMES = {
    "nextn.eh_proj": "fc",
    "nextn.enorm": "pre_fc_norm_embedding",
    "nextn.hnorm": "pre_fc_norm_hidden",
    "nextn.shared_head_norm": "norm",
    "attn_norm": "layers.0.input_layernorm",
    "post_attention_norm": "layers.0.post_attention_layernorm",
    **{f"attn_{part}": f"layers.0.self_attn.{part}_proj" for part in "qkv"},
    **{f"attn_{part}_norm": f"layers.0.self_attn.{part}_norm" for part in "qk"},
    "attn_output": "layers.0.self_attn.o_proj",
    **{f"ffn_{part}": f"layers.0.mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def test_a_safetensors_folder_with_a_drafting_block_drafts_as_the_file_does(tmp_path: Path) -> None:
    """The block as Qwen stores it: names of its own, norms less one."""
    oracle, ids = known(str(TINY / "qwen3_5_text_mtp.f32.gguf"))
    wanted, drafted = oracle.chains(ids, DRAFTS)
    for each in (TINY / "qwen3_5_text").iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    raw = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, data = json.loads(raw[8 : 8 + size]), bytearray(raw[8 + size :])
    for role, name in MTP_NAMES.items():
        values = oracle.weights[f"blk.4.{role}.weight"].astype(np.float32) - ("norm" in role)
        offsets = [len(data), len(data) + values.nbytes]
        header[f"mtp.{name}.weight"] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": offsets}
        data += values.astype(np.float32).tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    opened = checkpoint.open(str(tmp_path), registry.folder_families)
    family = registry.family(opened.arch)
    fleet = Fleet(family, family.config_from(opened.metadata), opened.tensors, backend=device("reference"), drafts=True)
    _, found = chains(fleet, ids, drafted, 7)
    fleet.close()
    opened.close()
    assert np.abs(found - wanted[::7]).max() < TOLERANCE["reference"]


# --------------------------------------------------------------------------------------------------------- generated


def oracle_of(form: str) -> Oracle:
    """Of a made-up model whose tensors are floats."""
    model = wide(form, drafts=True)
    facts = {key.partition(".")[2]: value for key, value in model.metadata.items()}
    weights = {
        name: np.frombuffer(view.data, np.float32).astype(np.float64).reshape(view.rows, view.cols)
        for name, view in model.tensors.items()
    }
    flat = {name: each[0] if len(each) == 1 and "shexp" not in name else each for name, each in weights.items()}
    return Oracle(model.family.name, facts, flat)


@cache
def wanted_of(form: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of the trunk, of chains at every position, and their tokens."""
    oracle = oracle_of(form)
    return oracle.logits(oracle.hidden(PROMPT)), *oracle.chains(PROMPT, DRAFTS)


FORMS = ("qwen35", "qwen35 tied", "qwen35moe", "qwen3next")
VECTORS = ((1, 1), (2, 1, 1), (30, 17, 17), (28, 26, 20))
BOUNDS = {"reference": 1e-5, "cpu": 1e-3}
"""Logits of the made-up models are about 6; floats of 32 bits leave up to 5e-5 of them."""


def fleet_of(form: str, layout: str, ratio: Sequence[int], backend: Callable[[], Backend], **more: Any) -> Fleet:
    model = wide(form, drafts=True)
    given = (model.family, model.config, model.tensors, layout, ratio, tuple(ratio)[::-1])
    return Fleet(*given, backend=backend, drafts=True, **more)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_alone_drafts_as_the_forward_does(form: str, backend: str) -> None:
    trunk, wanted, drafted = wanted_of(form)
    fleet = fleet_of(form, "pipeline", (1,), device(backend))
    got, found = chains(fleet, PROMPT, drafted, 4)
    fleet.close()
    assert np.abs(found - wanted[::4]).max() < BOUNDS[backend]
    assert np.abs(got - trunk).max() < BOUNDS[backend]


@pytest.mark.parametrize("ratio", VECTORS)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("form", FORMS)
def test_ranks_of_the_tensor_layout_draft_as_the_forward_does(
    acts: Callable[[str, int], Group], form: str, backend: str, ratio: tuple[int, ...]
) -> None:
    trunk, wanted, drafted = wanted_of(form)
    fleet = fleet_of(form, "tensor", ratio, device(backend), group=acts(backend, len(ratio)))
    assert all(bound.drafts and bound.drafting_block for bound in fleet.bounds)
    got, found = chains(fleet, PROMPT, drafted, 9)
    fleet.close()
    assert np.abs(found - wanted[::9]).max() < BOUNDS[backend]
    assert np.abs(got - trunk).max() < BOUNDS[backend]
    assert len(fleet.owners(1, len(PROMPT))) > 1, "rows of the drafting block lie on several ranks"


@pytest.mark.parametrize("ratio", [(1, 1), (2, 1, 1)])
def test_a_rank_without_columns_of_the_joining_matrix_adds_nothing(ratio: tuple[int, ...]) -> None:
    """Blocks of 32 leave two ranks a part of 64 columns, and the third none."""
    form = "qwen35 blocks"
    alone, fleet = (fleet_of(form, *how, device("reference")) for how in (("pipeline", (1,)), ("tensor", ratio)))
    columns = [bound.state_layers[-1] for bound in fleet.bounds]
    assert [layer.channels for layer in columns if not layer.heads] == [32, 32]
    one, other = ([*chains(each, PROMPT, np.array([PROMPT] * 40), 9)] for each in (alone, fleet))
    for wanted, found in zip(one, other, strict=True):
        assert np.abs(found - wanted).max() < 1e-5 and np.abs(wanted).max() > 1


def kept(fleet: Fleet, lane: int, tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """K, V `[tokens, kv_heads, head_dim]` of the drafting block by position, and the row that it keeps `[hidden]`, put
    together from all ranks of the oracle."""
    keys, values, columns = {}, {}, []
    for rank, (bound, program) in enumerate(zip(fleet.bounds, fleet.programs, strict=True)):
        if not bound.drafting_block:
            continue
        layer = len(bound.kv_layers) - 1
        for position in range(tokens):
            page = int(fleet.tables[0][lane][position // 16])
            owner, row = fleet.rule.place(page * 16)
            if owner == (rank if fleet.layout == "tensor" else 0):
                keys[position] = program.pools.k[layer][row + position % 16]
                values[position] = program.pools.v[layer][row + position % 16]
        if bound.state_layers and not bound.state_layers[-1].heads:
            columns.append(program.states.conv[-1][fleet.states[lane], 0])
    return *(np.stack([of[at] for at in range(tokens)]) for of in (keys, values)), np.concatenate(columns)


@pytest.mark.parametrize("layout", ["pipeline", "tensor"])
@pytest.mark.parametrize("ratio", VECTORS)
@pytest.mark.parametrize("form", ["qwen35", "qwen3next"])
def test_k_v_and_the_row_kept_are_those_of_one_rank(form: str, ratio: tuple[int, ...], layout: str) -> None:
    """In the pipeline layout to the bit: it is the last rank alone that has them."""
    alone, fleet = (fleet_of(form, *how, device("reference")) for how in (("pipeline", (1,)), (layout, ratio)))
    for each in (alone, fleet):
        each.logits(PROMPT, chunk=13, lane=2)
        each.run([(1, 0, OTHER_PROMPT[:9])])
    if layout == "pipeline":
        assert [bound.drafting_block for bound in fleet.bounds] == [False] * (len(ratio) - 1) + [True]
        assert not any(bound.drafts for bound in fleet.bounds)
    for lane, tokens in ((2, len(PROMPT)), (1, 9)):
        for one, other in zip(kept(alone, lane, tokens), kept(fleet, lane, tokens), strict=True):
            assert np.abs(one).max() > 0.5
            assert np.array_equal(one, other) if layout == "pipeline" else np.abs(one - other).max() < 1e-9


@pytest.mark.parametrize("how", [("pipeline", (1,)), ("tensor", (2, 1, 1)), ("pipeline", (2, 1, 1))])
@pytest.mark.parametrize("form", ["qwen35", "qwen3next"])
def test_rows_that_count_leave_what_plain_decoding_leaves(form: str, how: tuple[str, tuple[int, ...]]) -> None:
    """For every number of rows, with another lane whose rows all count, and to the bit."""
    rows = PROMPT[11:15]
    for count in range(len(rows) + 1):
        held, plain = after_rows(form, how, rows, count, floats)
        for one, other in zip(held.programs, plain.programs, strict=True):
            mine, theirs = ([*each.states.conv, *each.states.matrix] for each in (one, other))
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
        found = [each.run([(0, 11 + count, OTHER_PROMPT[:3])]) for each in (held, plain)]
        assert np.array_equal(*found)


def after_rows(
    form: str, how: tuple[str, tuple[int, ...]], rows: Sequence[int], count: int, backend: Callable[[], Backend]
) -> tuple[Fleet, Fleet]:
    """Fleets in which the first `count` of `rows` follow a prompt: held and accepted, and one after another."""
    held, plain = (fleet_of(form, *how, backend) for _ in range(2))
    for fleet in (held, plain):
        fleet.run([(0, 0, PROMPT[:11]), (3, 0, OTHER_PROMPT[:5])])
    held.run([(3, 5, OTHER_PROMPT[5:6]), (0, 11, rows)], hold=[0])
    held.accept([(0, count)])
    plain.run([(3, 5, OTHER_PROMPT[5:6])])
    for at in range(count):
        plain.run([(0, 11 + at, rows[at : at + 1])])
    return held, plain


@pytest.mark.parametrize("form", sorted(DRAFTING))
def test_rows_that_count_go_on_as_after_plain_decoding_on_the_cpu_backend(form: str) -> None:
    """Logits of the trunk and of drafts are the same bits, whatever number of rows counted."""
    rows = PROMPT[11:15]
    for count in range(len(rows) + 1):
        held, plain = after_rows(form, ("pipeline", (1,)), rows, count, device("cpu"))
        found = []
        for each in (held, plain):
            drafts = [(0, 11 + count, 7, -1), (3, 6, 9, -1)]
            found.append((each.draft(drafts), each.run([(0, 11 + count, OTHER_PROMPT[:3]), (3, 6, PROMPT[:2])])))
            each.close()
        assert all(np.array_equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("form", sorted(DRAFTING))
def test_with_its_drafting_block_a_model_gives_the_same_bits(form: str) -> None:
    model = wide(form, drafts=True)
    with_block, without = (Fleet(model.family, model.config, model.tensors, drafts=each) for each in (True, False))
    assert np.array_equal(with_block.logits(PROMPT, chunk=11), without.logits(PROMPT, chunk=11))


# -------------------------------------------------------------------------------------------------------------- flips


def images_home(rank: int, ranks: int, whole: Any, fd: int) -> WeightHome:
    return WeightHome("images", rank, ranks)


@pytest.mark.parametrize("ratio", [(1, 1), (2, 1, 1)])
@pytest.mark.parametrize(("backend", "home"), [("reference", copy_home), ("cpu", copy_home), ("cpu", images_home)])
@pytest.mark.parametrize("form", ["qwen35", "qwen35 blocks", "qwen3next"])
def test_a_flip_moves_what_drafts_are_made_of(
    acts: Callable[[str, int], Group], form: str, backend: str, home: Callable[..., WeightHome], ratio: tuple[int, ...]
) -> None:
    """Prefilled in the pipeline layout, where nothing is drafted: the first step of the tensor layout drafts as one
    rank does that has seen it all, and so after a way back and forth."""
    opener = floats if backend == "reference" else device(backend)
    alone = fleet_of(form, "pipeline", (1,), opener)
    ranks = Flipping(form, ratio, acts(backend, len(ratio)), opener, home, drafts=True)
    bound = 5e-3 if "blocks" in form else 2e-4
    for each in (alone, ranks):
        each.run([(0, 0, PROMPT[:37]), (2, 0, OTHER_PROMPT[:21])])
    for step, flips in enumerate((1, 2)):
        for _ in range(flips):
            assert ranks.flip({0: 37 + step, 2: 21 + step})
        drafts = [(0, 37 + step, PROMPT[37 + step], -1), (2, 21 + step, OTHER_PROMPT[21 + step], -1)]
        again = [(2, 22 + step, 17, 1), (0, 38 + step, 30, 0)]
        for rows in (drafts, again):
            np.testing.assert_allclose(ranks.draft(rows), alone.draft(rows), atol=bound)
        pieces = [(0, 37 + step, [PROMPT[37 + step], 5, 6]), (2, 21 + step, [OTHER_PROMPT[21 + step], 7])]
        np.testing.assert_allclose(*(each.run(pieces, hold=[0, 2]) for each in (ranks, alone)), atol=bound)
        for each in (ranks, alone):
            each.accept([(0, 1), (2, 1)])
    ranks.close()
    alone.close()


@pytest.mark.parametrize("ratio", VECTORS)
@pytest.mark.parametrize("form", ["qwen35", "qwen35 blocks", "qwen3next"])
def test_in_unified_memory_a_tensor_layout_drafts_from_what_a_pipeline_has_left(
    acts: Callable[[str, int], Group], form: str, ratio: tuple[int, ...]
) -> None:
    """Over the same pools, where nothing moves. One rank holds rows, several do in the tensor layout."""
    alone, group = fleet_of(form, "pipeline", (1,), device("cpu")), acts("cpu", len(ratio))
    shared: dict[str, Any] = {"unified": True}
    before = fleet_of(form, "pipeline", ratio, device("cpu"), group=group, later=("tensor", ratio), **shared)
    after = fleet_of(form, "tensor", ratio, device("cpu"), over=before, **shared)
    bound = 5e-3 if "blocks" in form else 2e-4
    for each in (alone, before):
        each.run([(0, 0, PROMPT[:36]), (2, 0, OTHER_PROMPT[:21])])
    alone.run([(0, 36, [PROMPT[36], 5, 6])], hold=[0])
    alone.accept([(0, 1)])
    before.run([(0, 36, [PROMPT[36]])])
    drafts = [(0, 37, PROMPT[37], -1), (2, 21, OTHER_PROMPT[21], -1)]
    for rows in (drafts, [(2, 22, 17, 1), (0, 38, 30, 0)]):
        np.testing.assert_allclose(after.draft(rows), alone.draft(rows), atol=bound)
    for count in (2, 0):
        found = []
        for each in (after, alone):
            found.append(each.run([(0, 37, [PROMPT[37], 8, 9]), (2, 21, OTHER_PROMPT[21:22])], hold=[0]))
            each.accept([(0, count)])
        np.testing.assert_allclose(*found, atol=bound)
    for each in (alone, after, before):
        each.close()
