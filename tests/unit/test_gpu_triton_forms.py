"""Which ops Triton's attention takes, what is launched, and what is said where its compiler fails. No Triton here: a
stand-in answers in its place."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from backends.gpu import arch, attention_triton
from backends.gpu.errors import CompileFailed, CompilerMissing
from backends.gpu.launch import Symbol
from backends.gpu.ops import attention as ops
from backends.gpu.triton_compile import MISSING, facts

SHAPE = ops.Shape("f16", 32, 8, 128, 0.1, 128, 4096, 4096, 512, 2048)
FORM = attention_triton.form_of(SHAPE, "nvidia", rows=512, parts=False, sinks=False)
MEMORY = ops.Memory(*range(100, 111))
ANSWER = {"version": "3.7.1", "name": "attention_triton", "shared": 32896, "scratch": 0, "params": 26, "matrix": True}


def _stand_in(folder: Path, text: str) -> str:
    """A program that is started as Python would be."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def _answers(folder: Path, **other: object) -> str:
    """It leaves the request, and the code that was asked for."""
    answer = json.dumps(ANSWER | {"spills": -1} | other)
    out = 'sed \'s/.*"out": "\\([^"]*\\)".*/\\1/\' request'
    return _stand_in(folder, f"cd {folder}; cat > request; printf code > \"$({out})\"; echo '{answer}'")


def test_code_comes_with_what_its_launch_needs(tmp_path: Path) -> None:
    made = attention_triton.compile_form(FORM, arch.arch("sm_86"), _answers(tmp_path))
    assert (made.binary.kind, made.binary.data, made.shared, made.matrix) == ("cubin", b"code", 32896, True)
    assert (made.symbol.threads, made.symbol.types) == (128, ("F16",))
    request = json.loads((tmp_path / "request").read_text())
    assert request["target"] == ["cuda", 86, 32] and request["pool"] == "fp16"
    assert not Path(request["out"]).exists()


def test_amd_arches_are_asked_for_by_their_base_name_and_width(tmp_path: Path) -> None:
    form = attention_triton.form_of(SHAPE, "amd", rows=512, parts=False, sinks=False)
    made = attention_triton.compile_form(form, arch.arch("gfx942:sramecc+:xnack-"), _answers(tmp_path))
    assert (made.binary.kind, made.symbol.threads) == ("code object", 8 * 64)
    assert json.loads((tmp_path / "request").read_text())["target"] == ["hip", "gfx942", 64]


def test_without_triton_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(CompilerMissing, match=r'pip install "triton>=3\.6,<3\.9"'):
        attention_triton.compile_form(FORM, arch.arch("sm_86"), _stand_in(tmp_path, f"exit {MISSING}"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'error: cannot select' >&2; exit 1", "cannot select"),
        ("kill -ABRT $$", "ended with -6"),
    ],
)
def test_a_compiler_that_fails_leaves_its_log_and_the_own_kernel(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(CompileFailed) as caught:
        attention_triton.compile_form(FORM, arch.arch("sm_86"), _stand_in(tmp_path, text))
    assert said in caught.value.log
    assert "own attention kernel" in caught.value.fix


@pytest.mark.parametrize("other", [{"params": 24}, {"scratch": 128}, {"name": "another"}])
def test_code_with_another_entry_is_not_launched(tmp_path: Path, other: dict[str, object]) -> None:
    with pytest.raises(CompileFailed, match="other code than is launched"):
        attention_triton.compile_form(FORM, arch.arch("sm_86"), _answers(tmp_path, **other))


def test_what_is_no_op_for_it_is_named() -> None:
    assert attention_triton.refusal(SHAPE) == ""
    for shape, why in (
        (replace(SHAPE, kv="q8_0"), "not q8_0"),
        (replace(SHAPE, dims=512), "not 512"),
        (replace(SHAPE, dims=72), "not 72"),
        (replace(SHAPE, pool_pages=1 << 20), "not 1048576 pages"),
    ):
        assert why in attention_triton.refusal(shape)
        with pytest.raises(ValueError, match=why):
            attention_triton.form_of(shape, "amd", rows=1, parts=True, sinks=False)


def test_where_triton_has_no_matrix_cores_it_is_not_tried() -> None:
    refused = [
        name for names in arch.SAMPLE.values() for name in names if attention_triton.arch_refusal(arch.arch(name))
    ]
    assert refused == ["sm_75", "gfx906", "gfx1030"]


def _launched(form: attention_triton.Form, shape: ops.Shape, tiles: ops.Tiles, parts: ops.Parts | None) -> list[Symbol]:
    compiled = attention_triton.Compiled(
        *(attention_triton.Binary("cubin", b""), form, attention_triton.symbol_of(form, 32), 4096, True, 0, "")
    )
    launches = attention_triton.attention(compiled, shape, MEMORY, tiles, parts)
    assert not launches or launches[0].shared == 4096
    return [each.symbol for each in launches]


def test_parts_are_merged_by_the_own_kernel_and_leave_sinks_to_it() -> None:
    form = attention_triton.form_of(replace(SHAPE, gated=True), "nvidia", rows=1, parts=True, sinks=True)
    assert (form.queries, form.constants["SINKS"], form.constants["GATED"]) == (16, 0, 0)
    symbols = _launched(form, SHAPE, ops.Tiles(3, 1), ops.parts(64, SHAPE, 1))
    assert [symbol.name for symbol in symbols] == ["attention_triton", "attention_merge"]
    assert [symbol.name for symbol in _launched(FORM, SHAPE, ops.Tiles(3, 512), None)] == ["attention_triton"]
    assert _launched(FORM, SHAPE, ops.Tiles(0, 512), None) == []


def test_facts_are_read_from_the_assembly() -> None:
    ptx = ".visible .entry attention_triton(\n\t.param .u64 .ptr .global .align 16 a,\n\t.param .f32 b\n)\n mma.sync.x"
    log = "ptxas info: 8 bytes stack frame, 12 bytes spill stores, 12 bytes spill loads"
    assert facts("cuda", ptx, log) == {"params": 2, "matrix": True, "spills": 3}
    assert facts("cuda", ptx, "")["spills"] == -1
    amd = "      - .offset: 0\n        .value_kind:     global_buffer\n        .value_kind:     by_value\n"
    amd += "        .value_kind:     hidden_block_count_x\n    .sgpr_spill_count: 9\n    .vgpr_spill_count: 3\n"
    assert facts("hip", amd, "") == {"params": 2, "matrix": False, "spills": 3}
    assert facts("hip", amd + "  v_wmma_f32_16x16x16_f16 v[0:7]", "")["matrix"] is True
