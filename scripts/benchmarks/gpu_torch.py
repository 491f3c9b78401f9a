"""How fast torch multiplies halves on a card: one line of JSON. Run by gpu_prefill.py with a Python that has torch.

Nothing of homeserve is imported here. The card is found by its UUID, or by its name where torch does not tell UUIDs.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
from typing import Any

ROUNDS_S = 0.5


def main(asked: str) -> dict[str, Any]:
    wanted = json.loads(asked)
    if importlib.util.find_spec("torch") is None:
        return {"why": f"torch is not installed for {sys.executable}"}
    import torch

    if not torch.cuda.is_available():
        return {"why": f"torch {torch.__version__} of {sys.executable} sees no card"}
    index = _index(torch, wanted)
    if index is None:
        return {"why": f"torch {torch.__version__} of {sys.executable} does not see {wanted['name']}"}
    device = torch.device("cuda", index)
    x = torch.randn(wanted["rows"], wanted["cols"], device=device, dtype=torch.float16)
    w = torch.randn(wanted["outs"], wanted["cols"], device=device, dtype=torch.float16)
    taken = _seconds(torch, device, lambda: x @ w.T)
    return {"tflops": 2.0 * wanted["rows"] * wanted["outs"] * wanted["cols"] / taken / 1e12}


def _index(torch: Any, wanted: dict[str, Any]) -> int | None:
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    uuids = [str(getattr(each, "uuid", "")).lower() for each in found]
    mine = str(wanted["uuid"]).lower().removeprefix("gpu-")
    if mine in uuids:
        return uuids.index(mine)
    return next((index for index, each in enumerate(found) if each.name == wanted["name"]), None)


def _seconds(torch: Any, device: Any, work: Any) -> float:
    """The median between two events, as gpu_bench.py has it."""
    with torch.cuda.device(device):
        for _ in range(3):
            work()
        times: list[float] = []
        over = time.monotonic() + ROUNDS_S
        while len(times) < 5 or time.monotonic() < over:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
