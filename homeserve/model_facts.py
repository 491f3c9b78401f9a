"""A model before it is loaded: found (and perhaps fetched), opened, and what the engine process keeps of it.

The slow parts, imports of the rooms that they need among them, run in threads. A thread cannot be cancelled, so an
interrupted fetch is ended by what its next word of progress raises, and waited for, because it then removes what is
half-done.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from budget.facts import ModelShape
from homeserve.errors import HomeserveError, UnknownArchitecture, told_of
from homeserve.server.context import ModelInfo
from homeserve.settings import Settings

if TYPE_CHECKING:
    from homeserve.checkpoint import Checkpoint
    from homeserve.models.config import ModelConfig

Told = Callable[[str, int | None, int | None], None]
"""Progress: stage, done bytes, total bytes."""

FETCH_CANCEL_S = 6.0
"""What an interrupted fetch may take to end its helper process and remove what is half-done."""


async def find_model(name: str | None, cache: Path, told: Told) -> str:
    """The path of the model called `name`, fetched if need be. Raises ModelNotFound, FetchError."""
    report = ThreadProgress(asyncio.get_running_loop(), told)
    finding = asyncio.ensure_future(asyncio.to_thread(_resolve, name, cache, report))
    try:
        return await asyncio.shield(finding)
    except asyncio.CancelledError:
        report.interrupted = True
        await asyncio.wait({finding}, timeout=FETCH_CANCEL_S)
        raise


def _resolve(name: str | None, cache: Path, progress: ThreadProgress) -> str:
    from homeserve.checkpoint import names

    return names.resolve(name, cache_dir=cache, progress=progress)


class ThreadProgress:
    """Progress of a thread, told on the loop. A thread cannot be cancelled, but what this raises ends its fetch."""

    def __init__(self, loop: asyncio.AbstractEventLoop, told: Told) -> None:
        self.interrupted = False
        self._loop = loop
        self._told = told

    def __call__(self, stage: str, done_bytes: int, total_bytes: int) -> None:
        if self.interrupted:
            raise InterruptedError("the start was interrupted")
        self._loop.call_soon_threadsafe(self._told, stage, done_bytes, total_bytes)


@dataclass(frozen=True)
class ModelFacts:
    """What the engine process keeps of a model: names and numbers; the tensors stay in the mapped file."""

    checkpoint: Checkpoint
    config: ModelConfig
    info: ModelInfo
    shape: ModelShape
    why_no_drafts: str = ""
    """Why the model cannot draft: it has no drafting block, or not a whole one. Empty: it can."""


def read_model(path: str, settings: Settings) -> ModelFacts:
    """Open a checkpoint and read what the plan needs. Raises ModelErrors."""
    from homeserve import checkpoint
    from homeserve.checkpoint.pooling import pooling_of
    from homeserve.models.registry import folder_families

    opened = checkpoint.open(path, folder_families)
    try:
        config, shape, why = _shape_of(opened, settings.model_id or model_id_of(path))
        pooling = pooling_of(path, opened.arch, opened.metadata)
    except HomeserveError:
        opened.close()
        raise
    known = shape.name, path, opened.arch, opened.quant_label, config.context, config.vocab, pooling
    info = ModelInfo(*known, created=int(time.time()))
    return ModelFacts(opened, config, info, shape, why)


def read_shape(path: str) -> ModelShape:
    """What a budget needs of a checkpoint that nobody is going to run now: its headers are read, no tensor's data.

    Raises ModelNotFound, InvalidModelFile (a split file that lacks a part names it), UnsupportedModel, and
    UnknownArchitecture, which says that a shape can be given instead.
    """
    from homeserve import checkpoint
    from homeserve.models.registry import folder_families

    opened = checkpoint.open(path, folder_families)
    try:
        return _shape_of(opened, model_id_of(path))[1]
    except UnknownArchitecture as error:
        error.fix = "describe the model with --shape (a file, or the name of a built-in shape)"
        raise
    finally:
        opened.close()


def _shape_of(opened: Checkpoint, name: str) -> tuple[ModelConfig, ModelShape, str]:
    """Config, shape, and why the model cannot draft; a drafting block that cannot be used is not in the shape."""
    from homeserve.models import registry, shape
    from homeserve.models.bind import why_no_drafts
    from homeserve.models.draft_ops import lacks_block

    family = registry.family(opened.arch)
    with told_of(opened.path):
        config = family.config_from(opened.metadata)
        found = shape.shape_of(family, config, opened.tensors, name=name, quant=opened.quant_label)
        # A block that is there is bound to see whether it is whole: that takes as long as a load's first moment.
        why = lacks_block(family, config, opened.tensors.keys()) or why_no_drafts(family, config, opened.tensors)
        if why:
            found = replace(found, nextn=(), nextn_bytes=0, nextn_params=0, nextn_table_bytes=0)
        return config, found, why


def model_id_of(path: str) -> str:
    """The file's name without its ending and part number; a folder's name."""
    name = Path(path).resolve().name
    return re.sub(r"(-\d{5}-of-\d{5})?\.gguf$", "", name, flags=re.I) or name
