"""Say what fits on this box, what binds, and what to change; before anything is loaded or fetched.

Without MODEL: the box, what may be held on each device, and which of the models on disk fit. MODEL is a GGUF file, a
folder, a split file's first part, or an alias that was fetched; --shape plans for a model that is not here, --box for
another machine (what `homeserve probe --json` printed there). Exit code 2 where nothing fits.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budget.facts import Box, Doubt, ModelShape
from budget.page import safe
from budget.plan import Plan, Refusal, Unknown, WishError
from budget.question import Question
from budget.wish import Wish
from homeserve.commands import wishes, written
from homeserve.errors import HomeserveError, SettingError
from homeserve.settings import cache_dir, flag, options

if TYPE_CHECKING:
    import argparse

    from budget.boxes import ModelRow
    from budget.ceilings import Ceilings
    from homeserve.settings import Settings

REFUSED = 2
LOOK_S = 0.25
"""How long models on disk are looked at, after the first one, where none was asked for; the rest is counted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", help="what to plan for (without it: the box alone)")
    parser.add_argument(
        "--shape", metavar="FILE", help="a shape file, or the name of a built-in shape, instead of MODEL"
    )
    parser.add_argument("--box", metavar="FILE[#ID]", help="profile of a machine, or one of a list (default: this one)")
    parser.add_argument("--json", action="store_true", help="print JSON (docs/budget.schema.json)")
    parser.add_argument("--svg", metavar="FILE", help="also draw the plan into FILE")
    wishes.add_arguments(parser)


def run(args: argparse.Namespace, environ: Mapping[str, str]) -> int:
    cwd = Path.cwd()
    if args.svg is not None:
        written.check("--svg", args.svg, written.PICTURE)
    settings = wishes.settings_like_up(args, environ, cwd)
    for warning in settings.warnings:
        print(f"warning: {safe(warning)}", file=sys.stderr)
    box = _box(args)
    asked = _Asked(args, settings, environ, cwd, wishes.wish_of(args, settings, box), box)
    if args.model is not None and args.shape is not None:
        raise SettingError("MODEL and --shape are both given", field="shape", fix="name the model once")
    if args.model is None and args.shape is None:
        return _about_box(asked)
    return _about_model(asked)


@dataclass(frozen=True)
class _Asked:
    """One call of the command."""

    args: argparse.Namespace
    settings: Settings
    environ: Mapping[str, str]
    cwd: Path
    wish: Wish
    box: Box

    @property
    def cache(self) -> Path:
        return cache_dir(self.settings, self.environ)

    @property
    def beside(self) -> tuple[str, ...]:
        """The words of this question that are no settings and that a second look needs again."""
        words: list[str] = []
        for name in ("box", "quant", "assume_ram_mib"):
            value = getattr(self.args, name)
            words += [] if value is None else [flag(name), value]
        return tuple(words)


# ------------------------------------------------------------------------------------------------------- about a model


def _about_model(asked: _Asked) -> int:
    from budget.advice import Subject, answer
    from homeserve.commands.on_disk import default_shape

    args = asked.args
    shape, model, shape_word = _shape(asked)
    kv_types = frozenset(options()["kv_type"].choices)
    subject = Subject(asked.box, _requantised(shape, args.quant), default_shape(), cpu_kv_types=kv_types)
    outcome = _checked(lambda: answer(subject, asked.wish))
    doubts = _doubts(outcome.ceilings, outcome.doubts, _devices_of(outcome), asked.wish.kv_type)
    if args.box is not None:
        from budget.report import elsewhere

        outcome = elsewhere(outcome)
    question = Question(model, shape_word, asked.beside, wishes.refused_by_up)
    if args.svg is not None:
        _draw(args.svg, outcome)
    if args.json:
        from budget.document import document

        _print_json(document(outcome.ceilings, asked.box.memory, outcome, doubts, question))
    else:
        from budget.page import style_of
        from budget.report import report

        _print(report(outcome, asked.box.memory, doubts, question, style_of(sys.stdout, asked.environ)))
    return REFUSED if isinstance(outcome, Refusal) else 0


def _shape(asked: _Asked) -> tuple[ModelShape, str | None, str | None]:
    """The shape that is asked about; the model's name for a command line, and the shape's, where there is one."""
    args = asked.args
    if args.shape is not None:
        return _load_shape(args.shape), None, args.shape
    from homeserve.commands import on_disk

    path = on_disk.find(args.model, asked.cache, asked.environ)
    if path is None:  # the default model, before it was fetched
        return on_disk.default_shape(), args.model, None
    from homeserve.model_facts import read_shape

    return read_shape(path), args.model, None


def _load_shape(name: str) -> ModelShape:
    from budget.shape import ShapeError, load_shape

    if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
        raise SettingError(f"--shape: {name}: not a regular file", field="shape", fix="give the path of a shape file")
    try:
        return load_shape(name)
    except ShapeError as error:
        where = f"{error.field}: " if error.field else ""
        raise SettingError(f"--shape: {error.where}: {where}{error.what}", field="shape", fix=error.fix) from None
    except OSError as error:  # a name that no file can have
        raise SettingError(f"--shape: {error.strerror}", field="shape", fix="give the path of a shape file") from None


def _requantised(shape: ModelShape, quant: str | None) -> ModelShape:
    from budget.shape import requantised

    name = wishes.quant_of(quant)
    return shape if name is None else requantised(shape, name)


def _devices_of(outcome: Plan | Refusal | Unknown) -> Iterable[int]:
    """Devices that the plan, or the option that came nearest, computes on."""
    if isinstance(outcome, Plan):
        return outcome.ranks
    if isinstance(outcome, Refusal):
        return _computing(outcome.ceilings, {line.device for line in outcome.lines} | {outcome.device})
    return ()


def _computing(found: Ceilings, devices: Iterable[int]) -> list[int]:
    """Of devices that hold something those that compute: the host holds something beside every card."""
    held = sorted(devices)
    return [index for index in held if found.devices[index].kind != "cpu"] or held


# ------------------------------------------------------------------------------------------------------- about the box


def _about_box(asked: _Asked) -> int:
    from budget.advice import named_cards
    from budget.boxes import box_report, model_json
    from budget.ceilings import ceilings

    if asked.args.svg is not None:
        raise SettingError("--svg draws a plan, and a plan needs a model", field="svg", fix="name a MODEL or a --shape")
    found = ceilings(asked.box, asked.wish.floor_bytes, named=named_cards(asked.box, asked.wish))
    rows, more = _models_on_disk(asked)
    usable = _computing(found, (device.index for device in found.devices if device.usable))
    doubts = _doubts(found, (), usable, asked.wish.kv_type)
    if asked.args.json:
        from budget.document import document

        models = [model_json(row) for row in rows]
        _print_json(document(found, asked.box.memory, None, doubts, models=models))
    else:
        from budget.page import style_of

        style = style_of(sys.stdout, asked.environ)
        _print(box_report(asked.box, found, doubts, rows, more, style, asked.beside))
    return 0


def _models_on_disk(asked: _Asked) -> tuple[list[ModelRow], int]:
    """Each model on disk with its plan, and how many were not looked at."""
    from budget.advice import Subject, answer
    from budget.boxes import ModelRow
    from homeserve.commands import on_disk

    paths, more = on_disk.listed(asked.cache, asked.environ, asked.cwd)
    if not paths:
        return [], 0
    from homeserve.model_facts import read_shape

    until = None
    rows: list[ModelRow] = []
    for at, path in enumerate(paths):
        if until is not None and time.monotonic() > until:
            return rows, more + len(paths) - at
        shown = _shown(path, asked.cwd)
        try:
            shape = read_shape(str(path))
            rows.append(ModelRow(shown, answer(Subject(asked.box, shape), asked.wish, advise=False), ""))
        except WishError as error:
            rows.append(ModelRow(shown, None, error.what))
        except HomeserveError as error:
            # What a row says of a file that cannot be used; naming the file tells the rest.
            rows.append(ModelRow(shown, None, error.message.replace(f"{path}: ", "")))
        if until is None:  # the first one also paid for the imports
            until = time.monotonic() + LOOK_S
    return rows, more


def _shown(path: Path, cwd: Path) -> str:
    """The path as a person would write it here."""
    return os.fspath(path.relative_to(cwd)) if path.is_relative_to(cwd) else os.fspath(path)


# ------------------------------------------------------------------------------------------------------------- details


def _box(args: argparse.Namespace) -> Box:
    from budget.advice import with_memory

    assumed = wishes.assumed_bytes(args.assume_ram_mib)
    if args.box is None:
        from budget.probe import read_box

        box = read_box()
    else:
        from budget.profile import ProfileError, load_box

        try:
            box = load_box(args.box)
        except ProfileError as error:
            message = f"--box: {error.where}: {error.field}: {error.what}"
            raise SettingError(message, field="box", fix=error.fix) from None
    return box if assumed is None else with_memory(box, assumed)


def _checked(planned: Callable[[], Plan | Refusal | Unknown]) -> Plan | Refusal | Unknown:
    """A wish that contradicts the box or the model is a setting that cannot be used."""
    try:
        return planned()
    except WishError as error:
        said = flag(error.field)
        message = error.what if error.what.startswith(said) else f"{said}: {error.what}"
        raise SettingError(message, field=error.field, fix=error.fix) from None


def _doubts(found: Ceilings, more: Iterable[Doubt], used: Iterable[int], kv_type: str) -> list[Doubt]:
    """Each doubt once; what this version cannot compute stands first."""
    return list(dict.fromkeys([*not_here_yet(found, used, kv_type), *found.doubts, *more]))


def not_here_yet(found: Ceilings, used: Iterable[int], kv_type: str) -> list[Doubt]:
    """What a plan on the devices `used` needs and this version does not have: cards beside the CPU, a KV type."""
    kinds = {found.devices[index].kind == "cpu" for index in used}
    doubts = []
    if len(kinds) > 1:
        what = "this version computes on cards or on the CPU: it has no fleet of both"
        doubts.append(Doubt("backend", what, "what a build that has them will use"))
    if kinds and kv_type not in options()["kv_type"].choices:
        what = f"this version has no KV rows of {kv_type}"
        doubts.append(Doubt("backend", what, "what a build that has them will use"))
    return doubts


def _draw(path: str, outcome: Plan | Refusal | Unknown) -> None:
    if isinstance(outcome, Unknown):
        print(f"homeserve: nothing to draw: {outcome.why}", file=sys.stderr)
        return
    from budget.picture import svg

    written.write("--svg", path, svg(outcome))


def _print_json(found: Mapping[str, Any]) -> None:
    print(json.dumps(found, indent=2, allow_nan=False))


def _print(lines: Iterable[str]) -> None:
    """A name that the terminal's encoding lacks is shown with replacements, not refused."""
    text = "\n".join(lines)
    encoding = sys.stdout.encoding or "ascii"
    print(text.encode(encoding, "replace").decode(encoding))
