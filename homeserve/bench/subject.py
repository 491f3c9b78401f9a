"""What is measured: the server as it tells of itself, and its model's file where that lies on this machine.

A homeserve tells all of it (`/v1/homeserve/status`). Of another server only its list of models is known: requests can
be measured, its processes and layouts cannot. What is not known is None.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from homeserve.bench.client import Refused, Target, Unmeasured, WrongAnswer

STATUS = "/v1/homeserve/status"
NO_ROUTE = (404, 405, 501)
LOADED = "loaded"
NOT_OURS = "it is no homeserve: it has no /v1/homeserve/status"
ENGINES = {"llamacpp": "llama-server", "homeserve": "homeserve", "vllm": "vllm"}
"""What an engine is called, by the owner that it says its models have."""
WORDS = 4000
IDS_LEAST = 16
"""Different tokens that random prompts need."""


@dataclass(frozen=True)
class Subject:
    """`ours`: it is a homeserve. `layout`: of several ranks. `flip`: the policy, `no_flip`: why there is none.
    `context`, `kv_tokens`: of one request, of all."""

    engine: str
    model: str
    ours: bool = False
    version: str | None = None
    commit: str | None = None
    arch: str | None = None
    quant: str | None = None
    path: str | None = None
    context: int | None = None
    kv_tokens: int | None = None
    size_bytes: int | None = None
    params: int | None = None
    backend: str | None = None
    devices: tuple[str, ...] = ()
    threads: int | None = None
    isa: str | None = None
    ranks: int | None = None
    layout: str | None = None
    flip: str | None = None
    no_flip: str | None = None
    draft: str | None = None

    @property
    def several(self) -> bool:
        return (self.ranks or 1) > 1

    @property
    def flips(self) -> bool:
        return self.several and self.flip in ("auto", "manual")

    def as_json(self) -> dict[str, Any]:
        names = ("arch", "context", "size_bytes", "params", "backend", "threads", "ranks", "flip")
        return {"id": self.model} | {name: getattr(self, name) for name in names} | {"devices": list(self.devices)}


def read(target: Target, *, here: bool) -> Subject:
    """Ask the server. `here`: its model's path is one of this machine. Sets the target's engine and model. Raises
    Unmeasured, OSError."""
    models = _models(target)
    ids = [str(each["id"]) for each in models]
    if target.model is not None and target.model not in ids:
        raise Unmeasured(f"it has no model {target.model!r}; there is: {', '.join(ids)}")
    chosen = next((each for each in models if each["id"] == target.model), None) or _first(models)
    target.model = str(chosen["id"])
    if _state(chosen) not in (None, LOADED):
        # Of several models, one that comes in with the first request for it.
        target.post("/v1/completions", {"model": target.model, "prompt": "a", "max_tokens": 1})
    told = status(target)
    if told is None:
        subject = _other(chosen)
    else:
        size, params = _of_file(told["model"]["path"]) if here else (None, None)
        subject = _ours(told, size, params)
    target.engine = subject.engine
    return subject


def status(target: Target) -> Mapping[str, Any] | None:
    """What a homeserve tells of the model; None of another server. Raises Refused, OSError."""
    from urllib.parse import quote

    try:
        told = target.get(f"{STATUS}?model={quote(target.model or '', safe='')}")
    except Refused as error:
        if error.status in NO_ROUTE and error.code != "model_not_found":
            return None
        raise
    except WrongAnswer:  # a page for people, as some servers give for every path
        return None
    return told if isinstance(told, dict) and "ranks" in told else None


def token_ids(target: Target, source: random.Random) -> Sequence[int]:
    """Ids to draw prompts from: those of the tokens of random words, so that none is a control token and each is in the
    vocabulary, whatever that is. Raises Unmeasured where the server does not tell."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = " ".join("".join(source.choices(letters, k=source.randint(1, 6))) for _ in range(WORDS))
    body = {"model": target.model, "prompt": words, "add_special": False}
    if target.engine != "homeserve":
        body["content"] = words  # as llama-server calls it
    try:
        tokens = target.post("/tokenize", body)["tokens"]
        ids = sorted({int(token) for token in tokens})
    except (Refused, WrongAnswer, ValueError, KeyError, TypeError) as error:
        said = f" ({error})" if isinstance(error, Refused) else ""
        raise Unmeasured(f"the server has no /tokenize, and prompts of so many tokens cannot be made{said}") from None
    if len(ids) < IDS_LEAST:
        raise Unmeasured(f"the server's /tokenize knows {len(ids)} different tokens: too few for random prompts")
    return ids


def _models(target: Target) -> Sequence[Mapping[str, Any]]:
    """Raises Unmeasured where there are none."""
    told = target.get("/v1/models")
    models = told.get("data") if isinstance(told, dict) else None
    known = [each for each in models if isinstance(each, dict) and "id" in each] if isinstance(models, list) else []
    if not known:
        raise Unmeasured("it lists no model at /v1/models")
    return known


def _first(models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """A model that is in, where the server says which are."""
    return next((each for each in models if _state(each) == LOADED), models[0])


def _state(model: Mapping[str, Any]) -> str | None:
    """None of a server that does not say."""
    return (model.get("homeserve") or {}).get("state")


def _ours(told: Mapping[str, Any], size: int | None, params: int | None) -> Subject:
    model, ranks, draft = told["model"], told["ranks"], told["draft"]
    several = len(ranks) > 1
    drafting = ("auto" if draft.get("adapts") else str(draft.get("most"))) if draft.get("enabled") else "off"
    return Subject(
        engine="homeserve",
        model=str(model["id"]),
        ours=True,
        version=told["version"],
        commit=told["commit"],
        arch=model["arch"],
        quant=model["quant"],
        path=model["path"],
        context=model["context"],
        kv_tokens=told["kv"]["capacity_tokens"],
        size_bytes=size,
        params=params,
        backend=_same([rank["backend"] for rank in ranks]),
        devices=tuple(str(rank["device"]) for rank in ranks),
        threads=_same([rank["threads"] for rank in ranks]),
        isa=_same([rank["isa"] for rank in ranks]),
        ranks=len(ranks),
        layout=told["layout"] if several else None,
        flip=told["flip"]["policy"] if several else None,
        no_flip=told["flip"]["hold_reason"],
        draft=drafting,
    )


def _same(values: Sequence[Any]) -> Any:
    """What all have; None where they differ."""
    return values[0] if values and all(value == values[0] for value in values) else None


def _other(model: Mapping[str, Any]) -> Subject:
    """From the list of models, as llama-server and vLLM fill it."""
    owner = str(model.get("owned_by") or "")
    facts = model.get("meta") or {}
    return Subject(
        engine=ENGINES.get(owner, owner or "unknown"),
        model=_name(str(model["id"])),
        context=model.get("max_model_len") or facts.get("n_ctx"),
        size_bytes=facts.get("size"),
        params=facts.get("n_params"),
    )


def _name(id_: str) -> str:
    """Without folders, where an id is the path of a file."""
    return id_.rpartition("/")[2] if id_.startswith("/") else id_


def _of_file(path: str | None) -> tuple[int | None, int | None]:
    """Bytes and weights of the model that lies there; None where it cannot be read from here."""
    from homeserve import checkpoint
    from homeserve.errors import HomeserveError
    from homeserve.models.registry import folder_families

    if path is None or not Path(path).exists():
        return None, None
    try:
        opened = checkpoint.open(path, folder_families)
    except (HomeserveError, OSError):  # the server has read it; this is for a column of the table
        return None, None
    try:
        return opened.file_bytes, sum(tensor.rows * tensor.cols for tensor in opened.tensors.values())
    finally:
        opened.close()
