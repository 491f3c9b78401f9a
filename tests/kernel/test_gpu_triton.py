"""Attention by Triton: numbers in its interpreter against attention in double precision, and code for every arch of the
gate. Without a card, each in processes of their own.

Triton is a gigabyte and compiles for minutes, so this is of the slow tier: it runs where the extra `triton` is
installed in the tests' environment, or in that of the Python which HOMESERVE_TEST_TRITON names.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import simt_rig as rig
from gpu_cases import address
from gpu_cases.attention import Asked, Filled

from backends.gpu import arch, attention_triton
from backends.gpu.jit import Binary
from backends.gpu.launch import Launch
from backends.gpu.ops import attention as ops

PYTHON = os.environ.get("HOMESERVE_TEST_TRITON", "")
ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("HOMESERVE_TEST_SEED") or "0", 16)
RUN_S = 900
TOLERANCE = 4e-3

NONE = "triton is of the slow tier" if os.environ.get("HOMESERVE_TEST_TIER") != "slow" else "triton is not installed"
SLOW = os.environ.get("HOMESERVE_TEST_TIER") == "slow" and find_spec("triton") is not None
pytestmark = pytest.mark.skipif(not PYTHON and not SLOW, reason=NONE)

many = Asked("f16", 64, sequences=((150, 40), (20, 9)), tile_rows=33)
ASKED = {
    "many": many,
    "many bf16": replace(many, kv="bf16", dims=80),
    "many of 128": replace(many, dims=128, heads=6, kv_heads=2, window=37, sinks=True, gated=True),
    "many of 256": replace(many, dims=256, sequences=((40, 21),), softcap=3.0),
    "many partial": replace(many, partial=True),
    "few": Asked("f16", 64),
    "few in parts": Asked("f16", 96, sequences=((300, 2), (20, 1)), sinks=True),
    "few in parts under a window": Asked("bf16", 64, sequences=((410, 3), (300, 2)), window=130, tile_rows=3),
    "few in parts, partial": Asked("f16", 32, sequences=((300, 2), (20, 1)), partial=True, softcap=2.0),
    "loud": Asked("f16", 64, scale=4.0),
}


def _case(asked: Asked, *, parts: bool) -> tuple[Filled, attention_triton.Form, tuple[Launch, ...]]:
    filled = Filled(asked, np.random.default_rng(SEED))
    # One more tile without rows, as a recorded graph has.
    cut = np.concatenate([ops.cut_tiles(filled.lanes, asked.tile_rows), np.zeros((1, 2), np.int32)])
    tiles, split = ops.Tiles(len(cut), asked.tile_rows), None
    if parts:
        split = ops.parts(asked.part_pages, filled.shape, asked.tile_rows)
    memory = filled.memory(cut, ops.part_floats(filled.shape, tiles, split) if split else (0, 0))
    form = attention_triton.form_of(filled.shape, "amd", rows=asked.tile_rows, parts=parts, sinks=asked.sinks)
    symbol = attention_triton.symbol_of(form, 32)
    compiled = attention_triton.Compiled(Binary("cubin", b""), form, symbol, 0, True, 0, "interpreted")
    return filled, form, attention_triton.attention(compiled, filled.shape, memory, tiles, split)


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], None]]:
    """All forms, run by one process; what each has to be checked for."""
    cases = {name: _case(asked, parts="parts" in name) for name, asked in ASKED.items()}
    requests = [
        {
            "pool": attention_triton.POOLS[form.kv],
            "constants": form.constants,
            "grid": launches[0].grid,
            "args": launches[0].args[:-2],
            "arrays": [(address(each), each) for each in filled.arrays],
        }
        for filled, form, launches in cases.values()
    ]
    path = tmp_path_factory.mktemp("triton") / "requests"
    path.write_bytes(pickle.dumps(requests))
    command = [PYTHON or sys.executable, str(Path(__file__).with_name("triton_interpreter.py")), str(path)]
    environment = os.environ | ({"PYTHONPATH": str(ROOT)} if PYTHON else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RUN_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    for (filled, _, launches), left in zip(cases.values(), pickle.loads(path.read_bytes()), strict=True):
        for array, after in zip(filled.arrays, left, strict=True):
            array[...] = after
        for launch in launches[1:]:
            rig.load(launch.symbol.file, "cuda", 32).run(launch)
    return {name: lambda filled=filled: filled.check(TOLERANCE) for name, (filled, _, _) in cases.items()}


@pytest.mark.timeout(RUN_S + 60)
@pytest.mark.parametrize("name", ASKED)
def test_numbers_are_those_of_the_op(interpreted: dict[str, Callable[[], None]], name: str) -> None:
    interpreted[name]()


SHAPE = ops.Shape("f16", 32, 8, 128, 0.1, 128, 4096, 4096, 512, 2048)


@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", [name for names in arch.SAMPLE.values() for name in names])
def test_compiles_for_every_arch_of_the_gate(name: str) -> None:
    """Prefill of Llama 3.1 8B's heads, and decode in parts with a soft cap and a window."""
    card = arch.arch(name)
    decode = replace(SHAPE, window=4096, softcap=30.0)
    for shape, rows, parts in ((SHAPE, 512, False), (decode, 1, True)):
        form = attention_triton.form_of(shape, card.vendor, rows=rows, parts=parts, sinks=False)
        made = attention_triton.compile_form(form, card, PYTHON or sys.executable)
        print(f"{name} {rows} rows: Triton {made.version}, {made.shared} bytes of block memory, {made.spills} spills")
        assert made.binary.data.startswith(b"\x7fELF")
        assert made.matrix == (not attention_triton.arch_refusal(card))
        assert made.shared <= card.block_bytes
        assert made.spills == 0 or not made.matrix
