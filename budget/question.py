"""How a plan was asked for, and the command lines that ask again: `homeserve up` for the plan, `homeserve budget` for
another look.

Settings have the names and words of `homeserve up` (`max_running`, `--max-running`). What stands at its default is left
out of a line, so that a line says only what was chosen.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from budget.facts import MIB
from budget.wish import DEFAULT_RUNNING, Wish

if TYPE_CHECKING:
    from budget.plan import Plan

BUDGET_ONLY = frozenset({"vision", "quant", "shape", "assume_ram_mib"})
"""Settings that `up` does not have: it takes the file and the box as they are."""

_DEFAULTS: Mapping[str, str | int] = {
    "context": 0,
    "kv_tokens": 0,
    "kv_type": "f16",
    "max_running": 0,
    "chunk": 256,
    "devices": "auto",
    "memory": "auto",
    "layout": "auto",
    "flip": "auto",
    "weight_vector": "auto",
    "token_vector": "auto",
    "pipeline_ratio": "auto",
    "cpu_moe": "auto",
    "draft": "auto",
    "vision": "off",
}


@dataclass(frozen=True)
class Question:
    """What of the question is no setting of a plan: the model as it was named (None: no file here, only a shape), the
    shape (--shape), and the words of `budget` beside them (--box FILE: names and values in turn), which a second look
    needs again."""

    model: str | None = None
    shape: str | None = None
    beside: tuple[str, ...] = ()
    refused: Callable[[Mapping[str, str | int]], Sequence[str]] = lambda settings: ()
    """The words of a command line with these settings that `homeserve up` of this version refuses."""

    @property
    def here(self) -> bool:
        """Whether the file that is planned for has a name: not a shape's, nor that of another mix of the model."""
        return self.model is not None and "--quant" not in self.beside

    @property
    def quant(self) -> str | None:
        """The mix that was asked for instead of the model's own."""
        return dict(zip(self.beside[::2], self.beside[1::2], strict=True)).get("--quant")

    def up_line(self, settings: Mapping[str, str | int]) -> str:
        """`homeserve up ...` with these settings; MODEL stands for a file that is not here."""
        kept = {name: value for name, value in settings.items() if name not in BUDGET_ONLY}
        model = quoted(self.model) if self.model is not None and self.here else "MODEL"
        return " ".join(["homeserve up", model, *flags(kept)])

    def budget_line(self, settings: Mapping[str, str | int]) -> str:
        """`homeserve budget ...`: the same question with these settings. A shape among them takes the model's place."""
        words: list[str] = []
        if "shape" not in settings:
            words += [] if self.model is None else [self.model]
            words += [] if self.shape is None else ["--shape", self.shape]
        for name, value in zip(self.beside[::2], self.beside[1::2], strict=True):
            if name.removeprefix("--").replace("-", "_") not in settings:
                words += [name, value]
        return " ".join(["homeserve budget", *map(quoted, words), *flags(settings)])


def settings_of(wish: Wish) -> dict[str, str | int]:
    """Every setting of a wish by name, with 0, "auto" or "off" where nothing was chosen."""
    found: dict[str, str | int] = {
        "context": wish.context,
        "kv_tokens": wish.kv_tokens,
        "kv_type": wish.kv_type,
        "max_running": wish.running,
        "chunk": wish.chunk,
        "devices": f"cpu:{wish.cpu_ranks}" if wish.cpu_ranks > 1 else ",".join(wish.devices) or "auto",
        "memory": "unified" if wish.unified else "auto",
        "layout": wish.layout,
        "flip": "manual" if wish.flip == "on" else wish.flip,
        "weight_vector": _joined(wish.weight_vector),
        "token_vector": _joined(wish.token_vector),
        "pipeline_ratio": _joined(wish.pipeline_ratio),
        "cpu_moe": {-1: "auto", 0: "off"}.get(wish.cpu_moe, wish.cpu_moe),
        "draft": (wish.drafts or "auto") if wish.draft else "off",
        "vision": "on" if wish.vision else "off",
    }
    if wish.floor_bytes is not None:
        found["floor_mib"] = wish.floor_bytes // MIB
    return found


def run_settings(plan: Plan) -> dict[str, str | int]:
    """The settings with which `homeserve up` makes this plan: those of its wish, and how many requests at once where
    that is not what `up` takes by itself."""
    running = plan.running if plan.wish.running or plan.running != DEFAULT_RUNNING else 0
    return settings_of(plan.wish) | {"max_running": running}


def flags(settings: Mapping[str, str | int]) -> list[str]:
    """The settings that are not at their default, as words of a command line, quoted where a shell asks for it."""
    return [
        f"--{name.replace('_', '-')} {quoted(str(value))}"
        for name, value in settings.items()
        if _DEFAULTS.get(name) != value
    ]


def quoted(word: str) -> str:
    """A word for a shell that shows nothing of itself to a terminal: what cannot be printed stands as its bytes."""
    if word.isprintable():
        return shlex.quote(word)
    parts = []
    for each in word:
        if each in "\\'":
            parts.append(f"\\{each}")
        else:
            plain = each.isprintable()
            parts.append(each if plain else "".join(f"\\x{b:02x}" for b in each.encode("utf-8", "surrogateescape")))
    return f"$'{''.join(parts)}'"


def _joined(vector: Sequence[int]) -> str:
    return ",".join(str(part) for part in vector) or "auto"
