"""From argv, the environment and homeserve.toml to one `Settings`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from homeserve.errors import SettingError
from homeserve.settings.models import ModelEntry, chosen, read_entries, settings_of
from homeserve.settings.option import DRAFTS_MOST, Option, near
from homeserve.settings.places import TOML_NAME, toml_paths
from homeserve.settings.table import ENV_PREFIX, OUTPUT, Settings, flag, options, variable
from homeserve.settings.together import check_together

if TYPE_CHECKING:
    import argparse

TOML_LIMIT_BYTES = 1 << 20
TESTING = "HOMESERVE_TESTING"
FAULT = "HOMESERVE_FAULT"
DRAFTS = "HOMESERVE_DRAFTS"
CARDS = "HOMESERVE_TESTING_CARDS"

TRANSPORT = "HOMESERVE_TRANSPORT"
"""Which way rows take between cards; read by the ranks that have one (backends.gpu.transport.probe)."""
TUNE, GEMM = "HOMESERVE_TUNE", "HOMESERVE_GEMM"
"""Whether ranks on cards measure which kernels are ahead, and by which library they may multiply (backends.gpu.tuning,
backends.gpu.library_gemm)."""
_OURS = ENV_PREFIX + "TEST"
"""Variables of the test scripts, which are no settings."""


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
    groups[OUTPUT].add_argument(
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

    models: tuple[ModelEntry, ...] = ()
    for path in reversed(toml_paths(environ, cwd)):
        read = _read_toml(path)
        if "models" in read:
            models = read_entries(read.pop("models"), str(path))
        for name, value in read.items():
            take(name, value, f"{path}: {name}")
    for name in table:
        text = environ.get(variable(name))
        if text is not None and text.strip():
            take(name, text, variable(name))
    for name, value in _flags_given(flags).items():
        take(name, value, flag(name))

    made = Settings(
        **values,
        models=models,
        fault=_for_tests(environ, FAULT, "fault"),
        drafts_test=_drafts_test(environ),
        cards_root=_for_tests(environ, CARDS, "cards_root"),
        testing=environ.get(TESTING) == "1",
        print_config=bool(getattr(flags, "print_config", False)),
        sources=sources,
        warnings=tuple(_unknown_variables(environ)),
    )
    for entry in chosen(made):
        settings_of(made, entry)  # what contradicts itself is said before anything is loaded
    if models and not chosen(made):
        beside = f"{made.model} is none of [[models]] and is served alone; without it they would be"
        made = dataclasses.replace(made, warnings=(*made.warnings, beside))
    return made


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
            values[key] = value
            continue
        if name not in options():
            raise SettingError(
                f"{path}: {key}: no such setting{near(name, list(options()))}", field=key, fix="correct or remove it"
            )
        if isinstance(value, int | float) and options()[name].inert:
            value = str(value)
        values[name] = value
    return values


def _for_tests(environ: Mapping[str, str], name: str, field: str) -> str:
    text = environ.get(name, "").strip()
    if text and environ.get(TESTING) != "1":
        raise SettingError(
            f"{name} is for tests and needs {TESTING}=1", field=field, fix=f"unset {name}, or set {TESTING}=1"
        )
    return text


def _drafts_test(environ: Mapping[str, str]) -> str:
    """`wrong` or `accept:N`."""
    text = _for_tests(environ, DRAFTS, "drafts_test")
    count = text.removeprefix("accept:")
    forced = count != text and len(count) == 1 and count in "0123456789"[: DRAFTS_MOST + 1]
    if text and text != "wrong" and not forced:
        what = f"{DRAFTS}: {text[:40]!r} is not known"
        raise SettingError(what, field="drafts_test", fix=f"use wrong, or accept:N with N from 0 to {DRAFTS_MOST}")
    return text


def _unknown_variables(environ: Mapping[str, str]) -> list[str]:
    known = [variable(name) for name in options()] + [TESTING, FAULT, DRAFTS, TRANSPORT, TUNE, GEMM]
    unknown = sorted(
        name for name in environ if name.startswith(ENV_PREFIX) and not name.startswith(_OURS) and name not in known
    )
    return [f"{name} is set, but there is no such setting{near(name, known)}" for name in unknown]
