"""How much host memory AMD's kernel driver lets a GPU pin: two limits, three spellings, and none of them complains.

The driver has a limit of its own (`amdgpu.gttsize`, MiB) and its memory manager has another (`ttm.pages_limit`, pages).
Both count, so the least of them is the truth. The driver that comes with the kernel reads `ttm.*`, the one that is
built beside it (DKMS) reads `amdttm.*`; the other prefix, and any misspelt name, is ignored without a word, and the box
then has half of its memory for the GPU while its owner believes otherwise. So the command line is read, and every word
of it that is meant for these limits and has no effect is named.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from budget.facts import MIB
from budget.tree import Tree, clip, whole

_CMDLINE = "proc/cmdline"
_PAGE = 4096
_MEANT = re.compile(r"gtt|pages?_?(limit|pool)|(^|_)(ttm|amdttm)(_|$)")
"""Words that somebody wrote to change how much memory a GPU may pin."""
_GTT = "amdgpu.gttsize"


@dataclass(frozen=True)
class GttLimits:
    """What is in force: the memory manager's limit in bytes, and the name of its parameter."""

    pages_limit_bytes: int | None
    source: str


def gtt_limits(tree: Tree) -> GttLimits:
    """The limits in force. What the command line asks for in vain becomes a doubt."""
    manager = "amdttm" if tree.there("sys/module/amdttm") else "ttm"
    name = f"sys/module/{manager}/parameters/pages_limit"
    pages = tree.number(name)
    _examine_command_line(tree, manager, pages)
    return GttLimits(pages * _PAGE if pages is not None and pages > 0 else None, f"{manager}.pages_limit")


def _examine_command_line(tree: Tree, manager: str, pages: int | None) -> None:
    asked: dict[str, str] = {}
    for word in (tree.text(_CMDLINE) or "").split():
        name, _, value = word.partition("=")
        name = name.replace("-", "_")
        module, dot, parameter = name.rpartition(".")
        if module in ("amdgpu", "ttm", "amdttm") and _MEANT.search(parameter):
            asked[name] = value
        elif not dot and _MEANT.search(name):
            tree.doubt(
                _CMDLINE,
                f"{clip(word)} has no effect: a driver's parameter is written module.name",
                "as if it were not there",
            )
    for name, value in asked.items():
        _examine_word(tree, name, value, manager, pages)


def _examine_word(tree: Tree, name: str, value: str, manager: str, pages: int | None) -> None:
    module, _, parameter = name.partition(".")
    number = whole(value)
    effective = {_GTT, f"{manager}.pages_limit", f"{manager}.page_pool_size", f"{manager}.dma32_pages_limit"}
    vain = "as if it were not there"
    if name not in effective:
        if module in ("ttm", "amdttm") and module != manager:
            why = f"the driver that runs reads {manager}.{parameter}"
        else:
            near = _GTT if module == "amdgpu" else f"{module}.pages_limit"
            why = f"there is no such parameter; meant is {near}"
        tree.doubt(_CMDLINE, f"{name}={value} has no effect: {why}", vain)
    elif number is None:
        tree.doubt(_CMDLINE, f"{name}={value} has no effect: the value is no number", vain)
    elif name == _GTT:
        in_force = tree.number("sys/module/amdgpu/parameters/gttsize")
        if in_force is not None and in_force != number:
            tree.doubt(
                _CMDLINE, f"{name}={number} is not in force: the driver runs with {in_force}", "what the driver says"
            )
        else:
            tree.doubt(
                _CMDLINE, f"{name} is deprecated: use {manager}.pages_limit={number * MIB // _PAGE}", "it still counts"
            )
    elif parameter == "pages_limit" and pages is not None and pages != number:
        tree.doubt(_CMDLINE, f"{name}={number} is not in force: the driver runs with {pages}", "what the driver says")
