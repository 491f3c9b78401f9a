"""Plans and refusals made by hand, for the tests of what is told of them: their numbers are easy to add up."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

# The test folders are no package (pytest's importlib mode); this one has modules of its own.
sys.path.insert(0, str(Path(__file__).parent))

from budget.ceilings import Aperture, Ceilings, Device
from budget.facts import MIB, Doubt, KvShape, LayerShape, MemoryFacts, ModelShape
from budget.ledger import ALWAYS, Line
from budget.plan import Advice, Binds, Plan, Priced, Refusal, Unknown
from budget.speed import LayoutSpeed
from budget.wish import Wish

HOST = MemoryFacts(65536 * MIB, 65536 * MIB, "MemTotal", 60000 * MIB, 2048 * MIB)
SHAPE = ModelShape(
    name="dense-27b",
    arch="qwen3",
    quant="Q4_K_M",
    layers=(LayerShape(100 * MIB, 200 * MIB, kv=KvShape(2048, heads=8)),) * 64,
    hidden=5120,
    mixer_width=8192,
    ffn=25600,
    vocab=151936,
    context=262144,
    embedding_bytes=400 * MIB,
    head_bytes=600 * MIB,
    tied=False,
)
LINES = (
    Line(0, "weights", round(9000.25 * MIB), ("boot", "pipeline", "flip"), "computed", "32 layers and the embedding"),
    Line(0, "weights shard", 9500 * MIB, ("tensor", "flip"), "computed", "30 of 64 units of each layer"),
    Line(0, "kv pool", round(4000.5 * MIB), ALWAYS, "computed", "65536 tokens of 64 KiB"),
    Line(0, "cuda context", 555 * MIB, ALWAYS, "reserve", "a context of this class"),
    Line(0, "load staging", 512 * MIB, ("boot",), "computed", "two buffers of 256 MiB"),
    Line(0, "prefill activations", 700 * MIB, ("pipeline",), "computed", "chunk 256"),
    Line(1, "weights", 8000 * MIB, ("boot", "pipeline"), "computed"),
    Line(1, "weights shard", 8200 * MIB, ("tensor",), "computed"),
    Line(1, "kv pool", 500 * MIB, ALWAYS, "computed"),
    Line(1, "prefill activations", 300 * MIB, ("pipeline",), "computed"),
    Line(2, "engine process", 300 * MIB, ALWAYS, "reserve", "Python, HTTP, tokenizer"),
)


def _device(index: int, name: str, total: int, reserved: int, used: int, **more: object) -> Device:
    fields: dict[str, object] = {
        "index": index,
        "id": f"GPU-{index}",
        "vendor": "nvidia",
        "name": name,
        "arch": "sm_120",
        "kind": "discrete",
        "usable": True,
        "why_not": None,
        "total_bytes": total * MIB,
        "reserved_bytes": reserved * MIB,
        "free_bytes": (total - reserved - used) * MIB,
        "gtt_bytes": None,
        "ceiling_bytes": (total - reserved - used - 1024) * MIB,
        "floor_bytes": 1024 * MIB,
        "bar1": Aperture(256 * MIB, None, "no", "the aperture is smaller than the memory"),
        "pool": index + 1,
    }
    return Device(**(fields | more))  # type: ignore[arg-type]


CPU: dict[str, object] = {
    "id": "cpu",
    "vendor": "cpu",
    "arch": None,
    "kind": "cpu",
    "reserved_bytes": None,
    "free_bytes": 60000 * MIB,
    "ceiling_bytes": (60000 - 256) * MIB,
    "floor_bytes": 256 * MIB,
    "bar1": None,
    "pool": 0,
}
CARDS = (
    _device(0, "NVIDIA GeForce RTX 5090", 32607, 507, 20),
    _device(1, "NVIDIA GeForce RTX 3080", 10240, 318, 2, arch="sm_86"),
    _device(2, "AMD Ryzen 9 7950X", 65536, 0, 0, **CPU),
)
CEILINGS = Ceilings(CARDS, (59744 * MIB, 31056 * MIB, 8896 * MIB), ())
DOUBTS = (
    Doubt("backend", "this version computes on the CPU only", "the plan is for a build with a cuda backend"),
    Doubt("GPU-1", "reserved memory is not told", "318 MiB, as on cards of its class"),
)
PLAN = Plan(
    shape=SHAPE,
    wish=Wish(kv_type="f16", running=16),
    ceilings=CEILINGS,
    option="both cards, weights 30,17",
    ranks=(0, 1),
    layouts=("pipeline", "tensor"),
    ranges=((0, 40), (40, 64)),
    weight_vector=(30, 17),
    token_vector=(3, 1),
    expert_layers=0,
    context=65536,
    kv_tokens=65536,
    running=16,
    lines=LINES,
    binds=Binds(1, "kv pool", "96 MiB are left, a page of 16 tokens more would take 160"),
    rank_tokens=(180000, 65536),
    speeds={
        "pipeline": LayoutSpeed(7245.5, 40.0, 0.5, 1.2, "the bandwidth of device 1 is a guess by class"),
        "tensor": LayoutSpeed(1681.0, 61.0, 0.5, 1.2, ""),
    },
    flip_s=3.2,
    break_even_tokens=7004,
    priced=(
        Priced("both cards, weights 30,17", 65536, 7245.5, 61.0, ""),
        Priced("device 0 alone", 12000, 3000.0, 45.0, "fewer tokens"),
        Priced("with a CPU rank", None, None, None, "slower, and not needed"),
    ),
    advice=(
        Advice({"kv_type": "q8_0"}, 41000, "half the bytes for each token"),
        Advice({"max_running": 8, "chunk": 128}, 512, "fewer rows in flight"),
    ),
    doubts=DOUBTS,
)
REFUSAL = Refusal(
    shape=SHAPE,
    wish=Wish(context=65536, running=16),
    ceilings=CEILINGS,
    option="both cards, weights 30,17",
    reason="the KV of one request of 65 536 tokens does not fit beside the weights",
    device=1,
    needed_bytes=9500 * MIB,
    available_bytes=8896 * MIB,
    lines=(*LINES, Line(1, "recurrent states", 700 * MIB, ALWAYS, "computed", "16 requests")),
    nearest={"context": 16384, "kv_type": "q8_0", "max_running": 16},
    nearest_text="16 384 tokens of context in q8_0",
    priced=(Priced("device 0 alone", None, None, None, "the weights alone are larger"),),
)
LAPTOP = Ceilings(
    (
        _device(
            0,
            "AMD Radeon 780M",
            1024,
            0,
            0,
            vendor="amd",
            arch="gfx1103",
            kind="uma",
            reserved_bytes=None,
            free_bytes=None,
            gtt_bytes=24576 * MIB,
            ceiling_bytes=25600 * MIB,
            floor_bytes=0,
            bar1=None,
            pool=0,
            private_bytes=1024 * MIB,
        ),
        _device(1, "AMD Ryzen 7 7840U", 30211, 0, 0, **(CPU | {"ceiling_bytes": 28312 * MIB})),
    ),
    (28312 * MIB,),
    (),
)
UNKNOWN = Unknown(
    Ceilings((_device(0, "cpu", 0, 0, 0, **(CPU | {"total_bytes": None, "ceiling_bytes": None})),), (None,), ()),
    "the box says nothing about its memory",
)


@pytest.fixture
def told() -> SimpleNamespace:
    """`plan`, `refusal`, `unknown`, `laptop` (ceilings), `host`, `doubts`."""
    return SimpleNamespace(
        plan=PLAN, refusal=REFUSAL, unknown=UNKNOWN, laptop=LAPTOP, host=HOST, doubts=DOUBTS, ceilings=CEILINGS
    )
