"""What a resident says and makes of a flip before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from homeserve.engine.request import EngineLimits, FlipLimits, NoFlip
from homeserve.errors import SettingError
from homeserve.memory import MemoryWatch
from homeserve.resident import LoadWatcher, Resident
from homeserve.settings import Settings

LIMITS = (256, 1024, 4, 8, 64, 0, 2)


class Told:
    """Hears warnings alone."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def on_warning(self, text: str) -> None:
        self.warnings.append(text)


def resident(settings: Settings) -> tuple[Any, Told]:
    told, nobody = Told(), cast(Any, None)
    return Resident(settings, {}, cast(LoadWatcher, told), MemoryWatch(0, lambda: ""), nobody), told


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
    made, told = resident(Settings(devices="cpu:2"))
    made._tell_no_flip(limits)
    assert told.warnings == warnings


async def test_a_layout_that_stays_needs_no_folder_of_images_and_that_is_said() -> None:
    made, told = resident(Settings(devices="cuda:0,rocm:0", image_spill="/images"))
    made._tell_no_flip(EngineLimits(*LIMITS, layout="pipeline", no_flip=NoFlip("does_not_fit", "9 MiB of 8")))
    assert told.warnings == ["the layout stays pipeline: 9 MiB of 8; nothing is written below --image-spill"]


@pytest.mark.parametrize("flips", [True, False], ids=("flips", "stays"))
async def test_what_can_be_no_folder_of_images_is_refused_whether_the_layout_stays_or_not(
    flips: bool, tmp_path: Path
) -> None:
    """Of cards it may stay by estimate: the same words must not be refused on one box and ignored on another."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    made, _ = resident(Settings(devices="cuda:0,rocm:0", image_spill=str(file)))
    with pytest.raises(SettingError, match="--image-spill") as caught:
        made._image_folder(flips)
    assert caught.value.field == "image_spill" and caught.value.exit_code == 2
    await made.stop()
    folder, _ = resident(Settings(devices="cuda:0,rocm:0", image_spill=str(tmp_path)))
    assert bool(folder._image_folder(flips)) is flips
    await folder.stop()
    assert list(tmp_path.iterdir()) == [file]


async def test_the_folder_of_images_goes_with_the_server(tmp_path: Path) -> None:
    made, _ = resident(Settings(devices="cpu:2", image_spill=str(tmp_path)))
    folder = Path(made._image_folder(True))
    (folder / "rank0").write_bytes(b"x")
    assert folder.parent == tmp_path
    await made.stop()
    assert list(tmp_path.iterdir()) == []
    plain, _ = resident(Settings(devices="cpu:2"))
    assert plain._image_folder(True) == ""
    await plain.stop()
