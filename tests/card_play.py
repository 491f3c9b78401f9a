"""Real rank processes on fake cards, played plan by plan (flip/flip_fleet.py), and what they have to launch.

    async with CardPlay("qwen3_moe", (CUDA, ROCM)) as play:
        answers = await talk(play)                  # prompts, decoding, a checkpoint, a flip between any two of them
        counted = await play.counted()              # of each rank: launches by symbol, calls of exchanges
        assert not play.missing(counted)

What a rank has to launch is told by its op list alone (`wanted_of`): for every op the kernels of which at least one
runs it, and in how many plans. A kernel that is launched less often than that was passed over.

`talk` on one rank of the oracle (`oracle`) is what the answers must be: a process of its own, where flips are nothing.
`agreeing` compares the two.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

# The test folders are no package (pytest's importlib mode); fleets that flip lie among the tests of flips.
sys.path.insert(0, str(Path(__file__).parent / "flip"))

from flip_fleet import LANES, Play

from backends.base import (
    AddGated,
    Attention,
    DeltaNet,
    DraftStep,
    EmbedRows,
    Experts,
    GatedActivation,
    JoinHidden,
    Linear,
    MergeAttention,
    Norm,
    Op,
    RopeStore,
    Scale,
    SelectRows,
    Softcap,
    Weight,
    Zero,
)
from backends.gpu import gate
from backends.ops import EXCHANGES
from homeserve import checkpoint as checkpoints
from homeserve.layouts.ranks import RankDevice
from homeserve.layouts.share import Share
from homeserve.models import registry
from homeserve.models.bind import Bound, bind
from homeserve.models.conform import before_hidden
from homeserve.wire.records import PlanKind, Sample

COUNTER = Path(__file__).parent / "data" / "counter.gguf"
CUDA = RankDevice("cuda", 0, "GPU-5ee1c0de-0000-4000-8000-000000000000", "NVIDIA GeForce RTX 3090")
CUDA1 = RankDevice("cuda", 1, "GPU-5ee1c0de-0000-4000-8000-000000000001", "NVIDIA GeForce RTX 3090")
ROCM = RankDevice("rocm", 0, f"GPU-{0xA11D0000:016x}", "AMD Radeon 780M Graphics")
TOLERANCE = 4e-3
"""Of a log-probability. Logits of the tiny models lie within +-1.5; prompts are multiplied as halves."""
PROMPTS = {1: 20, 2: 52, 3: 0}
"""Tokens of each request of `talk`; the third one goes on from the checkpoint of the second."""


def facts_of(model: str | Path) -> tuple[int, tuple[int, ...]]:
    """Layers, and the windows that attention has."""
    found = checkpoints.open(str(_path(model)), registry.folder_families)
    try:
        family = registry.family(found.arch)
        config = family.config_from(found.metadata)
        return config.layers, tuple(bind(family, config, found.tensors).windows)
    finally:
        found.close()


def _path(model: str | Path) -> Path:
    return model if isinstance(model, Path) else Path(__file__).parent / "data" / "tiny" / f"{model}.f32.gguf"


class Wanted(NamedTuple):
    """Of an op: patterns of symbols, of which one at least runs it; whether it is a step of drafting."""

    op: str
    patterns: tuple[str, ...]
    drafting: bool


class Counts(NamedTuple):
    """Of one rank since its load."""

    launches: dict[str, int]
    calls: dict[str, int]
    """Of exchanges, by label."""


class CardPlay(Play):
    """Ranks on these cards. Two of them take half of the layers each, or the parts that `vector` says."""

    def __init__(
        self, model: str | Path, devices: Sequence[RankDevice], *, vector: tuple[int, ...] = (1, 1), **more: Any
    ) -> None:
        layers, windows = facts_of(model)
        ranks = len(devices)
        cut = layers * vector[0] // sum(vector)
        shares: dict[str, Any] = {
            "ranges": ((0, cut), (cut, layers)),
            "weight_vector": vector,
            "token_vector": vector[::-1],
        }
        given: dict[str, Any] = {"kv_type": "f32", "windows": windows} | more
        super().__init__(model, ranks, devices=tuple(devices), **(shares if ranks > 1 else {}), **given)
        self.plans: Counter[str] = Counter()
        """Plans of each layout that drew a token, and (as "drafting") those with drafts."""

    async def run(self, *args: Any, **more: Any) -> None:
        before = [(len(each.answers), len(each.rounds)) for each in self.requests.values()]
        await super().run(*args, **more)
        after = [(len(each.answers), len(each.rounds)) for each in self.requests.values()]
        self.plans[self.layout] += sum(count for count, _ in after) > sum(count for count, _ in before)
        self.plans["drafting"] += sum(count for _, count in after) > sum(count for _, count in before)

    async def counted(self) -> list[Counts]:
        results = await self.answered(self.fleet.issue(PlanKind.CENSUS, epoch=self.epoch))
        found = []
        for result in sorted(results, key=lambda each: each.rank):
            assert result.ok and result.launches is not None, result.reason
            found.append(Counts(dict(result.launches), {label: calls for label, calls, *_ in result.exchanges}))
        return found

    def bounds(self, layout: str) -> list[Bound]:
        """What each rank runs in a layout."""
        found = checkpoints.open(self.load_spec.path, registry.folder_families)
        try:
            family = registry.family(found.arch)
            config, drafts = family.config_from(found.metadata), self.load_spec.drafts > 0
            return [bind(family, config, found.tensors, share, drafts=drafts) for share in self._shares(layout)]
        finally:
            found.close()

    def _shares(self, layout: str) -> list[Share | None]:
        if self.ranks == 1:
            return [None]
        if layout == "pipeline":
            return [Share.pipeline(rank, self.load_spec.ranges) for rank in range(self.ranks)]
        return [Share.tensor(rank, self.load_spec.weight_vector) for rank in range(self.ranks)]

    def wanted(self, rank: int) -> Counter[Wanted]:
        """How often each op of the plans so far had to be launched on a rank, at the least."""
        found: Counter[Wanted] = Counter()
        for layout in ("pipeline", "tensor") if self.ranks > 1 else ("pipeline",):
            bound = self.bounds(layout)[rank]
            for each in wanted_of(bound, self.load_spec.kv_type):
                drafted = self.plans["drafting"] if layout == "tensor" or self.ranks == 1 else 0
                found[each] += drafted if each.drafting else self.plans[layout]
        return found

    def missing(self, counted: Sequence[Counts]) -> list[str]:
        """Ops that were launched less often than their plans had them, on any rank."""
        wrong = []
        for rank, (launches, calls) in enumerate(counted):
            least: Counter[tuple[str, tuple[str, ...]]] = Counter()
            for each, count in self.wanted(rank).items():
                least[each.op, each.patterns] += count
            for (op, patterns), count in least.items():
                counts = calls if op == "exchange" else launches
                had = sum(counts[name] for name in counts if any(fnmatchcase(name, each) for each in patterns))
                if had < count:
                    wrong.append(f"rank {rank}: {op} {' or '.join(patterns)}: {had} times, {count} wanted")
        return wrong


# ------------------------------------------------------------------------------------------- what ops need of kernels


def wanted_of(bound: Bound, kv_type: str) -> Iterator[Wanted]:
    """Each op that has to launch something, once for each thing. Ops without a column or a head need nothing."""
    drafting = False
    for op in before_hidden(bound.ops):  # what is behind is run for embeddings alone
        drafting |= isinstance(op, DraftStep)
        for patterns in _patterns(op, bound, kv_type):
            yield Wanted("exchange" if isinstance(op, EXCHANGES) else type(op).__name__, patterns, drafting)
        if isinstance(op, MergeAttention) and op.own:
            yield Wanted(type(op).__name__, ("merge_attention",), drafting)


def _patterns(op: Op, bound: Bound, kv_type: str) -> Iterator[tuple[str, ...]]:
    def quant(weight: Weight) -> str:
        return bound.weights[weight.name].type.name.lower()

    match op:
        case EmbedRows():
            yield (f"embed_rows_{quant(op.table)}",)
        case Norm():
            yield ("norm_rows",)
        case Linear():
            for part in op.parts:
                if part.out.width:
                    yield f"linear_few_{quant(part.weight)}_r*", f"linear_many_{quant(part.weight)}_r*"
        case Experts():
            yield ("route_*",)
            yield ("experts_combine",)
            for matrix in (op.gate, op.up, op.down):
                yield f"experts_few_{quant(matrix.weight)}", f"experts_many_{quant(matrix.weight)}_r*"
        case RopeStore():
            yield (f"rope_store_{kv_type}",)
        case Attention() if op.heads:
            yield f"attention_few_{kv_type}_d{op.head_dim}", f"attention_many_{kv_type}_d{op.head_dim}"
        case GatedActivation() if op.out.width:
            yield (f"gated_activation_{op.kind}",)
        case DeltaNet():
            yield ("delta_conv",)
            yield "delta_recurrent_*", "delta_chunks_*"
        case JoinHidden():
            yield ("join_chained",) if op.chained else ("join_hidden",)
        case AddGated() | Softcap() | Scale() | Zero() | SelectRows():
            yield (_IN_PLACE[type(op).__name__],)
        case _ if isinstance(op, EXCHANGES):
            yield (op.label,)


_IN_PLACE = {
    "AddGated": "add_gated",
    "Softcap": "softcap",
    "Scale": "scale",
    "Zero": "zero",
    "SelectRows": "select_rows",
}
SYMBOLS = frozenset(symbol.name for symbol in gate.symbols())


# ---------------------------------------------------------------------------------------------------- what they answer


def tokens_of(number: int, count: int) -> list[int]:
    return [(7 * at * at + 31 * at + 11 * number) % 250 + 1 for at in range(count)]


async def talk(play: Play) -> dict[int, list[Sample]]:
    """A long and a short prompt in chunks, answers, a checkpoint and a hit of it, with a flip between any two of them:
    what each request answered. Flips there and back, twice."""
    told = {"top_logprobs": 2}
    play.begin(1, 0, tokens_of(1, PROMPTS[1]), **told)
    play.begin(2, 2, tokens_of(2, PROMPTS[2]), repetition_penalty=1.0, **told)
    await play.run(40, only=[2])
    await play.flip()  # one prompt half computed, the other one not begun
    await play.run(12, save={2: LANES})
    await play.run(12)
    await play.flip()
    for _ in range(2):
        await play.run()
    await play.flip()
    await play.run(only=[1])
    play.begin_from(3, 3, LANES, tokens_of(3, 5))
    play.requests[3].sampling = play.requests[1].sampling
    await play.run(16, only=[3])
    for _ in range(2):
        await play.run()
    await play.flip()
    for _ in range(2):
        await play.run()
    return {number: each.answers for number, each in play.requests.items()}


async def oracle(model: str | Path, **more: Any) -> dict[int, list[Sample]]:
    """The same of the reference, in a process of its own."""
    async with Play(model, 1, backend="reference", kv_type="f32", windows=facts_of(model)[1], **more) as play:
        return await talk(play)


def agreeing(
    found: Mapping[int, Sequence[Sample]], wanted: Mapping[int, Sequence[Sample]], tolerance: float = TOLERANCE
) -> int:
    """How many tokens are the oracle's, with its log-probabilities. Where the oracle's two best are closer than both
    may be off, either may be drawn, and a request is compared up to there. Raises AssertionError at a difference."""
    assert found.keys() == wanted.keys()
    same = 0
    for number, samples in wanted.items():
        assert len(found[number]) == len(samples)
        for one, other in zip(found[number], samples, strict=True):
            assert one.logprobs is not None and other.logprobs is not None
            (_, best), (_, second) = other.logprobs.top
            if one.token != other.token:
                assert best - second <= 2 * tolerance, (number, one, other)
                break
            assert abs(one.logprobs.logprob - other.logprobs.logprob) <= tolerance, (number, one, other)
            same += 1
    return same
