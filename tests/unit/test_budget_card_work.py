"""What the budget foresees of a rank on a card, against what its plan takes, line by line: in either layout, cut
unevenly, of models of real measurements and of every tiny one."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import hollow_models

from backends.base import NO_STATES, Limits, StatePool, TensorView, WeightHome
from backends.gpu import batch
from backends.gpu.arch import arch
from backends.gpu.copies import Directory
from backends.gpu.device import CardFacts
from backends.gpu.ops import attention as ops
from backends.gpu.ops import delta
from backends.gpu.plan import Plan
from backends.gpu.pools import kv_layer_bytes
from backends.gpu.staging import STAGING_BYTES
from backends.gpu.states import slot_bytes
from backends.gpu.steps import attention
from backends.gpu.steps.base import stride_of
from backends.gpu.transport.base import EXCHANGE, room_of
from backends.gpu.transport.mailboxes import MailboxShape
from backends.gpu.weights import CardWeights
from backends.quant import QuantType
from backends.sections import hidden_rows
from budget import card_work, host_lines
from budget.ceilings import ceilings
from budget.cuts import even_cut
from budget.job import Job, settle
from budget.job import Share as Held
from budget.ledger import ALWAYS, PIPELINE, TENSOR
from budget.placement import Cut, Option, Shard, pipeline_shares, tensor_shares
from budget.profile import box_from_json
from budget.ranks import plans_in_flight
from budget.shape import load_shape
from budget.terms import terms
from budget.wish import PAGE, Wish
from homeserve import checkpoint
from homeserve.layouts.share import Share
from homeserve.models.bind import Bound, bind
from homeserve.models.registry import family
from homeserve.models.shape import shape_of
from homeserve.worker.places import own_pages

KIND = arch("sm_86")
FACTS = CardFacts(KIND.vendor, 0, "GPU-1", "0000:01:00.0", "A card", KIND, 32, 80, 24 << 30, False, "12", True, 1 << 21)
TINY = Path(__file__).parents[1] / "data" / "tiny"
TINY_MODELS = sorted(path.name.removesuffix(".f32.gguf") for path in TINY.glob("*.f32.gguf"))
CARD = {"vendor": "nvidia", "name": "A card", "uma": False, "vram_total_mib": 24576, "vram_free_mib": 24576}
BOX = {"id": "b", "mem_total_mib": 64000, "mem_available_mib": 64000, "gpus": [CARD] * 3}
CEILINGS = ceilings(box_from_json(BOX, "b"), None)
Shares = tuple[Held, ...]


@dataclass(frozen=True)
class Load:
    """Limits of a server."""

    chunk: int = 256
    running: int = 16
    context: int = 8192
    drafts: int = 3

    def wish(self) -> Wish:
        return Wish(
            chunk=self.chunk, running=self.running, context=self.context, kv_tokens=self.context, drafts=self.drafts,
            draft=self.drafts > 0, like_cpu=True, resident=False,
        )  # fmt: skip


LOADS = {
    "usual": Load(),
    "long": Load(context=131072),
    "many": Load(chunk=2048, running=64, context=32768),
    "no drafts": Load(chunk=512, running=4, context=4096, drafts=0),
}


@functools.cache
def model_of(name: str) -> hollow_models.Hollow:
    if name in hollow_models.MODELS:
        return hollow_models.hollow(name)
    opened = checkpoint.open(str(TINY / f"{name}.f32.gguf"))
    declared = family(opened.arch)
    config = declared.config_from(opened.metadata)
    shape = shape_of(declared, config, opened.tensors, name=name, quant="F32")
    tensors = {each: TensorView(each, v.type, v.rows, v.cols, v.data.copy()) for each, v in opened.tensors.items()}
    opened.close()
    return hollow_models.Hollow(declared, config, tensors, shape)


def bound_of(name: str, job: Job, share: Share | None = None) -> Bound:
    return _bound(name, share, job.drafts > 0)


@functools.cache
def _bound(name: str, share: Share | None, drafts: bool) -> Bound:
    model = model_of(name)
    return bind(model.family, model.config, model.tensors, share, drafts=drafts)


class Rank:
    """What a rank really takes."""

    def __init__(self, job: Job, bound: Bound, vector: tuple[int, ...] = (), rank: int | None = None, ranks: int = 1):
        held = job.running * (1 + job.drafts) if job.drafts else 0
        limits = Limits(job.rows, job.logit_rows, job.running, -(-job.context // PAGE), held)
        granule = PAGE * (sum(vector) or 1)
        tokens = -(-job.context // granule) * granule
        slots = (tokens, *(min(tokens, job.window_slots(window)) for window in bound.windows))
        if vector:
            slots = own_pages(slots, vector, rank or 0).slots
        kv = bound.kv_pool(slots[0], QuantType.F16, slots[1:])
        states = StatePool(bound.state_layers, job.running + job.checkpoints) if bound.state_layers else NO_STATES
        self.plan = Plan(FACTS, bound.ops, bound.weights, kv, limits, states, rank, ranks)
        self.weights = CardWeights(bound.ops, bound.weights).nbytes
        outputs = [(self.plan.output(at), self.plan.rules(at)) for at in range(len(self.plan.sections))]
        logits = [4 * (of.logit_rows if out.scope else of.rows) * stride_of(out.width) for out, of in outputs]
        if (rows := hidden_rows(bound.ops)) is not None:
            logits.append(4 * limits.rows * stride_of(rows.buffer.width))
        self.lines = {
            host_lines.WORKSPACE: self.plan.workspace.nbytes,
            host_lines.DRAFTS: self.plan.drafts.nbytes,
            host_lines.WEIGHTS: self.weights,
            host_lines.KV: sum(sum(kv_layer_bytes(kv, layer)) for layer in range(len(kv.layers))),
            host_lines.STATE: slot_bytes(states) * states.slots if states.layers else 0,
            host_lines.STAGING: self.plan.block.nbytes + max(*logits, 4),
        }
        if ranks > 1:
            room = room_of(self.plan.exchanged_rows(), ranks)
            most = max(room.own_floats, room.out_floats, room.message_floats)
            several = max(room.own_floats, room.message_floats) + max(room.out_floats, room.message_floats)
            self.lines[host_lines.EXCHANGE] = 4 * (2 * most + (several if room.several else 0))


def foreseen(
    job: Job, option: Option, pipeline: Shares, tensor: Shares, granule: int = PAGE
) -> dict[tuple[int, str], float]:
    """Bytes by device and line, with a pool of one context."""
    sums: dict[tuple[int, str], float] = {}
    for term in terms(job, option, CEILINGS, pipeline, tensor):
        size = term.exact(-(-job.context // granule) * granule)
        sums[term.device, term.name] = sums.get((term.device, term.name), 0) + size
    return sums


def held_to(said: float, real: int, what: object, more: float = 0.02, beside: int = 64 << 10) -> None:
    """The ledger is never below what is held, and hardly above."""
    assert real <= said + 1 and said <= real * (1 + more) + beside, (what, real, round(said))


def compare(job: Job, said: dict[tuple[int, str], float], ranks: list[Rank]) -> None:
    host: dict[str, int] = {}
    layers = len(job.layers) + len(job.drafting)
    for index, rank in enumerate(ranks):
        for line, real in rank.lines.items():
            if line in (host_lines.STAGING, host_lines.EXCHANGE):
                host[line] = host.get(line, 0) + real
            elif line == host_lines.WEIGHTS:
                weights = said[index, line] + said.get((index, host_lines.COPIES), 0)
                held_to(weights, real, (index, line), 0.005, (8 << 10) * layers + (16 << 10))
            else:
                held_to(said.get((index, line), 0), real, (index, line))
    for line, real in host.items():
        held_to(said[len(CEILINGS.devices) - 1, line], real, line)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("name", hollow_models.MODELS)
def test_one_card(name: str, load: str) -> None:
    alone(name, LOADS[load])


@pytest.mark.parametrize("name", TINY_MODELS)
def test_one_card_with_a_tiny_model(name: str) -> None:
    alone(name, LOADS["usual"])


def alone(name: str, load: Load) -> None:
    model = model_of(name)
    job, option = settle(model.shape, load.wish()), Option("one card", (0,))
    said = foreseen(job, option, pipeline_shares(job, option, Cut(((0, len(job.layers)),))), ())
    compare(job, said, [Rank(job, bound_of(name, job))])


@pytest.mark.parametrize("load", ["usual", "many"])
@pytest.mark.parametrize("vector", [(2, 1), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("layout", [PIPELINE, TENSOR])
@pytest.mark.parametrize("name", hollow_models.MODELS)
def test_several_cards(name: str, layout: str, vector: tuple[int, ...], load: str) -> None:
    together(name, layout, vector, LOADS[load])


@pytest.mark.parametrize("layout", [PIPELINE, TENSOR])
@pytest.mark.parametrize("name", TINY_MODELS)
def test_several_cards_with_a_tiny_model(name: str, layout: str) -> None:
    together(name, layout, (3, 2, 1), LOADS["usual"])


def together(name: str, layout: str, vector: tuple[int, ...], load: Load) -> None:
    model = model_of(name)
    job, option = settle(model.shape, load.wish()), Option("cards", tuple(range(len(vector))), (layout,))
    pipeline, tensor, shares = divided(job, option, vector)
    said = foreseen(job, option, pipeline, tensor, PAGE * (sum(vector) if tensor else 1))
    ranks = [
        Rank(job, bound_of(name, job, share),
             vector if tensor else (), rank, len(vector))
        for rank, share in enumerate(shares[layout])
    ]  # fmt: skip
    compare(job, said, ranks)


def divided(job: Job, option: Option, vector: tuple[int, ...]) -> tuple[Shares, Shares, dict[str, list[Share]]]:
    """The budget's shares of either layout that serves, and what ranks run in it."""
    pipeline: Shares = ()
    tensor: Shares = ()
    shares: dict[str, list[Share]] = {}
    ranks = range(len(vector))
    if PIPELINE in option.layouts:
        cut = even_cut(job, len(vector))
        pipeline = pipeline_shares(job, option, cut)
        shares[PIPELINE] = [Share.pipeline(rank, cut.ranges) for rank in ranks]
    if TENSOR in option.layouts:
        tensor = tensor_shares(job, Shard(vector, vector), on_cpu=True)
        shares[TENSOR] = [Share.tensor(rank, vector) for rank in ranks]
    return pipeline, tensor, shares


@pytest.mark.parametrize("name", ["llama 8B", "qwen3.6 35B-A3B"])
def test_cards_of_two_layouts_have_buffers_for_both_and_one_arena(name: str) -> None:
    """And pools that take turns; what weights and rows pass through stays for the flips."""
    model, vector = model_of(name), (2, 1)
    job = settle(model.shape, LOADS["usual"].wish())
    option = Option("flip", (0, 1), (PIPELINE, TENSOR))
    pipeline, tensor, shares = divided(job, option, vector)
    said = foreseen(job, option, pipeline, tensor, PAGE * 3)
    for rank in range(2):
        both = {
            layout: Rank(job, bound_of(name, job, own[rank]),
                         vector if layout == TENSOR else (), rank, 2)
            for layout, own in shares.items()
        }  # fmt: skip
        for line in (host_lines.WORKSPACE, host_lines.DRAFTS):
            held_to(said.get((rank, line), 0), sum(each.lines[line] for each in both.values()), (rank, line))
        arena = max(each.weights for each in both.values())
        held_to(said[rank, "weights arena"], arena, (rank, "arena"), 0.005, (8 << 10) * 11 + (16 << 10))
        for layout, each in both.items():
            held_to(
                said.get((rank, f"kv, {layout}"), 0),
                each.lines[host_lines.KV],
                (rank, layout),
                beside=(2 << 20) + (64 << 10),
            )
        assert said[rank, "flip buffer"] == 8 << 20 and (rank, "load staging") not in said
    assert said[3, "flip buffer"] == 2 * 2 * (8 << 20)
    held = {term.name: set(term.held) for term in terms(job, option, CEILINGS, pipeline, tensor) if term.device == 0}
    assert held["flip buffer"] == held[host_lines.WORKSPACE] == set(ALWAYS), "from the load on, for every flip"
    loading = foreseen(job, Option("cards", (0, 1), (PIPELINE,)), pipeline, ())
    assert loading[0, "load staging"] == 8 << 20 and loading[3, "load staging"] == 2 * 2 * (8 << 20)
    assert STAGING_BYTES == card_work.STAGING_BYTES


@pytest.mark.parametrize("name", ["gpt-oss 20B", "qwen3.6 35B-A3B", "qwen3_next_mtp", "gemma3_text"])
def test_the_copy_that_cards_are_filled_from_and_what_is_beside_it(name: str) -> None:
    """Or images in its place, each as large as its rank's arena."""
    job, vector = settle(model_of(name).shape, LOADS["usual"].wish()), (3, 2, 1)
    option = Option("flip", (0, 1, 2), (PIPELINE, TENSOR))
    pipeline, tensor, shares = divided(job, option, vector)
    said = foreseen(job, option, pipeline, tensor)
    whole, bounds = bound_of(name, job), [bound_of(name, job, own) for of in shares.values() for own in of]
    home = WeightHome("copy", 0, 3, whole.ops, whole.weights)
    directory = Directory(home, [(bound.ops, bound.weights) for bound in bounds])
    beside = [placed.view for bound in bounds for placed in CardWeights(bound.ops, bound.weights).placed]
    made = sum(view.nbytes for view in beside if directory.find(view) is None)
    held_to(said[3, host_lines.WEIGHTS_COPY], directory.nbytes, "copy", 0.005)
    held_to(said.get((3, host_lines.SIDE), 0), made, "side", beside=4096)
    spilling = settle(job.shape, replace(job.wish, image_spill=True))
    said = foreseen(spilling, option, pipeline, tensor)
    assert (3, host_lines.WEIGHTS_COPY) not in said and (3, host_lines.SIDE) not in said
    arenas = sum(said[rank, "weights arena"] + said.get((rank, host_lines.COPIES), 0) for rank in range(3))
    assert said[3, host_lines.IMAGE] == pytest.approx(arenas)


@pytest.mark.parametrize("name", ["llama 8B", "qwen3.6 35B-A3B"])
def test_mailboxes_between_cards_of_one_vendor(name: str) -> None:
    """As all ranks agree on them (peer_trial): the most that any of them gives, and messages on every route."""
    job, vector = settle(model_of(name).shape, LOADS["many"].wish()), (3, 2, 1)
    option = Option("flip", (0, 1, 2), (PIPELINE, TENSOR))
    pipeline, tensor, shares = divided(job, option, vector)
    said = foreseen(job, option, pipeline, tensor)
    own = message = 0
    for layout, of_layout in shares.items():
        for rank, share in enumerate(of_layout):
            plan = Rank(job, bound_of(name, job, share), vector if layout == TENSOR else (), rank, 3).plan
            room = room_of(plan.exchanged_rows(), 3)
            own, message = max(own, room.own_floats), max(message, room.message_floats)
    credit = plans_in_flight(3, PIPELINE) + 1
    for rank, depths in enumerate(((0, 0, credit), (credit, 0, credit), (0, credit, 0))):
        real = MailboxShape(4 * own, 4 * message, depths).total_bytes
        held_to(said[rank, host_lines.MAILBOXES], real, rank)
    alone = foreseen(job, Option("one", (0,)), pipeline[:1], ())
    assert (0, host_lines.MAILBOXES) not in alone


@pytest.mark.parametrize("name", ["gpt-oss 20B", "qwen3.6 27B"])
def test_a_shorter_request_than_the_context_is_never_less_than_foreseen(name: str) -> None:
    """Where the pool is smaller than the context, requests are as long as the pool."""
    model = model_of(name)
    job, option = settle(model.shape, LOADS["long"].wish()), Option("one card", (0,))
    found = terms(job, option, CEILINGS, pipeline_shares(job, option, Cut(((0, len(job.layers)),))), ())
    bound = bound_of(name, job)
    for context in (16, 512, 4096, 30000, 65536):
        said = sum(term.exact(context) for term in found if term.device == 0 and term.name == host_lines.WORKSPACE)
        real = Rank(settle(model.shape, Load(context=context).wish()), bound).plan.workspace.nbytes
        held_to(said, real, context, more=0.25)


def test_the_numbers_of_both_sides_are_the_same() -> None:
    assert (card_work.CHUNK, card_work.CHUNK_LEAST, card_work.CHUNKED_LANES) == (
        delta.CHUNK, delta.CHUNK_LEAST, delta.CHUNKED_LANES,
    )  # fmt: skip
    assert (card_work.PART_BYTES, card_work.PAIRS) == (attention.PART_BYTES, batch.PAIRS)
    assert card_work.PART_TOKENS == ops.LEAST_PART_PAGES * PAGE and card_work.PART_PAGES_MOST == ops.MAX_PART_PAGES
    assert card_work.FEW_ROWS == (batch.FEW_ROWS, batch.FEW_ROWS_MOST)
    assert (host_lines.STAGING, host_lines.EXCHANGE) == (batch.STAGING_LINE, EXCHANGE)


@pytest.mark.parametrize("name", ["llama3.1-8b", "qwen3-30b-a3b", "qwen3.6-27b", "qwen3.6-35b-a3b", "gemma3-12b"])
def test_a_shape_file_foresees_what_the_checkpoint_does(name: str) -> None:
    """Of a model that is not here: the same buffers, by its measurements."""
    of_file = {layer.work for layer in load_shape(name).layers}
    like = {"llama3.1-8b": "llama 8B", "qwen3-30b-a3b": "qwen3 30B-A3B", "gemma3-12b": "gemma3 12B"}
    like |= {"qwen3.6-27b": "qwen3.6 27B", "qwen3.6-35b-a3b": "qwen3.6 35B-A3B"}
    real = {layer.work for layer in model_of(like[name]).shape.layers}
    plain = {replace(work, dealt=False, shared_units=1) for work in of_file}
    assert plain == {replace(work, dealt=False, shared_units=1) for work in real}
