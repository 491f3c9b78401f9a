"""Settings of ranks, layouts, the flip and drafting that must agree with one another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from budget.wish import NO_DRAFTS_IN_A_PIPELINE
from homeserve.errors import SettingError
from homeserve.settings.table import CARD_BACKENDS, Settings, flag, shown

_LAYOUT_OF = {"pipeline_ratio": "pipeline", "weight_vector": "tensor", "token_vector": "tensor"}
_OF_FLIP = ("flip_dwell_s", "park_deadline_s", "image_spill")
_MORE_RANKS = "say --devices cpu:N with N from 2 on (or name several cards), or leave {} out"


def check_together(settings: Settings) -> Settings:
    """The same settings. Raises SettingError for those of devices, ranks and layouts that contradict each other.

    Where the box decides how many ranks there are (`--backend cuda`), what depends on their number is checked when it
    is known: whoever counted the cards checks once more.
    """
    given = _given(settings)
    for check in _OF_DEVICES:
        check(settings)
    for check_ranks in _CHECKS if settings.ranks_known else ():
        check_ranks(settings, given)
    return settings


def check_devices(settings: Settings) -> None:
    """Of `check_together` what is of devices and their memory alone, for whoever reads no other settings. Raises
    SettingError."""
    for check in _OF_DEVICES:
        check(settings)
    if settings.ranks_known:
        _check_memory(settings, ())


def flip_said(settings: Settings) -> bool:
    """Whether somebody asked for a flip, by numbers of both layouts too: one that cannot be is refused then."""
    said = "flip" in settings.sources or settings.flip != "auto" or len(_layouts(_given(settings))) > 1
    return said and settings.flip != "off"


def flip_mode(settings: Settings) -> str:
    """`auto`, `manual` or `off`: what `--flip` means beside the other settings.

    A layout that was chosen stays unless a flip is asked for too, and so does the one that the numbers given are of.
    """
    if settings.flip == "off" or settings.ranks == 1:
        return "off"
    if flip_said(settings):
        return settings.flip
    one_layout = settings.layout != "auto" or len(_layouts(_given(settings))) == 1
    return "off" if one_layout or settings.deterministic else settings.flip


def why_no_flip(settings: Settings) -> str:
    """Where `flip_mode` is off: which of the settings says so."""
    if settings.flip == "off":
        return f"{_said(settings, 'flip')} off"
    if settings.ranks == 1:
        return "there is one rank"
    if settings.deterministic:
        return "--deterministic"
    return f"the layout is chosen by {_said(settings, 'layout' if settings.layout != 'auto' else _given(settings)[0])}"


def why_no_drafting(settings: Settings) -> str:
    """Why nothing is drafted whatever the model has; "" where the settings leave room for it."""
    if settings.draft == "off":
        return f"{_said(settings, 'draft')} off"
    pipeline = settings.layout == "pipeline" or settings.deterministic or settings.pipeline_ratio
    if settings.ranks > 1 and pipeline and flip_mode(settings) == "off":
        return NO_DRAFTS_IN_A_PIPELINE
    return ""


def _given(settings: Settings) -> list[str]:
    return [name for name in _LAYOUT_OF if getattr(settings, name)]


def _layouts(given: Sequence[str]) -> set[str]:
    return {_LAYOUT_OF[name] for name in given}


def _said(settings: Settings, name: str) -> str:
    return settings.sources.get(name, flag(name))


def _check_backend(settings: Settings) -> None:
    """Devices and backend say the same."""
    said, cards = f"{_said(settings, 'backend')} {settings.backend}", settings.cards
    if cards and settings.backend in ("cpu", "reference"):
        what = f"{said}: computes on the CPU, and {_said(settings, 'devices')} names {settings.devices}"
        raise SettingError(what, field="backend", fix="leave --backend or --devices out")
    if settings.backend not in CARD_BACKENDS:
        return
    if not cards and settings.devices != "auto":
        what = f"{said}: computes on cards, and {_said(settings, 'devices')} is {settings.devices}"
        raise SettingError(what, field="devices", fix=f"name cards ({settings.backend}:0), or leave --devices out")
    other = next((word for word in cards if word.partition(":")[0] in CARD_BACKENDS and not _is_of(word, settings)), "")
    if other:
        what = f"{said}: does not compute on {other}"
        raise SettingError(
            what, field="devices", fix="leave --backend out: each card has its own, and they may be mixed"
        )


def _is_of(word: str, settings: Settings) -> bool:
    return word.partition(":")[0] == settings.backend


def _check_cards(settings: Settings) -> None:
    """What cards cannot have."""
    cards = settings.cards
    twice = next((word for n, word in enumerate(cards) if word.lower() in map(str.lower, cards[:n])), "")
    if twice and not settings.testing:
        what = f"{_said(settings, 'devices')}: {twice} is named twice: a card is one rank"
        raise SettingError(what, field="devices", fix="name each card once")
    if not settings.wants_cards:
        return
    if settings.deterministic:
        what = "--deterministic: a card computes a row with other last digits when others are computed beside it"
        raise SettingError(what, field="deterministic", fix="use --devices cpu (cpu:N), or leave --deterministic out")
    if settings.memory == "unified":
        what = f"{_said(settings, 'memory')} unified: is memory of several ranks on the CPU, and the ranks are cards"
        raise SettingError(what, field="memory", fix="leave --memory out: every card has its own")
    if settings.isa is not None:
        what = f"{_said(settings, 'isa')} {settings.isa}: is of the CPU's kernels, and the ranks are cards"
        raise SettingError(what, field="isa", fix="leave --isa out")
    if settings.threads:
        what = f"{_said(settings, 'threads')} {settings.threads}: is of ranks on the CPU, and the ranks are cards"
        raise SettingError(what, field="threads", fix="leave --threads out: a card has its own")


def _check_vectors(settings: Settings, given: Sequence[str]) -> None:
    ranks, layout, flips = settings.ranks, settings.layout, flip_mode(settings) != "off"
    for name in given:
        vector = getattr(settings, name)
        said = f"{_said(settings, name)} {shown(vector)}"
        if ranks == 1:
            what = f"{said}: divides a model over several ranks, and there is one"
            more = f"say --devices cpu:{len(vector)} (or name so many cards)"
            raise SettingError(what, field=name, fix=f"{more}, or leave {flag(name)} out")
        if len(vector) != ranks:
            what = f"{said}: {len(vector)} numbers for {ranks} ranks"
            raise SettingError(what, field=name, fix=f"give one number for each rank of --devices {settings.devices}")
        if layout not in ("auto", _LAYOUT_OF[name]) and not flips:
            what = f"{said}: is of the {_LAYOUT_OF[name]} layout, and --layout is {layout}"
            raise SettingError(what, field=name, fix=f"leave {flag(name)} or --layout out, or say --flip manual")
    if len(_layouts(given)) > 1 and not flips:
        first, second = _said(settings, given[0]), _said(settings, given[-1])
        what = f"{first} is of the pipeline layout and {second} of the tensor layout; one serves"
        raise SettingError(what, field=given[-1], fix="leave one of them out, or let the layouts flip")


def _check_layout(settings: Settings, given: Sequence[str]) -> None:
    if settings.layout != "auto" and settings.ranks == 1:
        what = f"{_said(settings, 'layout')} {settings.layout}: needs several ranks, and there is one"
        raise SettingError(what, field="layout", fix=_MORE_RANKS.format("--layout"))
    if settings.deterministic and (settings.layout == "tensor" or "tensor" in _layouts(given)):
        what = "--deterministic: in the tensor layout last digits depend on which ranks keep a request's pages"
        raise SettingError(what, field="deterministic", fix="use --layout pipeline, or leave --deterministic out")


def _check_flip(settings: Settings, given: Sequence[str]) -> None:
    said = f"{_said(settings, 'flip')} {settings.flip}"
    if flip_said(settings) and settings.ranks == 1:
        what = f"{said}: changes how several ranks hold a model, and there is one"
        raise SettingError(what, field="flip", fix=_MORE_RANKS.format("--flip"))
    if flip_said(settings) and settings.deterministic:
        what = f"{said}: in the tensor layout last digits depend on which ranks keep a request's pages"
        raise SettingError(what, field="flip", fix="leave --flip or --deterministic out")
    if flip_mode(settings) != "off":
        if settings.image_spill is not None and settings.memory == "unified":
            what = f"{_said(settings, 'image_spill')}: in unified memory no image of a layout is made"
            raise SettingError(what, field="image_spill", fix="leave it out, or use --memory discrete")
        return
    for name in _OF_FLIP:
        if name in settings.sources and getattr(settings, name) is not None:
            what = (
                f"{_said(settings, name)}: is of the flip between layouts, and none is to be: {why_no_flip(settings)}"
            )
            raise SettingError(what, field=name, fix=f"leave {flag(name)} out, or ask for a flip (--flip auto)")


def _check_memory(settings: Settings, given: Sequence[str]) -> None:
    if settings.memory != "unified":
        return
    said = _said(settings, "memory")
    if settings.ranks == 1:
        what = f"{said} unified: is memory of several ranks, and there is one"
        raise SettingError(what, field="memory", fix=_MORE_RANKS.format("--memory"))
    if settings.backend == "reference":
        what = f"{said} unified: the reference backend keeps weights dense in memory of its own"
        raise SettingError(what, field="memory", fix="use --memory discrete, or another backend")


def _check_drafting(settings: Settings, given: Sequence[str]) -> None:
    why = why_no_drafting(settings)
    if why and settings.draft not in ("auto", "off"):
        what = f"{_said(settings, 'draft')} {settings.draft}: {why}"
        other = "leave --deterministic" if settings.deterministic else "say --flip manual or --layout tensor, or leave"
        raise SettingError(what, field="draft", fix=f"{other}{' or' * settings.deterministic} --draft out")
    if settings.drafts_test and settings.draft == "off":
        what = f"HOMESERVE_DRAFTS {settings.drafts_test}: nothing is drafted with {why}"
        raise SettingError(what, field="drafts_test", fix="unset it, or leave --draft out")


_OF_DEVICES: tuple[Callable[[Settings], None], ...] = (_check_backend, _check_cards)
_CHECKS: tuple[Callable[[Settings, Sequence[str]], None], ...] = (
    _check_vectors,
    _check_layout,
    _check_flip,
    _check_memory,
    _check_drafting,
)
