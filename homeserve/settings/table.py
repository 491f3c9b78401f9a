"""Every setting of `homeserve up`, with its help, bounds and group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from budget.ranks import CPU_RANKS_MOST
from homeserve.settings.option import DRAFTS_MOST, Option

if TYPE_CHECKING:
    from homeserve.settings.models import ModelEntry

ENV_PREFIX = "HOMESERVE_"

CARD_BACKENDS = ("cuda", "rocm")
BACKENDS = ("cpu", *CARD_BACKENDS)


def _option(default: Any, kind: str, help: str, group: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(kind, help, group, **more)})


_SERVER, _MODEL, _BOX, _RANKS, _LOAD, OUTPUT = "Server", "Model", "Box", "Ranks", "Requests", "Output"
MODEL_GROUPS = (_MODEL, _BOX, _RANKS, _LOAD)
"""Groups of what each of several models may have for itself."""
_LATER = "Not in this version (accepted only with the value that changes nothing)"


@dataclass(frozen=True)
class Settings:
    """Every setting of `homeserve up`, checked. `sources` tells where each value that is not a default came from."""

    model: str | None = _option(
        None, "text", "GGUF file, safetensors folder, alias or hf:owner/repo[:quant]; without it SmolLM2-135M", _MODEL
    )
    model_id: str | None = _option(None, "text", "name of the model in the API (default: from the file name)", _MODEL)
    context: int = _option(
        0, "int", "most tokens of one request, prompt and answer", _MODEL, low=0, high=1 << 24, zero="the model's own"
    )

    host: str = _option("127.0.0.1", "text", "address to listen on; 0.0.0.0 opens it to the network", _SERVER)
    port: int = _option(8000, "int", "port to listen on", _SERVER, low=0, high=65535, zero="any free one")
    ready_file: str | None = _option(
        None, "path", "written as JSON once requests are answered, removed at exit", _SERVER, metavar="FILE"
    )
    api_key_file: str | None = _option(
        None,
        "path",
        "one key a line, or its name and the key; without a key of it every /v1 request is refused. Read again when it"
        " changes",
        _SERVER,
        metavar="FILE",
    )
    rate_limit_requests: int = _option(
        0,
        "int",
        "requests a minute of each key (without keys: of each address)",
        _SERVER,
        low=0,
        high=1 << 24,
        zero="any",
    )
    rate_limit_tokens: int = _option(
        0,
        "int",
        "tokens a minute of each key (without keys: of each address), prompts and answers together",
        _SERVER,
        low=0,
        high=1 << 32,
        zero="any",
    )
    body_limit_bytes: int = _option(
        16 << 20, "int", "largest request body", _SERVER, low=1024, high=1 << 30, metavar="N"
    )
    header_limit_bytes: int = _option(
        16 << 10, "int", "longest header field or request line", _SERVER, low=1024, high=1 << 20, metavar="N"
    )
    stream_stall_s: float = _option(
        60.0, "float", "a client that reads nothing for so long is let go", _SERVER, low=1, high=86400, metavar="S"
    )
    drain_timeout_s: float = _option(
        30.0, "float", "how long open requests may take to end after Ctrl-C", _SERVER, low=0, high=86400, metavar="S"
    )
    drain_delay_s: float = _option(
        0.0,
        "float",
        "after Ctrl-C, how long requests are still taken while /ready says 503: time for a load balancer to notice",
        _SERVER,
        low=0,
        high=3600,
        metavar="S",
    )
    metrics_compat: str = _option(
        "off",
        "text",
        "tell metrics under the names of another server too: vllm",
        _SERVER,
        choices=("off", "vllm"),
        metavar="NAME",
    )
    model_wait_s: float = _option(
        60.0,
        "float",
        "of several models: how long a request may wait until others have made room for its own",
        _SERVER,
        low=0.1,
        high=86400,
        metavar="S",
    )

    backend: str = _option(
        "auto",
        "text",
        "what computes: auto (cards that are known to have kernels for the model, else the CPU), cpu, cuda (NVIDIA's"
        " cards), rocm (AMD's), or reference (NumPy: exact and slow)",
        _BOX,
        choices=("auto", *BACKENDS, "reference"),
        metavar="NAME",
    )
    threads: int = _option(
        0, "int", "compute threads of each CPU rank", _BOX, low=0, high=1024, zero="the usable cores, divided evenly"
    )
    isa: str | None = _option(
        None,
        "text",
        "instruction set of the CPU kernels (default: the best that the CPU has)",
        _BOX,
        choices=("baseline", "avx2", "avx512", "avx512vnni"),
        metavar="NAME",
    )
    kv_type: str = _option(
        "f16",
        "text",
        "type of KV rows: f16, bf16, f32, q8_0 or f8 (smaller rows are read a little less exactly)",
        _BOX,
        choices=("f16", "bf16", "f32", "q8_0", "f8"),
        metavar="TYPE",
    )
    kv_tokens: int = _option(
        0, "int", "tokens that the KV pool holds, over all requests", _BOX, low=0, high=1 << 28, zero="what fits"
    )
    floor_mib: int = _option(
        256,
        "int",
        "memory in MiB that must stay free at the peak, on the host and on each card (unsaid: 1024 on a card)",
        _BOX,
        low=0,
        high=1 << 24,
        metavar="N",
    )
    deterministic: bool = _option(
        False, "flag", "the same tokens whatever the batch, threads, chunks or restarts", _BOX
    )

    devices: str = _option(
        "auto",
        "devices",
        "what the ranks are: auto (as --backend says), cards with commas between, in order of rank (cuda:0, rocm:0 as"
        f" homeserve probe counts them, a UUID, a PCI address), or cpu:N, N ranks on the CPU (1 to {CPU_RANKS_MOST})",
        _RANKS,
        metavar="D",
    )
    layout: str = _option(
        "auto",
        "text",
        "how several ranks hold the model: pipeline (each some layers), tensor (each a shard of every layer) or auto"
        " (the better one by estimate)",
        _RANKS,
        choices=("auto", "pipeline", "tensor"),
        metavar="L",
    )
    pipeline_ratio: tuple[int, ...] = _option(
        (), "vector", "layers of each rank in the pipeline layout, or shares of them, such as 2,1,1", _RANKS
    )
    weight_vector: tuple[int, ...] = _option(
        (), "vector", "shares of the weights in the tensor layout, such as 30,17,17", _RANKS
    )
    token_vector: tuple[int, ...] = _option((), "vector", "shares of the KV rows in the tensor layout", _RANKS)
    memory: str = _option(
        "auto",
        "text",
        "memory of several ranks: discrete (each has its own), unified (weights and KV rows are held once), auto"
        " (= discrete)",
        _RANKS,
        choices=("auto", "discrete", "unified"),
        metavar="M",
    )

    flip: str = _option(
        "auto",
        "text",
        "whether several ranks may change their layout while serving: auto (where it pays), manual (on request) or off;"
        " a --layout, or numbers of one layout alone, mean off unless this is said too",
        _RANKS,
        choices=("auto", "manual", "off"),
        metavar="F",
    )
    flip_dwell_s: float = _option(
        15.0, "float", "how long a layout stays before the policy may leave it", _RANKS, low=0, high=86400, metavar="S"
    )
    park_deadline_s: float = _option(
        30.0,
        "float",
        "a flip whose plans in flight do not end within so long is given up; serving goes on",
        _RANKS,
        low=0.1,
        high=86400,
        metavar="S",
    )
    image_spill: str | None = _option(
        None,
        "folder",
        "keep each layout's weights ready made, the next one's in memory and the other's in this folder; off: one copy"
        " of the model in memory serves both (default: off)",
        _RANKS,
        metavar="DIR",
    )

    max_running: int = _option(16, "int", "requests computed together", _LOAD, low=1, high=256)
    max_waiting: int = _option(256, "int", "requests that may wait; more get a 429", _LOAD, low=0, high=65536)
    chunk: int = _option(256, "int", "prompt tokens computed in one plan", _LOAD, low=16, high=8192)
    max_prefill_delay: int = _option(
        0,
        "int",
        "plans by which a prompt may delay tokens of running requests (ranks in a row: rounds of as many plans)",
        _LOAD,
        low=0,
        high=1024,
    )
    prefix_cache: bool = _option(True, "switch", "keep prompts' KV rows for later requests: on or off", _LOAD)
    draft: str = _option(
        "auto",
        "drafts",
        "tokens that the model's drafting block proposes at once, all checked in one step: auto (as many as pay, 3 at"
        f" most; none without such a block), off, or always 1 to {DRAFTS_MOST}",
        _LOAD,
        metavar="auto|off|N",
    )
    pooling: str = _option(
        "auto",
        "text",
        "how the states of an input become its embedding: mean (of all), last, cls (the first), or auto (what the"
        " model's files say, else last); a request may say another",
        _LOAD,
        choices=("auto", "mean", "last", "cls"),
        metavar="P",
    )
    plan_timeout_s: float = _option(
        120.0,
        "float",
        "a worker that does not answer a plan for so long is restarted",
        _LOAD,
        low=1,
        high=86400,
        metavar="S",
    )

    log_format: str = _option(
        "text", "text", "log lines as text or json", OUTPUT, choices=("text", "json"), metavar="F"
    )
    log_level: str = _option(
        "info",
        "text",
        "debug, info, warning or error",
        OUTPUT,
        choices=("debug", "info", "warning", "error"),
        metavar="L",
    )
    log_requests: str = _option(
        "on",
        "text",
        "one line for each request at its end: off, on (without what was said), or full (with prompts and answers)",
        OUTPUT,
        choices=("off", "on", "full"),
        metavar="R",
    )
    log_dir: str | None = _option(
        "auto",
        "folder",
        "folder in which each server keeps a log of bounded size for homeserve logs: auto ($XDG_STATE_HOME/homeserve or"
        " ~/.local/state/homeserve), or off",
        OUTPUT,
        metavar="DIR",
    )
    capture_dir: str | None = _option(None, "path", "folder for what is known of a failed plan", OUTPUT, metavar="DIR")
    cache_dir: str | None = _option(
        None,
        "path",
        "folder for the default model and built tokenizers (default: $XDG_CACHE_HOME/homeserve or ~/.cache/homeserve);"
        " hf: models are in the hub's own (HF_HOME)",
        OUTPUT,
        metavar="DIR",
        env="HOMESERVE_CACHE",
    )

    cpu_moe: str = _option("off", "text", "experts on the CPU", _LATER, inert=("off", "none"))

    fault: str = ""
    """HOMESERVE_FAULT: a fault for tests, only under HOMESERVE_TESTING=1."""
    drafts_test: str = ""
    """HOMESERVE_DRAFTS, likewise: `wrong` or `accept:N` (`LoadSpec.drafts_test`)."""
    cards_root: str = ""
    """HOMESERVE_TESTING_CARDS, likewise: a recorded tree in place of `/`, for what the probe reads of AMD's cards."""
    testing: bool = False
    """HOMESERVE_TESTING=1: one card may be two ranks."""
    print_config: bool = False
    models: tuple[ModelEntry, ...] = ()
    """`[[models]]` of homeserve.toml."""
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Things that a person should hear and that stop nothing, such as an unknown HOMESERVE_ variable."""

    @property
    def leaving_s(self) -> float:
        """How long it may go on after it was told to stop, before it takes itself down."""
        return self.drain_delay_s + self.drain_timeout_s

    @property
    def ranks(self) -> int:
        """How many ranks `devices` asks for; 1 where the box decides."""
        return ranks_of(self.devices)

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards that `devices` names, in order of rank; () where it names none."""
        return cards_of(self.devices)

    @property
    def wants_cards(self) -> bool:
        """Whether the ranks are cards, whichever they are: anything else is an error."""
        return bool(self.cards) or self.backend in CARD_BACKENDS

    @property
    def ranks_known(self) -> bool:
        """Whether `ranks` is what was asked for. The cards of a box are counted when it has been looked at."""
        return not (self.devices == "auto" and self.backend in CARD_BACKENDS)

    def as_json(self) -> dict[str, Any]:
        """What `--print-config` prints."""
        return {
            "schema": 1,
            "settings": {name: shown(getattr(self, name)) for name in options()},
            "sources": dict(self.sources),
            "warnings": list(self.warnings),
        } | ({"models": [entry.as_json() for entry in self.models]} if self.models else {})


def ranks_of(devices: str) -> int:
    """Of `--devices`: auto and cpu are one rank, cards one each."""
    return len(cards_of(devices)) or int(devices.partition(":")[2] or 1)


def cards_of(devices: str) -> tuple[str, ...]:
    """Of `--devices`: its words, where they are cards."""
    words = tuple(devices.split(","))
    return () if words[0] == "auto" or words[0].partition(":")[0] == "cpu" else words


def shown(value: Any) -> Any:
    """A value as a person would say it."""
    return (",".join(map(str, value)) or "auto") if isinstance(value, tuple) else value


def options() -> dict[str, Option]:
    """Field name -> how it is said, in the order of `--help`."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(Settings) if "option" in f.metadata}


def variable(name: str) -> str:
    """The environment variable of a field."""
    return options()[name].env or ENV_PREFIX + name.upper()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
