"""A box as JSON: what `homeserve probe --json` prints and `--box FILE` reads.

The format is a superset of the collected profiles of real machines (`tests/data/boxes`): same names, MiB with
fractions, null for what is not known. It is lossless for what the probe finds: bytes are divided by a power of two.

A profile is written by hand, by another version or by a broken tool, so single values are never trusted: what is not
the right type, negative, not a number or beyond any machine becomes a doubt that names the field, and unknown. An error
is only raised for what is no profile at all. Values that contradict each other are put right by `budget.belief`.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from budget.belief import MOST_BYTES, believe
from budget.facts import MIB, Box, Card, CpuFacts, Doubt, Link, MemoryFacts

SCHEMA = 1
FILE_LIMIT_BYTES = 16 << 20
CARDS_MAX = 256
DOUBTS_MAX = 1024
TEXT_MAX = 2000

VENDORS = ("nvidia", "amd", "intel", "other")
ENVIRONMENTS = ("bare", "vm", "container", "wsl2", "windows")
PEER_CODES = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")


class ProfileError(Exception):
    """What was given is no profile. `where` it was read, which `field`, `what` is wrong with it, how to `fix` it."""

    def __init__(self, where: str, field: str, what: str, fix: str) -> None:
        self.where = where
        self.field = field
        self.what = what
        self.fix = fix
        super().__init__(f"{where}: {field}: {what}")


_FIX = "give what `homeserve probe --json` prints on that machine"


def load_box(spec: str) -> Box:
    """The box in `FILE`, or the one called ID of the list in `FILE#ID`. Raises ProfileError."""
    path, wanted = spec, None
    if "#" in spec and not Path(spec).exists():
        path, _, wanted = spec.rpartition("#")
    value = _parsed(path)
    if not isinstance(value, list):
        box = box_from_json(value, path)
        if wanted is not None and box.id != wanted:
            raise ProfileError(path, "id", f"the box in it is called {box.id!r}, not {wanted!r}", f"--box {path}")
        return box
    names = [entry["id"] for entry in value if isinstance(entry, dict) and isinstance(entry.get("id"), str)]
    if wanted is None and len(value) == 1:
        return box_from_json(value[0], path)
    some = ", ".join(_shown(name) for name in names[:8]) + (", ..." if len(names) > 8 else "")
    if wanted is None:
        fix = f"say which: --box {path}#ID, with one of {some}" if names else _FIX
        raise ProfileError(path, "id", f"it is a list of {len(value)} boxes", fix)
    found = [entry for entry in value if isinstance(entry, dict) and entry.get("id") == wanted]
    if len(found) != 1:
        what = f"{len(found)} of its boxes are called {wanted!r}"
        raise ProfileError(path, "id", what, f"one of {some}" if names else _FIX)
    return box_from_json(found[0], f"{path}#{wanted}")


def box_from_json(obj: object, where: str) -> Box:
    """The box that `obj` describes; `where` it came from stands in front of its doubts. Raises ProfileError for what is
    not an object, or has neither a list of cards nor a word about memory."""
    if not isinstance(obj, dict):
        raise ProfileError(where, "the whole", f"{_kind(obj)} where an object belongs", _FIX)
    doubts: list[Doubt] = []
    top = _Fields(obj, where, "", doubts)
    top.listed_doubts()
    memory = _memory(top)
    cpu = _cpu(top)
    entries = obj.get("gpus")
    if not isinstance(entries, list):
        if memory is None:
            raise ProfileError(where, "gpus", "neither a list of cards nor the host's memory is in it", _FIX)
        top.doubt("gpus", f"{_kind(entries)} where a list of cards belongs", "no cards")
        entries = []
    if len(entries) > CARDS_MAX:
        top.doubt("gpus", f"{len(entries)} cards", f"the first {CARDS_MAX}")
    os, kernel = top.text("os"), top.text("kernel")
    box = Box(
        id=top.text("id") or "box",
        memory=memory,
        cpu=cpu,
        cards=_cards(entries[:CARDS_MAX], where, doubts),
        os=os,
        kernel=kernel,
        environment=top.word("environment", ENVIRONMENTS) or _environment(os, kernel),
        p2p=top.text("p2p"),
        notes=top.text("notes") or "",
        doubts=tuple(doubts[:DOUBTS_MAX]),
    )
    return believe(box)


def box_to_json(box: Box) -> dict[str, Any]:
    """`box` in the names of a profile. `box_from_json` gives it back."""
    memory = box.memory
    limited = memory is not None and memory.limit_source not in ("MemTotal", "sysconf")
    return {
        "schema": SCHEMA,
        "id": box.id,
        "source": "homeserve probe",
        "os": box.os,
        "kernel": box.kernel,
        "environment": box.environment,
        "mem_total_mib": _mib(memory.total_bytes) if memory else None,
        "cgroup_limit_mib": _mib(memory.limit_bytes) if memory and limited else None,
        "mem_limit_mib": _mib(memory.limit_bytes) if memory else None,
        "mem_limit_source": memory.limit_source if memory else None,
        "mem_available_mib": _mib(memory.available_bytes) if memory else None,
        "swap_mib": _mib(memory.swap_bytes) if memory else None,
        "cpu": _cpu_json(box.cpu),
        "gpus": [_card_json(card) for card in box.cards],
        "p2p": box.p2p,
        "notes": box.notes,
        "doubts": [{"where": doubt.where, "what": doubt.what, "taken": doubt.taken} for doubt in box.doubts],
    }


# ------------------------------------------------------------------------------------------------------------- writing


def _card_json(card: Card) -> dict[str, Any]:
    return {
        "vendor": card.vendor,
        "id": card.id,
        "pci": card.pci,
        "name": card.name,
        "arch": card.arch,
        "uma": card.unified,
        "vram_total_mib": _mib(card.total_bytes),
        "vram_reserved_mib": _mib(card.reserved_bytes),
        "vram_used_idle_mib": _mib(card.used_bytes),
        "vram_free_mib": _mib(card.free_bytes),
        "vis_vram_mib": _mib(card.visible_bytes),
        "gtt_total_mib": _mib(card.gtt_total_bytes),
        "gtt_used_mib": _mib(card.gtt_used_bytes),
        "bar1_total_mib": _mib(card.bar1_total_bytes),
        "bar1_free_mib": _mib(card.bar1_free_bytes),
        "bandwidth_gb_s": None if card.bandwidth_bytes_s is None else card.bandwidth_bytes_s / 1e9,
        "pcie": None if card.link is None else {"gen": card.link.gen, "width": card.link.width},
        "display": card.display,
        "numa_node": card.numa_node,
        "peers": dict(card.peers),
    }


def _cpu_json(cpu: CpuFacts | None) -> dict[str, Any] | None:
    if cpu is None:
        return None
    return {
        "name": cpu.name,
        "logical": cpu.logical,
        "usable": cpu.usable,
        "source": cpu.source,
        "isa_flags": sorted(cpu.flags),
        "numa_nodes": cpu.numa_nodes,
    }


def _mib(size: int | None) -> float | int | None:
    if size is None:
        return None
    return size // MIB if size % MIB == 0 else size / MIB


# ------------------------------------------------------------------------------------------------------------- reading


def _parsed(path: str) -> object:
    """The value in a file of JSON."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ProfileError(path, "file", "cannot be read: not a regular file", "give the path of a box profile")
        with open(path, "rb") as file:
            content = file.read(FILE_LIMIT_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProfileError(path, "file", f"cannot be read: {reason}", "give the path of a box profile") from error
    if len(content) > FILE_LIMIT_BYTES:
        raise ProfileError(path, "file", f"larger than {FILE_LIMIT_BYTES >> 20} MiB: no box profile", _FIX)
    try:
        value: object = json.loads(content, object_pairs_hook=_once)
    except RecursionError as error:
        raise ProfileError(path, "file", "nested too deep: no box profile", _FIX) from error
    except ValueError as error:
        raise ProfileError(path, "file", f"not JSON: {error}", _FIX) from error
    return value


class _Doubled(dict[str, object]):
    """An object of which a name is said more than once: `twice` are those names."""

    twice: tuple[str, ...] = ()


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) == len(pairs):
        return found
    doubled = _Doubled(found)
    counts = Counter(name for name, _ in pairs)
    doubled.twice = tuple(name for name, times in counts.items() if times > 1)[:CARDS_MAX]
    return doubled


class _Fields:
    """Reads the fields of one object of a profile; what cannot be believed becomes a doubt and None."""

    def __init__(self, obj: Mapping[str, object], where: str, prefix: str, doubts: list[Doubt]) -> None:
        self._obj = obj
        self._where = where
        self._prefix = prefix
        self._doubts = doubts
        for name in obj.twice if isinstance(obj, _Doubled) else ():
            self.doubt(name, "it is said more than once", "the last of them")

    def doubt(self, key: str, what: str, taken: str = "not known") -> None:
        self._doubts.append(Doubt(_clean(f"{self._where}: {self._prefix}{key}"), _clean(what), taken))

    def text(self, key: str) -> str | None:
        """A text without control characters, of bounded length; None where it is missing or empty."""
        value = self._obj.get(key)
        if value is None:
            return None
        if not isinstance(value, str):
            self.doubt(key, f"{_kind(value)} ({_shown(value)}) where a text belongs")
            return None
        return _clean(value) or None

    def word(self, key: str, words: Sequence[str]) -> str | None:
        value = self.text(key)
        if value is None or value in words:
            return value
        self.doubt(key, f"{_shown(value)} is none of {', '.join(words)}")
        return None

    def truth(self, key: str) -> bool | None:
        value = self._obj.get(key)
        if value is None or isinstance(value, bool):
            return value
        self.doubt(key, f"{_kind(value)} ({_shown(value)}) where true or false belongs")
        return None

    def number(self, key: str, most: float) -> float | int | None:
        """A number from 0 to `most`."""
        value = self._obj.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.doubt(key, f"{_kind(value)} ({_shown(value)}) where a number belongs")
        elif isinstance(value, float) and not math.isfinite(value):
            self.doubt(key, f"{value} is no number")
        elif value < 0:
            self.doubt(key, f"{_shown(value)} is negative")
        elif value > most:
            self.doubt(key, f"{_shown(value)} is more than any machine has")
        else:
            return value
        return None

    def size(self, key: str) -> int | None:
        """Bytes of a field in MiB; a fraction of a byte is left away, so that nothing grows past what was said."""
        value = self.number(key, MOST_BYTES // MIB)
        return None if value is None else int(value * MIB)

    def whole_size(self, key: str) -> int | None:
        """`size`, where 0 cannot be."""
        value = self.size(key)
        if value == 0:
            self.doubt(key, "0 is what is written when nobody knew")
            return None
        return value

    def count(self, key: str, most: int, least: int = 1) -> int | None:
        value = self.number(key, most)
        if value is None:
            return None
        if value != int(value) or value < least:
            self.doubt(key, f"{_shown(value)} is no count")
            return None
        return int(value)

    def part(self, key: str) -> _Fields | None:
        """The fields of an object inside; None where it is missing."""
        value = self._obj.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.doubt(key, f"{_kind(value)} ({_shown(value)}) where an object belongs")
            return None
        return _Fields(value, self._where, f"{self._prefix}{key}.", self._doubts)

    def words(self, key: str) -> frozenset[str]:
        value = self._obj.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            self.doubt(key, f"{_kind(value)} where a list of words belongs", "none")
            return frozenset()
        return frozenset(_clean(word) for word in value[:TEXT_MAX]) - {""}

    def peers(self) -> dict[str, str]:
        value = self._obj.get("peers")
        if value is None:
            return {}
        if not isinstance(value, dict):
            self.doubt("peers", f"{_kind(value)} where an object belongs", "nothing about peers")
            return {}
        found = {}
        for name, code in list(value.items())[:CARDS_MAX]:
            if code in PEER_CODES:
                found[_clean(name)] = code
            else:
                self.doubt(f"peers.{_clean(name)}", f"{_shown(code)} is none of {', '.join(PEER_CODES)}")
        return found

    def listed_doubts(self) -> None:
        """The doubts that the profile itself has."""
        value = self._obj.get("doubts")
        if value is None:
            return
        if not isinstance(value, list):
            self.doubt("doubts", f"{_kind(value)} where a list belongs", "none")
            return
        for entry in value[:DOUBTS_MAX]:
            texts = [entry.get(key) for key in ("where", "what", "taken")] if isinstance(entry, dict) else [None]
            if all(isinstance(text, str) for text in texts):
                self._doubts.append(Doubt(*(_clean(text) for text in texts if isinstance(text, str))))
            else:
                self.doubt("doubts", f"{_shown(entry)} is no doubt with where, what and taken", "left out")


def _memory(top: _Fields) -> MemoryFacts | None:
    total = top.whole_size("mem_total_mib")
    group = top.whole_size("cgroup_limit_mib")
    limit = top.whole_size("mem_limit_mib")
    available = top.size("mem_available_mib")
    swap = top.size("swap_mib")
    said = top.text("mem_limit_source")
    bounds = []
    if limit is not None:
        bounds.append((limit, said or ("MemTotal" if limit == total else "the profile's limit")))
    if total is not None:
        bounds.append((total, "MemTotal"))
    if group is not None:
        bounds.append((group, "control group"))
    if not bounds:
        if available is None:
            return None
        top.doubt("mem_total_mib", "only what is available is said, not how much memory there is", "no more than that")
        bounds.append((available, "MemAvailable"))
    least, source = min(bounds, key=lambda bound: bound[0])
    return MemoryFacts(total, least, source, available, swap)


def _cpu(top: _Fields) -> CpuFacts | None:
    part = top.part("cpu")
    if part is None:
        return None
    logical, usable = part.count("logical", 1 << 20), part.count("usable", 1 << 20)
    if logical is None and usable is None:
        top.doubt("cpu", "it does not say how many cores there are")
        return None
    if logical is not None and usable is not None and usable > logical:
        part.doubt("usable", f"{usable} of {logical} cannot be", str(logical))
        usable = logical
    cores = usable or logical or 1
    return CpuFacts(
        name=part.text("name") or "CPU",
        logical=logical or cores,
        usable=cores,
        source=part.text("source") or "processors",
        flags=part.words("isa_flags"),
        numa_nodes=part.count("numa_nodes", 1 << 16) or 1,
    )


def _cards(entries: Sequence[object], where: str, doubts: list[Doubt]) -> tuple[Card, ...]:
    cards: list[Card] = []
    said = [entry.get(key) for entry in entries if isinstance(entry, dict) for key in ("id", "pci")]
    taken = {_clean(name) for name in said if isinstance(name, str)}
    for index, entry in enumerate(entries):
        if isinstance(entry, dict):
            cards.append(_card(_Fields(entry, where, f"gpus[{index}].", doubts), taken))
        else:
            what = f"{_kind(entry)} where a card belongs"
            doubts.append(Doubt(_clean(f"{where}: gpus[{index}]"), what, "left out"))
    return tuple(cards)


def _card(part: _Fields, taken: set[str]) -> Card:
    """`taken` are the names in use; the card's own is added where it has to be made up."""
    said = part.text("vendor") or ""
    vendor = said.lower()
    if vendor not in VENDORS:
        part.doubt("vendor", f"{_shown(said) or 'nothing'} is none of {', '.join(VENDORS)}", "other: no backend")
        vendor = "other"
    pci = part.text("pci")
    name = part.text("id") or pci
    if name is None:
        number = next(n for n in range(CARDS_MAX * 2) if f"{vendor}-{n}" not in taken)
        name = f"{vendor}-{number}"
        taken.add(name)
    unified = part.truth("uma")
    if unified is None:
        part.doubt("uma", "it does not say whether it has memory of its own", "it has")
    speed = part.number("bandwidth_gb_s", 1e6)
    link = part.part("pcie")
    return Card(
        vendor=vendor,
        id=name,
        name=part.text("name") or f"unnamed {vendor} card",
        arch=part.text("arch"),
        unified=unified or False,
        total_bytes=part.size("vram_total_mib"),
        reserved_bytes=part.size("vram_reserved_mib"),
        used_bytes=part.size("vram_used_idle_mib"),
        free_bytes=part.size("vram_free_mib"),
        visible_bytes=part.size("vis_vram_mib"),
        gtt_total_bytes=part.size("gtt_total_mib"),
        gtt_used_bytes=part.size("gtt_used_mib"),
        bar1_total_bytes=part.size("bar1_total_mib"),
        bar1_free_bytes=part.size("bar1_free_mib"),
        link=None if link is None else Link(link.count("gen", 16), link.count("width", 64)),
        display=part.truth("display"),
        pci=pci,
        numa_node=part.count("numa_node", 1 << 16, least=0),
        bandwidth_bytes_s=None if not speed else float(round(speed * 1e9)),
        peers=part.peers(),
    )


def _environment(os: str | None, kernel: str | None) -> str | None:
    """Where a profile does not say what it runs in, its names often tell."""
    words = f"{os or ''} {kernel or ''}".lower()
    if "wsl" in words or "microsoft" in words:
        return "wsl2"
    if "windows" in words:
        return "windows"
    if re.search(r"\b(kvm|qemu|guest|vmware|virtualbox|hyper-v)\b", words):
        return "vm"
    if re.search(r"\b(docker|podman|lxc|lxd|kubernetes|pod|container)\b", words):
        return "container"
    return None


def _clean(text: str) -> str:
    return "".join(character for character in text[:TEXT_MAX] if character.isprintable()).strip()


def _kind(value: object) -> str:
    names = {type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "a text"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def _shown(value: object) -> str:
    """A value as a doubt shows it: short, and safe for a terminal."""
    if isinstance(value, int) and value.bit_length() > 128:
        return "a number of more than 38 digits"
    text = _clean(value) if isinstance(value, str) else repr(value) if isinstance(value, int | float) else _kind(value)
    return text if len(text) <= 60 else text[:57] + "..."
