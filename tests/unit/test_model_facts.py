"""The name under which a model is served."""

from __future__ import annotations

from pathlib import Path

import pytest

from homeserve.model_facts import model_id_of


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/Tiny-Q4_1.gguf", "Tiny-Q4_1"),
        ("/m/Big-00001-of-00003.gguf", "Big"),
        ("/m/folder", "folder"),
        ("/m/folder/.", "folder"),
        (".gguf", ".gguf"),
    ],
)
def test_a_model_is_named_after_its_file_or_folder(path: str, name: str) -> None:
    assert model_id_of(path) == name


def test_the_folder_here_has_its_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_id_of(".") == tmp_path.name
