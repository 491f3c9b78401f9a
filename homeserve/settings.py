"""The only reader of argv, of `HOMESERVE_*` variables and of homeserve.toml: one frozen `Settings`, made once.

The dataclass is also the table. Each field carries its help, bounds and group in its metadata, and the flag parser,
the environment reader, the file reader and `--print-config` are all made from `dataclasses.fields(Settings)`: an option
that exists in one of them exists in all, and none can be read without being checked by the same `Option.convert`.

    flags  >  HOMESERVE_<FIELD>  >  ./homeserve.toml  >  $XDG_CONFIG_HOME/homeserve/homeserve.toml  >  default

Nothing is ignored in silence. A flag of a feature that this version lacks is known (so that a script written for a
later version gets an answer) but takes only the value that changes nothing; any other is a `SettingError` saying so.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budget.ranks import CPU_RANKS_MOST
from homeserve.errors import SettingError

if TYPE_CHECKING:
    import argparse

TOML_NAME = "homeserve.toml"
TOML_LIMIT_BYTES = 1 << 20
KEY_FILE_LIMIT_BYTES = 1 << 16

ENV_PREFIX = "HOMESERVE_"
TESTING = "HOMESERVE_TESTING"
FAULT = "HOMESERVE_FAULT"

_OURS = ENV_PREFIX + "TEST"
"""Variables of the test scripts, which are no settings."""

VECTOR_MAX = 64
NUMBER_MAX = 1 << 20
"""Numbers of a vector, and the largest of them."""

_YES = {"on", "yes", "true", "1"}
_NO = {"off", "no", "false", "0"}


# --------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Option:
    """How one field of `Settings` is said and checked.

    `kind`: text | path | int | float | switch (on|off) | flag (present or not; on|off outside argv) | vector (whole
    numbers with commas between, one for each rank; () is auto) | devices.
    `later` maps values that a later version will know to the feature they need; `inert` lists the only values that an
    option without its feature takes (then the whole option is a promise for later).
    """

    kind: str
    help: str
    group: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    inert: tuple[str, ...] = ()
    metavar: str = ""
    env: str = ""
    zero: str = ""
    """What 0 means, where it means "choose for me"."""

    def convert(self, value: object, said: str, name: str) -> Any:
        """The typed value of what a person wrote. Raises SettingError that names `said` (the flag, variable or key)."""
        if self.inert:
            return self._inert(value, said, name)
        if self.kind == "vector":
            return _vector(value, said, name)
        if self.kind == "devices":
            return _devices(value, said, name)
        if self.kind in ("text", "path"):
            return self._text(value, said, name)
        if self.kind in ("switch", "flag"):
            return self._switch(value, said, name)
        return self._number(value, said, name)

    def _inert(self, value: object, said: str, name: str) -> str:
        text = str(value).strip().lower()
        if text not in self.inert:
            raise SettingError(
                f"{said}: this version does not have {self.help}; {value!r} cannot be used",
                field=name,
                fix=f"leave it out, or use {' or '.join(self.inert)}",
            )
        return text

    def _text(self, value: object, said: str, name: str) -> str:
        if not isinstance(value, str):
            raise SettingError(f"{said}: expected text, found {value!r}", field=name, fix=f"write {name} as text")
        text = value.strip()
        if not text:
            raise SettingError(f"{said}: is empty", field=name, fix="give it a value or leave it out")
        if "\0" in text:
            raise SettingError(f"{said}: holds a zero byte", field=name, fix="remove it")
        if self.choices and text not in self.choices:
            if text in self.later:
                what = f"{said}: this version does not have {text!r}"
            else:
                what = f"{said}: {text!r} is not one of them{near(text, self.choices)}"
            raise SettingError(what, field=name, fix=f"use {' or '.join(self.choices)}")
        return os.path.expanduser(text) if self.kind == "path" else text

    def _switch(self, value: object, said: str, name: str) -> bool:
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _YES:
            return True
        if text in _NO:
            return False
        raise SettingError(f"{said}: expected on or off, found {value!r}", field=name, fix="use on or off")

    def _number(self, value: object, said: str, name: str) -> int | float:
        kind = "a whole number" if self.kind == "int" else "a number"
        bad = SettingError(f"{said}: expected {kind}, found {value!r}", field=name, fix=f"use {self.range_text()}")
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise bad
        if self.kind == "int" and isinstance(value, float):
            raise bad
        number: int | float
        try:
            number = int(value) if self.kind == "int" else float(value)
        except ValueError:
            raise bad from None
        low, high = self.low, self.high
        if number != number or (low is not None and number < low) or (high is not None and number > high):
            raise SettingError(
                f"{said}: {value} is outside {self.range_text()}", field=name, fix=f"use {self.range_text()}"
            )
        return number

    def range_text(self) -> str:
        text = f"{_plain(self.low)} to {_plain(self.high)}"
        return f"{text} (0 = {self.zero})" if self.zero else text


def _vector(value: object, said: str, name: str) -> tuple[int, ...]:
    """Of `2,1,1`, in a file also of a list; () for auto."""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    if text.strip().lower() == "auto":
        return ()
    fix = "write whole numbers from 1 on with commas between, such as 30,17,17"
    parts = text.split(",")
    if len(parts) > VECTOR_MAX:
        raise SettingError(f"{said}: {len(parts)} numbers", field=name, fix=f"give at most {VECTOR_MAX}")
    numbers = []
    for rank, part in enumerate(parts):
        word = part.strip()
        if not word.isascii() or not word.removeprefix("-").isdigit() or len(word) > 12:
            raise SettingError(f"{said}: {word[:40]!r} is not a whole number", field=name, fix=fix)
        number = int(word)
        if not 1 <= number <= NUMBER_MAX:
            what = f"{said}: {number} is outside 1 to {NUMBER_MAX}"
            raise SettingError(f"{what}: rank {rank} must have a part" if number < 1 else what, field=name, fix=fix)
        numbers.append(number)
    return tuple(numbers)


def _devices(value: object, said: str, name: str) -> str:
    """`auto`, `cpu`, or `cpu:N` for N ranks on the CPU (`cpu:0` is the CPU as the budget's page numbers it)."""
    text, fix = str(value).strip().lower(), f"use cpu, or cpu:N for N ranks, 1 to {CPU_RANKS_MOST}"
    if text in ("auto", "cpu"):
        return text
    count = text.removeprefix("cpu:")
    if count == text or not (count.isascii() and count.isdigit()):
        what = "this version computes on the CPU of one box alone"
        raise SettingError(f"{said}: {what}; {value!r} cannot be used", field=name, fix=fix)
    if len(count) > 6 or int(count) > CPU_RANKS_MOST:
        what = f"{said}: {text[:40]} is more ranks than the CPU of one box may have: {CPU_RANKS_MOST}"
        raise SettingError(what, field=name, fix=fix)
    return f"cpu:{int(count)}" if int(count) > 1 else "cpu"


def _plain(bound: float | None) -> str:
    return "any" if bound is None else f"{bound:g}" if abs(bound) < 1e6 else str(int(bound))


def _option(default: Any, kind: str, help: str, group: str, **more: Any) -> Any:
    return field(default=default, metadata={"option": Option(kind, help, group, **more)})


_SERVER, _MODEL, _BOX, _RANKS, _LOAD, _OUT = "Server", "Model", "Box", "Ranks", "Requests", "Output"
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
        None, "path", "one key a line; without a key of it every /v1 request is refused", _SERVER, metavar="FILE"
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

    backend: str = _option(
        "auto",
        "text",
        "what computes: auto (= cpu), cpu, or reference (NumPy: exact and slow)",
        _BOX,
        choices=("auto", "cpu", "reference"),
        later=("cuda", "rocm"),
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
        256, "int", "memory in MiB that must stay free at the peak", _BOX, low=0, high=1 << 24, metavar="N"
    )
    deterministic: bool = _option(
        False, "flag", "the same tokens whatever the batch, threads, chunks or restarts", _BOX
    )

    devices: str = _option(
        "auto",
        "devices",
        f"what the ranks are: auto (= cpu), or cpu:N for N ranks (1 to {CPU_RANKS_MOST}), each a process on the CPU",
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
    plan_timeout_s: float = _option(
        120.0,
        "float",
        "a worker that does not answer a plan for so long is restarted",
        _LOAD,
        low=1,
        high=86400,
        metavar="S",
    )

    log_format: str = _option("text", "text", "log lines as text or json", _OUT, choices=("text", "json"), metavar="F")
    log_level: str = _option(
        "info",
        "text",
        "debug, info, warning or error",
        _OUT,
        choices=("debug", "info", "warning", "error"),
        metavar="L",
    )
    capture_dir: str | None = _option(None, "path", "folder for what is known of a failed plan", _OUT, metavar="DIR")
    cache_dir: str | None = _option(
        None,
        "path",
        "folder for the default model and built tokenizers (default: $XDG_CACHE_HOME/homeserve or ~/.cache/homeserve);"
        " hf: models are in the hub's own (HF_HOME)",
        _OUT,
        metavar="DIR",
        env="HOMESERVE_CACHE",
    )

    flip: str = _option("auto", "text", "the flip between layouts", _LATER, inert=("auto", "off"))
    flip_dwell_s: str = _option("auto", "text", "the flip between layouts", _LATER, inert=("auto",))
    park_deadline_s: str = _option("auto", "text", "the flip between layouts", _LATER, inert=("auto",))
    image_spill: str = _option("off", "text", "layout images on disk", _LATER, inert=("off", "none"))
    draft: str = _option("auto", "text", "speculative drafts", _LATER, inert=("auto", "off"))
    cpu_moe: str = _option("off", "text", "experts on the CPU", _LATER, inert=("off", "none"))

    fault: str = ""
    """HOMESERVE_FAULT: a fault for tests, only under HOMESERVE_TESTING=1."""
    print_config: bool = False
    sources: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    """Things that a person should hear and that stop nothing, such as an unknown HOMESERVE_ variable."""

    @property
    def ranks(self) -> int:
        """How many ranks `devices` asks for."""
        return ranks_of(self.devices)

    def as_json(self) -> dict[str, Any]:
        """What `--print-config` prints."""
        return {
            "schema": 1,
            "settings": {name: _shown(getattr(self, name)) for name in options()},
            "sources": dict(self.sources),
            "warnings": list(self.warnings),
        }


def ranks_of(devices: str) -> int:
    """Of `--devices`: auto and cpu are one rank."""
    return int(devices.partition(":")[2] or 1)


def _shown(value: Any) -> Any:
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


# -------------------------------------------------------------------------------------------------------- the readers


def load(argv: Sequence[str], environ: Mapping[str, str], cwd: str | Path) -> Settings:
    """Settings of `homeserve up ARGV...`. Raises SettingError naming the field."""
    import argparse

    parser = argparse.ArgumentParser(prog="homeserve up", add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    try:
        known, unknown = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise SettingError(f"{error.argument_name}: {error.message}", field=_field_of(error.argument_name)) from None
    refuse_unknown(parser, unknown)
    return check_together(resolve(known, environ, cwd))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Every option as a flag of `parser`, in its group, plus the positional MODEL and `--print-config`.

    Values stay text here: `resolve` converts them with the same code as the other sources.
    """
    import argparse

    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=options()["model"].help)
    groups: dict[str, Any] = {}
    for name, option in options().items():
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        group = groups[option.group]
        if option.kind == "flag":
            action = argparse.BooleanOptionalAction
            group.add_argument(flag(name), dest=name, action=action, default=None, help=_help(name, option))
            continue
        group.add_argument(flag(name), dest=name, metavar=option.metavar or _metavar(option), help=_help(name, option))
    groups[_OUT].add_argument(
        "--print-config", action="store_true", help="print the settings as JSON, with where each came from, and stop"
    )


def resolve(flags: argparse.Namespace, environ: Mapping[str, str], cwd: str | Path) -> Settings:
    """The settings that parsed flags, the environment and the files say together."""
    table = options()
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def take(name: str, value: object, said: str) -> None:
        values[name] = table[name].convert(value, said, name)
        sources[name] = said

    for path in reversed(toml_paths(environ, cwd)):
        for name, value in _read_toml(path).items():
            take(name, value, f"{path}: {name}")
    for name in table:
        text = environ.get(variable(name))
        if text is not None and text.strip():
            take(name, text, variable(name))
    for name, value in _flags_given(flags).items():
        take(name, value, flag(name))

    return Settings(
        **values,
        fault=_fault(environ),
        print_config=bool(getattr(flags, "print_config", False)),
        sources=sources,
        warnings=tuple(_unknown_variables(environ)),
    )


def check_together(settings: Settings) -> Settings:
    """The same settings. Raises SettingError for those of ranks and layouts that contradict each other."""
    ranks, layout = settings.ranks, settings.layout
    of_layout = {"pipeline_ratio": "pipeline", "weight_vector": "tensor", "token_vector": "tensor"}
    given = [name for name in of_layout if getattr(settings, name)]
    for name in given:
        vector = getattr(settings, name)
        said = f"{settings.sources.get(name, flag(name))} {_shown(vector)}"
        if ranks == 1:
            what = f"{said}: divides a model over several ranks, and there is one"
            raise SettingError(what, field=name, fix=f"say --devices cpu:{len(vector)}, or leave {flag(name)} out")
        if len(vector) != ranks:
            what = f"{said}: {len(vector)} numbers for {ranks} ranks"
            raise SettingError(what, field=name, fix=f"give one number for each rank of --devices {settings.devices}")
        if layout not in ("auto", of_layout[name]):
            what = f"{said}: is of the {of_layout[name]} layout, and --layout is {layout}"
            raise SettingError(what, field=name, fix=f"leave {flag(name)} or --layout out")
    if len({of_layout[name] for name in given}) > 1:
        first, second = (settings.sources.get(name, flag(name)) for name in (given[0], given[-1]))
        what = f"{first} is of the pipeline layout and {second} of the tensor layout; one serves"
        raise SettingError(what, field=given[-1], fix="leave one of them out")
    if layout == "tensor" and ranks == 1:
        what = f"{settings.sources.get('layout', '--layout')} tensor: needs several ranks, and there is one"
        raise SettingError(what, field="layout", fix="say --devices cpu:N with N from 2 on, or leave --layout out")
    if settings.deterministic and (layout == "tensor" or any(of_layout[name] == "tensor" for name in given)):
        what = "--deterministic: in the tensor layout last digits depend on which ranks keep a request's pages"
        raise SettingError(what, field="deterministic", fix="use --layout pipeline, or leave --deterministic out")
    if settings.memory == "unified":
        said = settings.sources.get("memory", "--memory")
        if ranks == 1:
            what = f"{said} unified: is memory of several ranks, and there is one"
            raise SettingError(what, field="memory", fix="say --devices cpu:N with N from 2 on, or leave --memory out")
        if settings.backend == "reference":
            what = f"{said} unified: the reference backend keeps weights dense in memory of its own"
            raise SettingError(what, field="memory", fix="use --memory discrete, or another backend")
    return settings


def toml_paths(environ: Mapping[str, str], cwd: str | Path) -> list[Path]:
    """Existing homeserve.toml files, the strongest first."""
    config = environ.get("XDG_CONFIG_HOME") or os.path.join(_home(environ), ".config")
    candidates = [Path(cwd) / TOML_NAME, Path(config) / "homeserve" / TOML_NAME]
    return [path for path in candidates if path.is_file()]


def environment() -> Mapping[str, str]:
    """The process environment, for the composition root to hand down; nobody else reads it."""
    return dict(os.environ)


def cache_dir(settings: Settings, environ: Mapping[str, str]) -> Path:
    """The folder of what is fetched and of tokenizers that are slow to build. Not created here."""
    return Path(settings.cache_dir) if settings.cache_dir else default_cache_dir(environ)


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """The cache folder where no flag and no file names one: HOMESERVE_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    if named := environ.get("HOMESERVE_CACHE"):
        return Path(os.path.expanduser(named))
    return Path(environ.get("XDG_CACHE_HOME") or os.path.join(_home(environ), ".cache")) / "homeserve"


def runtime_dir(environ: Mapping[str, str]) -> Path:
    """Folder of the records of running servers: per user, emptied at logout where the system has such a folder."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        return Path(runtime) / "homeserve"
    return default_cache_dir(environ) / "run"


def read_api_keys(path: str | None) -> frozenset[str]:
    """Keys of `--api-key-file`: one a line, `#` starts a comment line. Raises SettingError for a file without a key."""
    if path is None:
        return frozenset()
    said = flag("api_key_file")
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(KEY_FILE_LIMIT_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise SettingError(f"{said}: {path}: {why}", field="api_key_file", fix="name a readable text file") from None
    if len(text) > KEY_FILE_LIMIT_BYTES:
        raise SettingError(f"{said}: {path}: is larger than {KEY_FILE_LIMIT_BYTES} bytes", field="api_key_file")
    keys = frozenset(line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#"))
    if not keys:
        raise SettingError(f"{said}: {path}: holds no key", field="api_key_file", fix="write one key a line")
    return keys


def refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Raise SettingError for arguments that `parser` did not know, with the nearest flag that it knows."""
    if not unknown:
        return
    first = unknown[0].split("=", 1)[0]
    known = [text for action in parser._actions for text in action.option_strings]
    raise SettingError(
        f"{first}: no such {'flag' if first.startswith('-') else 'argument'}{near(first, known)}",
        field=_field_of(first),
        fix=f"see {parser.prog} --help",
    )


def near(word: str, known: Sequence[str]) -> str:
    """`; did you mean X?` where X is close, else nothing."""
    import difflib

    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {found[0]}?" if found else ""


# ------------------------------------------------------------------------------------------------------------ details


def _help(name: str, option: Option) -> str:
    if option.inert:
        return f"{option.help}: only {' or '.join(option.inert)}"
    default = next(f.default for f in dataclasses.fields(Settings) if f.name == name)
    if option.kind == "flag" or default is None:
        return option.help
    if option.kind == "switch":
        shown = "on" if default else "off"
    elif option.kind == "vector":
        shown = "auto"
    else:
        shown = (
            option.zero if default == 0 and option.zero else f"{default:g}" if option.kind == "float" else str(default)
        )
    return f"{option.help} (default: {shown})"


def _metavar(option: Option) -> str:
    if option.inert:
        return option.inert[0]
    return {"int": "N", "float": "S", "switch": "on|off", "path": "PATH", "vector": "A,B,..."}.get(option.kind, "TEXT")


def _field_of(text: str | None) -> str | None:
    return text.split("/")[-1].lstrip("-").replace("-", "_") if text else None


def _flags_given(flags: argparse.Namespace) -> dict[str, object]:
    given = {name: getattr(flags, name, None) for name in options()}
    positional = getattr(flags, "positional_model", None)
    if positional is not None:
        if given["model"] is not None and given["model"] != positional:
            raise SettingError(
                f"MODEL is {positional!r} and --model is {given['model']!r}", field="model", fix="name the model once"
            )
        given["model"] = positional
    return {name: value for name, value in given.items() if value is not None}


def _read_toml(path: Path) -> dict[str, object]:
    import tomllib

    try:
        data = path.read_bytes()
        if len(data) > TOML_LIMIT_BYTES:
            raise SettingError(f"{path}: is larger than {TOML_LIMIT_BYTES} bytes", field=TOML_NAME)
        read = tomllib.loads(data.decode())
    except OSError as error:
        raise SettingError(f"{path}: cannot be read: {error.strerror}", field=TOML_NAME) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path}: is not TOML: {error}", field=TOML_NAME, fix="correct the file") from None
    values: dict[str, object] = {}
    for key, value in read.items():
        name = key.replace("-", "_")
        if key == "models":
            raise SettingError(f"{path}: models: this version does not have several models", field="models")
        if name not in options():
            raise SettingError(
                f"{path}: {key}: no such setting{near(name, list(options()))}", field=key, fix="correct or remove it"
            )
        if isinstance(value, int | float) and options()[name].inert:
            value = str(value)
        values[name] = value
    return values


def _fault(environ: Mapping[str, str]) -> str:
    fault = environ.get(FAULT, "").strip()
    if fault and environ.get(TESTING) != "1":
        raise SettingError(
            f"{FAULT} is for tests and needs {TESTING}=1", field="fault", fix=f"unset {FAULT}, or set {TESTING}=1"
        )
    return fault


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = [variable(name) for name in options()] + [TESTING, FAULT]
    unknown = sorted(
        name for name in environ if name.startswith(ENV_PREFIX) and not name.startswith(_OURS) and name not in known
    )
    return [f"{name} is set, but there is no such setting{near(name, known)}" for name in unknown]


def _home(environ: Mapping[str, str]) -> str:
    return environ.get("HOME") or os.path.expanduser("~")
