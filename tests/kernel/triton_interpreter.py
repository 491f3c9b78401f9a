"""A process that runs attention in Triton's interpreter: `python triton_interpreter.py FILE`, by test_gpu_triton.py.

FILE has pickled requests: pool, constants, grid, arguments, and arrays by the addresses that they had. Arguments that
are addresses point into these arrays here. Afterwards FILE has the arrays of each.
"""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl

from backends.gpu.triton_kernel import KINDS, attention_triton

TYPES = {"*fp32": tl.float32, "*i32": tl.int32, "*fp16": tl.float16, "*bf16": tl.bfloat16}


class Memory:
    """An address with an element type, in as much of a tensor's clothes as the interpreter looks at."""

    def __init__(self, address: int, dtype: Any) -> None:
        self.address, self.dtype = address, dtype

    def data_ptr(self) -> int:
        return self.address

    def untyped_storage(self) -> Memory:
        return self

    cpu = untyped_storage

    def new_empty(self, size: int, device: str) -> Memory:
        return Memory(self.address, self.dtype)

    def set_(self, *args: object) -> None: ...

    copy_ = set_

    def storage_offset(self) -> int:
        return 0

    size = stride = storage_offset


def run(request: dict[str, Any]) -> list[Any]:
    moved = [(address, array.copy()) for address, array in request["arrays"]]

    def here(address: int) -> int:
        if not address:
            return 0
        for was, array in moved:
            if was <= address < was + max(array.nbytes, 1):
                return int(array.ctypes.data) + address - was
        raise ValueError(f"{address:#x} is in no array")

    names = [name for name in attention_triton.arg_names if name not in request["constants"]]
    arguments = []
    for name, value in zip(names, request["args"], strict=True):
        kind = f"*{request['pool']}" if name in ("k_pool", "v_pool") else KINDS.get(name, "i32")
        arguments.append(Memory(here(value), TYPES[kind]) if kind in TYPES else value)
    with np.errstate(all="ignore"):
        attention_triton[tuple(request["grid"])](*arguments, **request["constants"])
    return [array for _, array in moved]


path = Path(sys.argv[1])
path.write_bytes(pickle.dumps([run(request) for request in pickle.loads(path.read_bytes())]))
