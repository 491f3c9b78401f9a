"""What people call a model, resolved to a path.

PATH                      a GGUF file, the first part of a split one, or a folder
hf:OWNER/REPO[:WHICH]     a repository of the hub; WHICH is a quantisation (Q4_K_M) or a file name
ALIAS                     a short name of the table below
nothing                   the default model
"""

from __future__ import annotations

import os
from pathlib import Path

from homeserve import settings
from homeserve.checkpoint import packaged_model
from homeserve.checkpoint.packaged_model import SMOLLM2_135M
from homeserve.checkpoint.store import Progress, quiet
from homeserve.errors import ModelNotFound

ALIASES: dict[str, str | None] = {
    "smollm2": None,
    "smollm2:135m": None,
    "smollm2:360m": "hf:bartowski/SmolLM2-360M-Instruct-GGUF:Q8_0",
    "smollm2:1.7b": "hf:HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF:Q4_K_M",
    "tinyllama": "hf:TheBloke/TinyLlama-1.1B-Chat-v1.0-GGUF:Q4_K_M",
    "llama3.2:1b": "hf:bartowski/Llama-3.2-1B-Instruct-GGUF:Q4_K_M",
    "llama3.2:3b": "hf:bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M",
    "llama3.1:8b": "hf:bartowski/Meta-Llama-3.1-8B-Instruct-GGUF:Q4_K_M",
    "mistral:7b": "hf:bartowski/Mistral-7B-Instruct-v0.3-GGUF:Q4_K_M",
}
"""Short name -> full name; None is the default model."""


def resolve(name: str | None, *, cache_dir: str | Path, progress: Progress | None = None) -> str:
    """The path of the model called `name`, fetched if need be. Blocks: call it off the loop.

    `cache_dir` is where the default model is kept; files of the hub are in the hub's own cache. `progress` gets
    (stage, done bytes, total bytes) several times a second; an exception that it raises ends the fetch and leaves
    nothing half-done. Raises ModelNotFound, FetchError.
    """
    if name is None:
        return default_model_path(cache_dir, progress)
    if name.startswith("hf:"):
        # The hub's library is large and few starts need it.
        from homeserve.checkpoint import hub

        return hub.fetch(name, progress or quiet)
    if name and "\0" not in name and os.path.exists(name):
        return name
    if name.lower() in ALIASES:
        return resolve(ALIASES[name.lower()], cache_dir=cache_dir, progress=progress)
    raise _unknown(name)


def default_model_path(cache_dir: str | Path | None = None, progress: Progress | None = None) -> str:
    """The default model's file, fetched once. Raises FetchError.

    Without `cache_dir` (tests and benchmarks, which have no settings) the folder is that of a server without flags.
    """
    folder = settings.default_cache_dir(settings.environment()) if cache_dir is None else Path(cache_dir)
    return str(packaged_model.fetch(SMOLLM2_135M, folder / "models", progress or quiet))


def _unknown(name: str) -> ModelNotFound:
    shown = name if len(name) <= 200 else name[:200] + "…"
    fix = f"give a path, hf:OWNER/REPO[:QUANT], or one of: {', '.join(ALIASES)}"
    if name.count("/") == 1 and not name.startswith(("/", "./", "../", "~")):
        fix = f"is it hf:{shown}? Otherwise {fix}"
    return ModelNotFound(f"there is no model {shown!r} here", field="model", fix=fix)
