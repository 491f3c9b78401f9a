"""Which of the cards that a driver shows is meant, and what is said where none is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backends.gpu.driver.names import Names
from backends.gpu.errors import CardMissing, DriverError, DriverMissing


@dataclass(frozen=True)
class Identity:
    """A card as the driver shows it to this process. `uuid`: as nvidia-smi and rocminfo print it; of a card that has
    none, its PCI address."""

    index: int
    uuid: str
    pci: str
    name: str

    @property
    def told(self) -> str:
        return f"{self.name} ({self.uuid})"


def chosen(
    names: Names, environ: Mapping[str, str], found: Sequence[Identity], index: int | None, uuid: str
) -> Identity:
    """The card of a number or of a UUID (or PCI address). Raises CardMissing."""
    for card in found:
        if card.uuid == uuid or card.pci == uuid or (not uuid and card.index == (index or 0)):
            return card
    wanted = uuid or f"number {index or 0}"
    shown = ", ".join(f"{card.index}: {card.told}" for card in found)
    raise CardMissing(
        f"{names.title}'s driver shows no card {wanted}{_hidden(names, environ)}; it shows {shown}",
        fix=_unhide(names, environ)
        or "a card that is gone from the list has often fallen off the bus: restart the machine",
        card=wanted,
    )


def refuse_twins(names: Names, found: Sequence[Identity]) -> None:
    """Raises DriverError for two cards of one UUID: nobody could say which one is meant."""
    for at, card in enumerate(found):
        twin = next((other for other in found[:at] if other.uuid == card.uuid), None)
        if twin:
            raise DriverError(
                f"{names.title}'s driver shows two cards of the UUID {card.uuid}: {twin.name} at {twin.pci}"
                f" and {card.name} at {card.pci}",
                fix=f"hide one of them: {names.hiding[0]}={twin.index}",
                card=card.told,
            )


def no_card(names: Names, environ: Mapping[str, str]) -> DriverError:
    """The driver shows none."""
    hidden = _hidden(names, environ)
    if hidden:
        return CardMissing(f"{names.title}'s driver shows no card{hidden}", fix=_unhide(names, environ))
    return DriverMissing(
        f"{names.title}'s driver finds no card", fix=f"`homeserve probe` lists the cards; {names.install}"
    )


def _hidden(names: Names, environ: Mapping[str, str]) -> str:
    """` with CUDA_VISIBLE_DEVICES='1' set`, or nothing."""
    found = [f"{each}={environ[each]!r}" for each in names.hiding if each in environ]
    return f" with {' and '.join(found)} set" if found else ""


def _unhide(names: Names, environ: Mapping[str, str]) -> str:
    found = [each for each in names.hiding if each in environ]
    return f"unset {' and '.join(found)}, or name the card in it" if found else ""
