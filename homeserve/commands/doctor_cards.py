"""What `doctor` says of graphics cards: of each one that homeserve could compute on, every missing thing with its fix.

    files      device nodes, and whether this user may open them
    variables  CUDA_VISIBLE_DEVICES and its like
    driver     library, version, compiler of kernels, which cards it shows: asked of a helper with a deadline
    arch       too old, compiled for ahead, or compiled for here

A card that lacks nothing has one line. Nothing here is fatal: a server starts without cards.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from backends import support
from budget.ceilings import ceilings
from budget.facts import Box, Card
from budget.visible import hidden
from homeserve.cards import BACKENDS, is_twin, too_old, word_of
from homeserve.readiness import Readiness

_GROUPS = 'let this user in: sudo usermod -aG render,video "$USER", then log in again'
_IN_CONTAINER = {
    "nvidia": "run the container with --gpus all (NVIDIA's container toolkit)",
    "amd": "run the container with --device /dev/kfd --device /dev/dri",
}


@dataclass(frozen=True)
class Finding:
    """One thing about one card. `fix` empty: it is as it should be."""

    card: str
    what: str
    fix: str = ""


def findings(
    box: Box, environ: Mapping[str, str], ready: Mapping[str, Readiness], root: Path = Path("/")
) -> Iterator[Finding]:
    """Of every card with a backend. `ready`: what the drivers said, by vendor."""
    for card in box.cards:
        if card.vendor not in BACKENDS:
            continue
        word, said = word_of(card, box), ready.get(card.vendor, Readiness())
        missing = list(_missing(card, box, environ, said, root))
        for what, fix in missing:
            yield Finding(word, f"{card.name} ({card.id}): {what}", fix)
        if not missing:
            yield Finding(word, _summary(card, said))


def vendors_of(box: Box) -> list[str]:
    """Whose drivers are to be asked."""
    return sorted({card.vendor for card in box.cards if card.vendor in BACKENDS})


# -------------------------------------------------------------------------------------------------------------- inside


def _missing(
    card: Card, box: Box, environ: Mapping[str, str], said: Readiness, root: Path
) -> Iterator[tuple[str, str]]:
    yield from _files(card, box, root)
    veiled = hidden(box.cards, environ).get(card.id)
    if veiled is not None:
        yield (
            f"hidden: {veiled.variable} is set to {veiled.value or '(nothing)'}, which does not name it",
            f"unset {veiled.variable}, or add this card to it",
        )
    if is_twin(card, box, environ):
        yield f"its UUID {card.twin} is another card's too", "hide one of the two with CUDA_VISIBLE_DEVICES"
    yield from said.missing
    seen = said.sees(card.id, card.pci)
    if seen is None and veiled is None and not said.missing:
        yield "its driver does not show it", "look at what the kernel says of it (dmesg), and restart the machine"
    if seen is not None and seen.virtual_memory is False:
        yield (
            "its driver has no virtual memory for it, without which the layout of several ranks cannot flip",
            f"update the driver ({said.driver}), or serve with --flip off",
        )
    device = next(each for each in ceilings(box, None, named=frozenset({card.id})).devices if each.card == card)
    if not device.usable:
        yield f"cannot be planned for: {device.why_not}", "homeserve probe says what could not be known"
    arch = card.arch or (seen.arch if seen is not None else None)
    if arch is None:
        yield "its arch is not known", "see the lines above; homeserve probe says what could not be known"
    elif oldest := too_old(arch):
        yield f"{arch} is older than {oldest}: there are no kernels for it", "use another card, or the CPU"


def _files(card: Card, box: Box, root: Path) -> Iterator[tuple[str, str]]:
    """Device nodes that are not there, or not for this user."""
    if box.environment == "wsl2":
        nodes = ["dev/dxg"]
    elif card.vendor == "nvidia":
        nodes = ["dev/nvidiactl", "dev/nvidia-uvm"]
    else:
        nodes = ["dev/kfd", *_render_nodes(card, root)]
    for node in nodes:
        path = root / node
        if not path.exists():
            yield f"/{node} is not there", _absent(node, card.vendor, box)
        elif not os.access(path, os.R_OK | os.W_OK):
            yield f"/{node} may not be opened by this user", _GROUPS


def _render_nodes(card: Card, root: Path) -> list[str]:
    """Of an AMD card, by its address; where sysfs does not say, none."""
    folder = root / "sys/bus/pci/devices" / (card.pci or "") / "drm"
    return [f"dev/dri/{path.name}" for path in sorted(folder.glob("renderD*"))] if card.pci else []


def _absent(node: str, vendor: str, box: Box) -> str:
    if box.environment == "wsl2":
        return "update Windows' driver and WSL (wsl --update), and restart WSL (wsl --shutdown)"
    if box.environment == "container":
        return _IN_CONTAINER[vendor]
    load = {
        "dev/nvidiactl": "load NVIDIA's kernel module: sudo modprobe nvidia",
        "dev/nvidia-uvm": "load it: sudo nvidia-modprobe -u -c=0",
        "dev/kfd": "load the kernel's driver: sudo modprobe amdgpu (its compute part, KFD, must be built in)",
    }
    return f"{load.get(node, 'load the kernel driver of the card')}; in a container: {_IN_CONTAINER[vendor]}"


def _summary(card: Card, said: Readiness) -> str:
    """Of a card that lacks nothing."""
    return (
        f"{card.name} ({card.id}), {card.arch}: {said.driver}, {said.compiler};"
        f" {_ahead(BACKENDS[card.vendor], card.arch or '')}"
    )


def _ahead(backend: str, arch: str) -> str:
    """What is known of the kernels for an arch before anything is compiled here."""
    for table in support.read():
        if table.backend == backend and arch.partition(":")[0] in table.arches and table.count(True):
            return f"kernels are known to compile for it ({table.count(True)} entries of its table read yes)"
    return "kernels were not compiled for it ahead: the first start compiles them here"
