"""The settings of `homeserve budget`: from words of a command line to a `Wish`.

Settings that `up` has too are read as `up` reads them, from the environment and homeserve.toml as well, so that a plan
is the one that `up` would make. A plan may also be asked for with settings that `up` cannot run yet (another KV type,
cards beside the CPU): those are read here, and only from the command line. Without them the settings of `up` count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budget.facts import KV_BITS, MIB
from budget.quants import QUANTS
from budget.question import flags
from budget.wish import DEFAULT_CARD_FLOOR, DEFAULT_HOST_FLOOR, Wish
from homeserve.errors import SettingError
from homeserve.settings import VECTOR_MAX, Option, check_devices, flag, near, options, ranks_of, resolve

if TYPE_CHECKING:
    import argparse

    from budget.facts import Box
    from homeserve.settings import Settings

SHARED = ("context", "kv_tokens", "max_running", "chunk", "floor_mib", "threads")
"""Settings that are the same as those of `up`."""
ALL_LAYERS = 1 << 16
"""More layers than any model has: `--cpu-moe` without a number."""

_KV_TYPE = Option("text", "", "", choices=tuple(KV_BITS))
_MEMORY = Option("text", "", "", choices=("auto", "discrete", "unified"))
_SWITCH = Option("switch", "", "")
_LAYERS = Option("int", "", "", low=0, high=ALL_LAYERS)
_ASSUMED = Option("int", "", "", low=1, high=1 << 26)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Values stay text here; `wish_of` converts them."""
    table = options()
    size = parser.add_argument_group("Size")
    for name in SHARED:
        option = table[name]
        zero = f" (0: {option.zero})" if option.zero else ""
        if name == "floor_mib":
            zero = f" (default: {DEFAULT_CARD_FLOOR // MIB} on a card, {DEFAULT_HOST_FLOOR // MIB} of the host)"
        size.add_argument(flag(name), dest=name, metavar="N", help=f"{option.help}{zero}")
    size.add_argument("--kv-type", metavar="TYPE", help=f"type of KV rows: {', '.join(KV_BITS)} (default: f16)")
    size.add_argument("--quant", metavar="TYPE", help=f"what if the model were quantised so: {', '.join(QUANTS)}")
    size.add_argument(
        "--vision", nargs="?", const="on", metavar="on|off", help="count the vision tower too (default: off)"
    )
    size.add_argument(
        "--draft", metavar="auto|off|N", help="count the drafting block where the model has one, for N drafts (auto: 3)"
    )
    place = parser.add_argument_group("Devices")
    place.add_argument(
        "--devices",
        metavar="A,B",
        help="only these: cpu, cuda:N, rocm:N, or ids as the report has them; cpu:N alone: N ranks on the CPU",
    )
    place.add_argument("--layout", metavar="L", help="auto, pipeline or tensor")
    place.add_argument(
        "--memory", metavar="M", help="of several ranks on the CPU: discrete (each its own) or unified (one for all)"
    )
    place.add_argument(
        "--flip", metavar="MODE", help="both layouts: auto (where there is room), manual (in any case) or off"
    )
    place.add_argument("--weight-vector", metavar="A,B", help="shares of the weights in the tensor layout")
    place.add_argument("--token-vector", metavar="A,B", help="shares of the KV rows in the tensor layout")
    place.add_argument("--pipeline-ratio", metavar="A,B", help="layers of each rank in the pipeline layout, or shares")
    place.add_argument(
        "--cpu-moe", nargs="?", const="all", metavar="N", help="layers whose experts stay on the CPU: N, all, auto, off"
    )
    place.add_argument(
        "--assume-ram-mib", metavar="N", help="host memory of a profile that does not say how much its box has"
    )


def settings_like_up(args: argparse.Namespace, environ: Mapping[str, str], cwd: Path) -> Settings:
    """The settings of `up` as flags, environment and files say them. Raises SettingError."""
    import argparse

    given = {name: getattr(args, name) for name in SHARED}
    return resolve(argparse.Namespace(**given), environ, cwd)


def wish_of(args: argparse.Namespace, settings: Settings, box: Box) -> Wish:
    """What is asked of a plan on `box`. Raises SettingError that names the field."""
    said = settings.sources
    devices = devices_of(settings.devices if args.devices is None else args.devices)
    ranks = cpu_ranks_of(devices)
    kv_type = (
        settings.kv_type if args.kv_type is None else _KV_TYPE.convert(args.kv_type.lower(), "--kv-type", "kv_type")
    )
    draft = _like_up(args, settings, "draft")
    memory = _MEMORY.convert(args.memory or settings.memory, "--memory", "memory")
    _check_devices(args, settings, devices, memory)
    return Wish(
        context=settings.context,
        kv_tokens=settings.kv_tokens,
        kv_type=kv_type,
        running=settings.max_running if "max_running" in said else 0,
        chunk=settings.chunk,
        devices=tuple("cpu" if _is_cpu(word) else word for word in devices),
        in_order=bool(devices) and not any(map(_is_cpu, devices)),
        cpu_ranks=ranks,
        unified=memory == "unified",
        layout=_like_up(args, settings, "layout"),
        flip={"auto": "auto", "manual": "on", "off": "off"}[_like_up(args, settings, "flip")],
        weight_vector=_like_up(args, settings, "weight_vector"),
        token_vector=_like_up(args, settings, "token_vector"),
        pipeline_ratio=_like_up(args, settings, "pipeline_ratio"),
        cpu_moe=layers_of(args.cpu_moe),
        draft=draft != "off",
        drafts=int(draft) if draft.isdigit() else 0,
        vision=args.vision is not None and _SWITCH.convert(args.vision, "--vision", "vision"),
        floor_bytes=settings.floor_mib * MIB if "floor_mib" in said else None,
        threads=threads_of_rank(settings.threads, ranks, box),
        cores=box.cpu.usable if box.cpu is not None else 0,
        resident=False,
        like_cpu=True,
    )


def _is_cpu(word: str) -> bool:
    return word.lower().partition(":")[0] == "cpu"


def _check_devices(args: argparse.Namespace, settings: Settings, devices: Sequence[str], memory: str) -> None:
    """Raises the SettingError with which `up` refuses what such devices cannot have. Cards beside the CPU, of which
    `up` knows nothing, are asked for their memory alone."""
    cards = [word for word in devices if not _is_cpu(word)]
    if memory != "unified" and (not cards or len(cards) < len(devices)):
        return
    said = ",".join(cards) or (f"cpu:{cpu_ranks_of(devices)}" if devices else "auto")
    sources = {name: source for name, source in settings.sources.items() if getattr(args, name, None) is None}
    check_devices(replace(settings, devices=said, memory=memory, sources=sources))


def _like_up(args: argparse.Namespace, settings: Settings, name: str) -> Any:
    """A setting that `up` has too: from this command line, else as `up` would read it."""
    given = getattr(args, name)
    return getattr(settings, name) if given is None else options()[name].convert(given, flag(name), name)


def threads_of_rank(threads: int, ranks: int, box: Box) -> int:
    """Of each CPU rank: as many as were asked for, else an even part of the usable cores; 0: nothing tells."""
    return threads or (max(1, box.cpu.usable // ranks) if box.cpu is not None else 0)


def devices_of(text: str | None) -> tuple[str, ...]:
    """Words between commas; () for auto."""
    if text is None or text.strip().lower() == "auto":
        return ()
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise SettingError(
            f"--devices: {text!r} has an empty word", field="devices", fix="write them with commas between: cpu,cuda:0"
        )
    if len(words) > VECTOR_MAX:
        raise SettingError(f"--devices: {len(words)} devices", field="devices", fix=f"name at most {VECTOR_MAX}")
    return words


def cpu_ranks_of(devices: Sequence[str]) -> int:
    """Ranks on the CPU that `cpu:N` asks for; 1 where nothing does. (`cpu:0` is the CPU as the page numbers it.) Raises
    SettingError for more than there may be, or several beside other devices."""
    word = next((word for word in devices if word.lower().startswith("cpu:") and word.lower() != "cpu:0"), None)
    if word is None:
        return 1
    ranks = ranks_of(options()["devices"].convert(word, "--devices", "devices"))
    if ranks > 1 and len(devices) > 1:
        raise SettingError(
            f"--devices: {word} beside other devices: the CPU is one rank there",
            field="devices",
            fix="name cpu once, or cpu:N alone",
        )
    return ranks


def layers_of(text: str | None) -> int:
    """Layers whose experts stay on the CPU; -1 for auto."""
    word = "auto" if text is None else text.strip().lower()
    words = {"auto": -1, "off": 0, "none": 0, "all": ALL_LAYERS}
    if word in words:
        return words[word]
    if not word.isdigit():
        raise SettingError(
            f"--cpu-moe: {text!r} is not a number of layers", field="cpu_moe", fix="use a number, all, auto or off"
        )
    return int(_LAYERS.convert(word, "--cpu-moe", "cpu_moe"))


def refused_by_up(given: Mapping[str, str | int]) -> tuple[str, ...]:
    """Of settings by name: the words of a command line that `up` of this version refuses. The mix of a file is no
    setting of `up`: it takes the file."""
    table, found = options(), []
    for name, value in given.items():
        words = flags({name: value})
        if not words or name in ("quant", "shape", "assume_ram_mib"):
            continue
        try:
            if name not in table:
                raise SettingError(f"{flag(name)}: up does not have it", field=name)
            table[name].convert(value, flag(name), name)
        except SettingError:
            found += words
    return tuple(found)


def assumed_bytes(text: str | None) -> int | None:
    return None if text is None else int(_ASSUMED.convert(text, "--assume-ram-mib", "assume_ram_mib")) * MIB


def quant_of(text: str | None) -> str | None:
    """The name of a mix, as its table spells it."""
    if text is None or text.strip().lower() in ("off", "none", "auto"):
        return None
    names = {name.lower(): name for name in QUANTS}
    if text.strip().lower() not in names:
        raise SettingError(
            f"--quant: {text[:40]!r} is not a known mix{near(text, list(QUANTS))}",
            field="quant",
            fix=f"use one of {', '.join(QUANTS)}",
        )
    return names[text.strip().lower()]
