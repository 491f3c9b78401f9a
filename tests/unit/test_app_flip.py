"""What the composition root says and makes of a flip before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from homeserve.app import App, Watcher
from homeserve.engine.request import EngineLimits, FlipLimits, NoFlip
from homeserve.settings import Settings

LIMITS = (256, 1024, 4, 8, 64, 0, 2)


class Told:
    """Hears warnings alone."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


def app(settings: Settings) -> tuple[Any, Told]:
    told = Told()
    return App(settings, {}, cast(Watcher, told)), told


@pytest.mark.parametrize(
    ("limits", "warnings"),
    [
        (
            EngineLimits(*LIMITS, layout="tensor", no_flip=NoFlip("does_not_fit", "9 MiB of 8")),
            ["the layout stays tensor: 9 MiB of 8"],
        ),
        (EngineLimits(*LIMITS, no_flip=NoFlip("flip_off", "--flip off")), []),
        (EngineLimits(*LIMITS), []),
        (EngineLimits(*LIMITS, flip=FlipLimits({}, "pipeline", (), 0, 0, 0)), []),
    ],
    ids=("does not fit", "off", "one rank", "flips"),
)
async def test_a_layout_that_stays_though_nobody_said_so_is_one_line(limits: EngineLimits, warnings: list[str]) -> None:
    made, told = app(Settings(devices="cpu:2"))
    made._tell_no_flip(limits)
    assert told.warnings == warnings


async def test_the_folder_of_images_goes_with_the_server(tmp_path: Path) -> None:
    made, _ = app(Settings(devices="cpu:2", image_spill=str(tmp_path)))
    folder = Path(made._image_folder())
    (folder / "rank0").write_bytes(b"x")
    assert folder.parent == tmp_path
    await made.stop()
    assert list(tmp_path.iterdir()) == []
    plain, _ = app(Settings(devices="cpu:2"))
    assert plain._image_folder() == ""
    await plain.stop()
