"""The process that compiles attention by Triton: `python -m backends.gpu.triton_compile`, started by
`backends.gpu.attention_triton` alone.

It reads a request as JSON from its input, writes the code to the request's `out`, and prints what a launch has to know
as JSON. It ends with 3 where there is no triton. What Triton itself keeps goes into the request's folder.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MISSING = 3


def facts(vendor: str, text: str, log: str) -> dict[str, int | bool]:
    """From the assembly and ptxas's log: how many parameters the entry has, whether matrix cores are used, registers
    spilled (-1: not told)."""
    amd = vendor == "hip"
    param = r"^\s*\.value_kind:\s*(?:by_value|global_buffer)" if amd else r"^\s*\.param \.\w+"
    if amd:
        spilled = [int(each) for each in re.findall(r"^\s*\.vgpr_spill_count:\s*(\d+)", text, re.MULTILINE)]
    else:
        spilled = [int(each) // 4 for each in re.findall(r"(\d+) bytes spill stores", log)]
    return {
        "params": len(re.findall(param, text, re.MULTILINE)),
        "matrix": re.search(r"mma\.sync|wgmma|tcgen05|v_s?wmma|v_mfma", text) is not None,
        "spills": sum(spilled) if spilled else -1,
    }


def main() -> int:
    asked: dict[str, Any] = json.load(sys.stdin)
    if find_spec("triton") is None:
        return MISSING
    os.environ["TRITON_CACHE_DIR"] = asked["cache"]
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
    from backends.gpu import triton_kernel

    with redirect_stdout(io.StringIO()) as log:
        code, text, told = triton_kernel.compiled(
            asked["pool"], asked["constants"], tuple(asked["target"]), asked["warps"], asked["stages"]
        )
    Path(asked["out"]).write_bytes(code)
    json.dump(told | facts(asked["target"][0], text, log.getvalue()), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
