"""The folder of a server's images: its own, gone with it, and what killed servers left is swept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from homeserve.errors import SettingError
from homeserve.images import make_folder, remove_folder, sweep


def test_a_folder_is_made_with_those_above_it_and_removed_with_what_it_holds(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    made = make_folder(below)
    assert made.parent == below and str(os.getpid()) in made.name and made.stat().st_mode & 0o777 == 0o700
    (made / "rank0").write_bytes(b"x")
    remove_folder(made)
    remove_folder(made)
    assert list(below.iterdir()) == []


def test_what_a_killed_server_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    mine = make_folder(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "homeserve-images-notes").mkdir()
    (tmp_path / f"homeserve-images-{os.getpid()}-1").mkdir()
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    dead = tmp_path / f"homeserve-images-{child.pid}-77"
    dead.mkdir()
    (dead / "rank0").write_bytes(b"x")
    (tmp_path / f"homeserve-images-{child.pid}-78").symlink_to(tmp_path / "models")
    assert set(sweep(tmp_path)) == {dead.name, f"homeserve-images-{os.getpid()}-1"}, "a pid alone is nobody's"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine.name, "models", "homeserve-images-notes", f"homeserve-images-{child.pid}-78"}


def test_a_folder_that_cannot_be_is_a_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match="--image-spill: .*file") as caught:
        make_folder(tmp_path / "file")
    assert caught.value.field == "image_spill"
