"""Replicas on the boxes of a Ray cluster, behind one address that sends each conversation to the box that knows it.

    serve run homeserve.integrations.ray:app model=/models/m.gguf replicas=2 flags="--context 8192"

    client ─▸ Ray's proxy ─▸ Ingress ─▸ (Ray's router) ─▸ Replica ─▸ homeserve up, on the same box
                                                       └▸ Replica ─▸ homeserve up, on another box

There is at most one replica a box (`replica`), and each server plans for the box it is on: their cards and memory may
differ. Which replica gets a request is decided by the router that Ray has for LLMs, by the longest prefix among prompts
that a replica has had, and by load where the queues differ by more than `imbalance`. What it compares is `Ask.prompt`
(`prefix`). The `ingress` is what Ray's proxy calls; it asks again where a replica is lost.

Ray is imported where it is needed, so that this module can be read, checked and tested without it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import msgspec

from homeserve.errors import SettingError
from homeserve.integrations.ingress import Ingress
from homeserve.integrations.replica import Replica
from homeserve.settings import load

OF_A_REPLICA = ("host", "port", "ready_file")
"""Settings that the replica itself makes."""
HEALTH_PERIOD_S = 2.0
HEALTH_TIMEOUT_S = 30.0
SHUTDOWN_MARGIN_S = 60.0
OPEN_REQUESTS = 10_000
"""Through the ingress at once. Replicas have the limits of their servers, which answer what is too much with a 429."""
TREE_CHARACTERS = 8 << 20
"""Where Ray's router begins to forget prompts."""

ROUTER = "PrefixCacheAffinityRouter"
_ROUTER_MODULES = (
    "ray.serve.llm.request_router",
    "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router",
)
"""Where Ray has it: its public name, which imports what only the extra `ray[llm]` brings (vLLM, and gigabytes beside
it), then the module that this name takes it from."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `app` takes, as words of `serve run` or `args` of a config file.

    `flags` are those of `homeserve up`, checked before anything is deployed; a `model` that is a path has to lie under
    that path on every box. `replicas`: a number, or 0 for one on each box that has the CPUs, GPUs and `resources`.
    `imbalance`: by how many requests queues may differ before load decides, not prefixes.
    """

    model: str | None = None
    flags: str = ""
    replicas: int = 0
    cpus: float = 1.0
    gpus: float = 0.0
    resources: dict[str, float] = {}
    imbalance: int = 4

    @staticmethod
    def of(args: Mapping[str, Any]) -> Options:
        """Raises SettingError that names the word."""
        try:
            options = msgspec.convert(dict(args), Options, strict=False)
        except msgspec.ValidationError as error:
            known = ", ".join(Options.__struct_fields__)
            raise SettingError(f"homeserve.integrations.ray: {error}", field="args", fix=f"known: {known}") from None
        for name in ("replicas", "cpus", "gpus", "imbalance"):
            if not getattr(options, name) >= 0:
                raise SettingError(f"{name}: {getattr(options, name)} is below 0", field=name)
        return options

    def arguments(self) -> list[str]:
        """Of `homeserve up`."""
        return ([self.model] if self.model is not None else []) + shlex.split(self.flags)


def app(args: dict[str, Any]) -> Any:
    """The Ray Serve application that `serve run homeserve.integrations.ray:app` deploys."""
    return build_app(Options.of(args))


def build_app(options: Options) -> Any:
    """The same in a program: `serve.run(build_app(Options(model=...)))`. Raises SettingError, also without Ray."""
    serve = _ray_serve()
    arguments = options.arguments()
    settings = load(arguments, {"XDG_CONFIG_HOME": os.devnull}, os.devnull)  # this box's own say nothing of others
    for name in OF_A_REPLICA:
        if name in settings.sources:
            raise SettingError(f"flags: {settings.sources[name]}: every replica has its own", field=name)
    replicas = serve.deployment(Replica).options(
        name="replica",
        num_replicas=options.replicas or _boxes(options),
        max_replicas_per_node=1,
        max_ongoing_requests=settings.max_running + settings.max_waiting,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus, "resources": options.resources},
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.leaving_s + SHUTDOWN_MARGIN_S,
        request_router_config=_router(options),
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        max_ongoing_requests=OPEN_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.leaving_s + SHUTDOWN_MARGIN_S,
    )
    return ingress.bind(replicas.bind(arguments, settings.leaving_s), settings.body_limit_bytes)


def _ray_serve() -> Any:
    try:
        return import_module("ray.serve")
    except ImportError as error:
        fix = "pip install 'homeserve[ray]', on every box of the cluster"
        raise SettingError(f"Ray Serve is not installed: {error}", field="ray", fix=fix) from None


def _router(options: Options) -> Any:
    """Ray's router for LLMs, as the config of a deployment."""
    kwargs = {
        "imbalanced_threshold": options.imbalance,
        "do_eviction": True,
        "eviction_threshold_chars": TREE_CHARACTERS,
        "eviction_target_chars": TREE_CHARACTERS * 9 // 10,
    }
    config = import_module("ray.serve.config").RequestRouterConfig
    return config(request_router_class=router_path(), request_router_kwargs=kwargs)


def router_path() -> str:
    """The dotted name of Ray's prefix-aware router. Raises SettingError where this Ray has none."""
    why = []
    for module in _ROUTER_MODULES:
        try:
            getattr(import_module(module), ROUTER)
        except (ImportError, AttributeError) as error:
            why.append(str(error))
        else:
            return f"{module}.{ROUTER}"
    fix = "install the version of Ray that homeserve[ray] names"
    raise SettingError(f"this Ray has no prefix-aware router: {'; '.join(why)}", field="ray", fix=fix)


def _boxes(options: Options) -> int:
    """Boxes of the cluster that are up and have what a replica takes. `serve run` calls `app` before it connects to the
    cluster, so this may be what connects."""
    ray = import_module("ray")
    if not ray.is_initialized():
        ray.init(namespace="serve")
    takes = {"CPU": options.cpus, "GPU": options.gpus, **options.resources}
    found = 0
    for node in ray.nodes():
        has = node.get("Resources", {})
        found += bool(node["Alive"]) and all(has.get(name, 0.0) >= amount for name, amount in takes.items())
    if not found:
        raise SettingError(f"no box of the cluster has {takes}", field="replicas", fix="see ray status")
    return found
