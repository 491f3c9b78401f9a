"""Attention compiled by Triton: a second kernel for the op, memory and arguments of backends.gpu.ops.attention.

**When it is used: where it was measured to be faster, and not before.** Which of two kernels wins on a card cannot be
said without the card. Ours is compiled within a second or two by what every driver brings, and runs every form of the
op on every arch. Triton schedules loads, layouts and matrix instructions for a card by itself, takes ten seconds for
each form and a gigabyte on disk, and is strong where its authors tuned it: MFMA of CDNA, Hopper, Blackwell. So:

    the extra is not installed, or `refusal` names a reason         own kernel
    `arch_refusal` does, or the compiled code spills registers      own kernel
    else, at the first start on a card                              to be measured

To be measured: results against each other first, then times at 512 and at 8192 positions, and Triton's is taken for a
form if it is faster by 5 % at both. Nothing measures yet, for want of a card, so the worker launches the own kernel
always. The bits of a row differ between the two kernels, so the choice will be part of a program, never of a plan:
nothing may change it while sequences are alive.

**What it covers.** Prefill, decode and verification (in parts, put together by our attention_merge); window, soft cap,
sinks, gates, partial attention with its logarithm; f16 and bf16 pages. Not q8_0 or f8 pages, whose bytes our kernels
open on their way into block memory, nor latent attention.

**Versions.** triton >= 3.6, < 3.9; the tests are with the newest. Every arch of `backends.gpu.arch.SAMPLE` compiles
with 3.8, without spills where there are matrix cores. With 3.6 prefill does not compile for gfx906, and spills seven
registers on gfx1103 and gfx1151, so the own kernel stays there. Matrix cores are found for sm_80 and later, gfx942,
gfx11 and gfx12; not for sm_75, whose matrix instructions Triton has given up, nor for gfx906 and gfx1030, which have
none.

**How.** Compiling happens in a process of its own (`backends.gpu.triton_compile`): LLVM ends a process when it meets
what it cannot do, and a compiler's memory has no place in a worker. The result is a cubin or a code object like those
of our own compilers, with one entry whose parameters are known; it is loaded and launched as they are, and nothing of
Triton is needed for that. Nothing here imports triton.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from backends.base import PAGE_LEN
from backends.gpu.arch import Arch, Vendor
from backends.gpu.errors import CompileFailed, CompilerMissing
from backends.gpu.jit import Binary
from backends.gpu.launch import Launch, Symbol, params
from backends.gpu.ops.attention import Memory, Parts, Shape, Tiles, merge, tile_parts

WANTED = "triton>=3.6,<3.9"
POOLS = {"f16": "fp16", "bf16": "bf16"}
DIMS_MAX = 256
COMPILE_S = 300.0
ENTRY = "attention_triton"
PARAMS = params(
    "out, q, k_pool, v_pool, tables, positions, lanes, tiles, part_stats, part_values, sinks, i32 heads, i32 kv_heads,"
    " i32 q_step, i32 q_stride, i32 out_stride, i32 lane_pages, i32 pool_pages, i32 window, i32 tile_rows,"
    " i32 part_pages, i32 max_parts, float scale, float softcap, global_scratch, profile_scratch"
)
"""The last two are Triton's own; the kernel wants none of either."""


@dataclass(frozen=True)
class Form:
    """What the kernel is compiled for. `queries` of a block by `cols` positions at a time."""

    kv: str
    dims: int
    group: int
    queries: int
    cols: int
    parts: bool
    softcap: bool
    sinks: bool
    gated: bool
    partial: bool
    warps: int
    stages: int

    @property
    def constants(self) -> dict[str, int]:
        """Of the kernel, by its names."""
        return {
            "DIMS": self.dims,
            "BLOCK_DIMS": 1 << (self.dims - 1).bit_length(),
            "GROUP": self.group,
            "QUERIES": self.queries,
            "COLS": self.cols,
            "PARTS": int(self.parts),
            "SOFTCAP": int(self.softcap),
            "SINKS": int(self.sinks and not self.parts),
            "GATED": int(self.gated and not self.parts),
            "PARTIAL": int(self.partial and not self.parts),
        }


@dataclass(frozen=True)
class Compiled:
    """Code for one form and arch. `shared`: bytes of block memory that a launch asks for; `matrix`: it uses matrix
    cores; `spills`: registers kept in memory, -1 where the compiler does not tell."""

    binary: Binary
    form: Form
    symbol: Symbol
    shared: int
    matrix: bool
    spills: int
    version: str


def refusal(shape: Shape) -> str:
    """Why an op is none for this kernel; empty where it is."""
    if shape.kv not in POOLS:
        return f"Triton's attention reads f16 and bf16 pages, not {shape.kv}"
    if shape.dims > DIMS_MAX or shape.dims % 16:
        return f"Triton's attention has heads of 16 to {DIMS_MAX} dims in steps of 16, not {shape.dims}"
    if shape.pool_pages * PAGE_LEN * shape.dims >= 1 << 31:
        return (
            f"Triton's attention addresses 2^31 elements of a head, not {shape.pool_pages} pages of {shape.dims} dims"
        )
    return ""


def arch_refusal(arch: Arch) -> str:
    """Why Triton's kernel is not tried on an arch; empty where it is measured."""
    if arch.matrix in ("none", "mma8"):
        return f"Triton uses no matrix cores on {arch.name}: its attention would multiply one by one"
    return ""


def form_of(shape: Shape, vendor: Vendor, *, rows: int, parts: bool, sinks: bool) -> Form:
    """The form for tiles of `rows` rows. Raises ValueError where `refusal` says why not.

    Found by compiling: AMD's code spills registers when it loads a block of K and V while it multiplies the one before
    (`stages` of 2), and with fewer warps for 64 queries.
    """
    why = refusal(shape)
    if why:
        raise ValueError(why)
    queries = 16 if rows * shape.group <= 16 else 64
    amd = vendor == "amd"
    warps, cols = (8 if amd and queries == 64 else 4), (32 if shape.dims <= 128 and not amd else 16)
    return Form(
        *(shape.kv, shape.dims, shape.group, queries, cols, parts),
        *(shape.softcap > 0, sinks, shape.gated, shape.partial, warps, 1 if amd else 2),
    )


def attention(
    compiled: Compiled, shape: Shape, memory: Memory, tiles: Tiles, parts: Parts | None = None
) -> tuple[Launch, ...]:
    """The launches of an op, as `backends.gpu.ops.attention.many` and `few` make them."""
    if not tiles.count:
        return ()
    assert compiled.form.parts == (parts is not None), "compiled for the other form"
    m, cut = memory, parts or Parts(0, 0)
    passes = -(-tiles.rows * shape.group // compiled.form.queries)
    grid = (shape.kv_heads * passes, tile_parts(shape, tiles, parts) if parts else 1, tiles.count)
    args = (
        *(m.out, m.q, m.k_pool, m.v_pool, m.tables, m.positions, m.lanes, m.tiles),
        *(m.part_stats, m.part_values, m.sinks),
        *(shape.heads, shape.kv_heads, shape.q_step, shape.q_stride, shape.out_stride, shape.lane_pages),
        *(shape.pool_pages, shape.window, tiles.rows, cut.pages, cut.most, shape.scale, shape.softcap, 0, 0),
    )
    launch = Launch(compiled.symbol, grid, args, shared=compiled.shared)
    return (launch, merge(shape, memory, tiles, parts)) if parts else (launch,)


def symbol_of(form: Form, warp: int) -> Symbol:
    return Symbol(ENTRY, "", "Attention", PARAMS, form.warps * warp, (form.kv.upper(),))


def compile_form(form: Form, arch: Arch, python: str = sys.executable) -> Compiled:
    """Compiles in a process of its own, by a Python that has Triton. Raises CompilerMissing and CompileFailed."""
    warp = arch.warps[0]
    target = ("cuda", arch.number, warp) if arch.vendor == "nvidia" else ("hip", arch.base, warp)
    with tempfile.TemporaryDirectory(prefix="homeserve-triton-") as folder:
        out = Path(folder) / "code"
        request = {
            "pool": POOLS[form.kv],
            "constants": form.constants,
            "target": target,
            "warps": form.warps,
            "stages": form.stages,
            "out": str(out),
            "cache": folder,
        }
        done = _process(python, json.dumps(request), f"{ENTRY} for {arch.name}")
        if done.returncode == MISSING:
            raise CompilerMissing("attention by Triton was asked for, and there is no triton", fix=INSTALL)
        if done.returncode:
            log = done.stderr[-4000:] or f"the process ended with {done.returncode}"
            raise CompileFailed(f"Triton could not compile {ENTRY} for {arch.name}", fix=OWN_KERNEL, log=log)
        told = json.loads(done.stdout)
        data = out.read_bytes()
    if told["params"] != len(PARAMS) or told["scratch"] or told["name"] != ENTRY:
        log = f"entry {told['name']} with {told['params']} parameters, {told['scratch']} bytes of scratch memory"
        raise CompileFailed(f"Triton {told['version']} made other code than is launched here", fix=INSTALL, log=log)
    binary = Binary("cubin" if arch.vendor == "nvidia" else "code object", data, done.stderr)
    symbol = symbol_of(form, warp)
    return Compiled(binary, form, symbol, told["shared"], told["matrix"], told["spills"], told["version"])


INSTALL = f'install it with: pip install "{WANTED}"'
OWN_KERNEL = "homeserve's own attention kernel does the same; leave Triton's out to use it"
MISSING = 3
"""How the process ends without triton."""


def _process(python: str, request: str, what: str) -> subprocess.CompletedProcess[str]:
    command = [python, "-m", "backends.gpu.triton_compile"]
    try:
        return subprocess.run(command, input=request, capture_output=True, text=True, timeout=COMPILE_S, check=False)
    except subprocess.TimeoutExpired:
        message = f"Triton did not compile {what} within {COMPILE_S:.0f} s"
        raise CompileFailed(message, fix=OWN_KERNEL) from None
