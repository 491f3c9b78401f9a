"""Two worker processes on one card: a fleet whose layout flips under an answer, over the transport of pinned memory.

One card is two ranks only under HOMESERVE_TESTING=1. Between two ranks of one card neither peer copies nor a
collectives library mean anything, so rows go through pinned host memory. The model is the one that counts, whose right
answer is known; the oracle is `homeserve doctor --flip-drill`: the answer is right past every flip, and each flip
stands as committed on the server's own record.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_rows import Teller
from servers import Server

COUNTER = Path(__file__).resolve().parents[2] / "tests" / "data" / "counter.gguf"
RANKS = 2
LEGS = ("tensor", "pipeline")
DRILL_S = 240.0
PROGRAM = (sys.executable, "-P", "-m", "homeserve")


def server_on(devices: str, model: str, folder: Path, *flags: str, **environ: str) -> Server:
    """A server of this installation on these devices, not started yet."""
    command = [*PROGRAM, "up", model, "--host", "127.0.0.1", "--devices", devices, *flags]
    return Server(
        f"homeserve-{devices.count(',') + 1}", command, folder / "server.log", realtime=False, environ=environ
    )


def run(tell: Teller, device: str, folder: Path, *, tiny: bool) -> None:
    if not COUNTER.is_file():
        tell.row("2 workers on one card", ok=False, note=f"{COUNTER.name} is not in this checkout")
        return
    room = "512" if tiny else "2048"
    sizes = ("--context", room, "--kv-tokens", str(RANKS * int(room)), "--max-running", "2", "--flip", "manual")
    devices = ",".join([device] * RANKS)
    server = server_on(devices, str(COUNTER), folder, *sizes, HOMESERVE_TESTING="1")
    tell.at("start of 2 workers on one card")
    try:
        tell.row("2 workers on one card: start to ready", server.start(), "s")
        ranks = server.get("/v1/homeserve/status")["ranks"]
        pids = {rank["pid"] for rank in ranks}
        told = f"{', '.join(rank['backend'] for rank in ranks)}; {len(pids)} processes"
        tell.row("workers", float(len(pids)), "", ok=len(pids) == RANKS, note=told)
        tell.at("flip under an answer")
        _drill(tell, server.url)
    finally:
        server.stop()


def _drill(tell: Teller, url: str) -> None:
    command = [*PROGRAM, "doctor", "--flip-drill", "--json", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DRILL_S, check=False)
    try:
        told: dict[str, Any] = json.loads(done.stdout)["drill"]
    except (ValueError, KeyError):
        words = " ".join(done.stderr.split())[-300:]
        tell.row("flip under an answer", ok=False, note=f"the drill ended with {done.returncode}: {words}")
        return
    for leg in told["legs"]:
        committed = leg["state"] == "committed"
        note = f"{leg['state']}, {leg['watermark']} characters into the answer {leg['reason'] or ''}".rstrip()
        tell.row(f"flip to {leg['to']} under an answer", leg["total_ms"], "ms", ok=committed, note=note)
    went = tuple(leg["to"] for leg in told["legs"])
    faults = [*told["faults"], *([] if set(went) == set(LEGS) else [f"flips to {', '.join(went) or 'nothing'}"])]
    note = "; ".join(faults) or f"right past every flip, by {told['measure']}"
    tell.row("the answer survives", float(len(went)), "flips", ok=not faults and not done.returncode, note=note)
