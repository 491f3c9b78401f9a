"""What `--devices` and `--backend` say, and what they refuse."""

from __future__ import annotations

from pathlib import Path

import pytest

from homeserve.errors import SettingError
from homeserve.settings import Settings, load

UUID = "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"


def said(*words: str, **environ: str) -> Settings:
    return load(words, environ, Path("/"))


@pytest.mark.parametrize(
    ("text", "devices", "cards"),
    [
        ("auto", "auto", ()),
        ("cpu", "cpu", ()),
        ("CPU:3", "cpu:3", ()),
        ("cuda", "cuda:0", ("cuda:0",)),
        ("CUDA:1,rocm:0", "cuda:1,rocm:0", ("cuda:1", "rocm:0")),
        (" rocm:1 , cuda:0 ", "rocm:1,cuda:0", ("rocm:1", "cuda:0")),
        (UUID, UUID, (UUID,)),
        ("MIG-GPU-8932f937/1/0", "MIG-GPU-8932f937/1/0", ("MIG-GPU-8932f937/1/0",)),
        ("01:00.0", "0000:01:00.0", ("0000:01:00.0",)),
        ("C4:00", "0000:c4:00.0", ("0000:c4:00.0",)),
        ("00000000:01:00.0", "0000:01:00.0", ("0000:01:00.0",)),
    ],
)
def test_devices_by_number_uuid_and_address(text: str, devices: str, cards: tuple[str, ...]) -> None:
    settings = said("--devices", text)
    assert (settings.devices, settings.cards, settings.ranks) == (
        devices,
        cards,
        len(cards) or (3 if "3" in text else 1),
    )
    assert settings.wants_cards is bool(cards)


def test_a_file_may_list_them(tmp_path: Path) -> None:
    (tmp_path / "homeserve.toml").write_text('devices = ["cuda:1", "cuda:0"]\n')
    assert load([], {"HOME": "/h"}, tmp_path).cards == ("cuda:1", "cuda:0")


@pytest.mark.parametrize(
    ("words", "field", "text"),
    [
        ("--devices cuda:0,,cuda:1", "devices", "has an empty word"),
        ("--devices gpu0", "devices", "'gpu0' is no device"),
        ("--devices cuda:x", "devices", "'cuda:x' is no device"),
        ("--devices cuda:0,banana", "devices", "'banana' is no card"),
        ("--devices cpu,cpu:2", "devices", "is not a list of cards"),
        ("--devices cuda:0,cpu", "devices", "cards and the CPU in one fleet are not in this version (cuda:0,cpu)"),
        ("--devices cpu:2,rocm:0", "devices", "cards and the CPU in one fleet are not in this version"),
        ("--devices cuda:0,cuda", "devices", "cuda:0 is named twice: a card is one rank"),
        (f"--devices {UUID},{UUID.upper()}", "devices", "is named twice"),
        ("--devices " + ",".join(f"cuda:{n}" for n in range(65)), "devices", "65 devices"),
        ("--devices cuda:0 --backend cpu", "backend", "computes on the CPU, and --devices names cuda:0"),
        ("--devices cuda:0 --backend reference", "backend", "computes on the CPU"),
        ("--devices rocm:0 --backend cuda", "devices", "--backend cuda: does not compute on rocm:0"),
        ("--devices cpu:2 --backend rocm", "devices", "--backend rocm: computes on cards, and --devices is cpu:2"),
        ("--devices cuda:0 --deterministic", "deterministic", "a card computes a row with other last digits"),
        ("--backend cuda --deterministic", "deterministic", "a card computes a row with other last digits"),
        ("--devices cuda:0,cuda:1 --memory unified", "memory", "is memory of several ranks on the CPU"),
        ("--devices cuda:0 --isa avx2", "isa", "is of the CPU's kernels"),
        ("--devices cuda:0 --threads 4", "threads", "--threads 4: is of ranks on the CPU, and the ranks are cards"),
        ("--backend rocm --threads 1", "threads", "is of ranks on the CPU"),
        ("--devices cuda:0 --layout tensor", "layout", "needs several ranks, and there is one"),
        ("--devices cuda:0,cuda:1 --token-vector 1,2,3", "token_vector", "3 numbers for 2 ranks"),
    ],
)
def test_what_cannot_be(words: str, field: str, text: str) -> None:
    with pytest.raises(SettingError) as caught:
        said(*words.split())
    assert caught.value.field == field and text in caught.value.message and caught.value.fix


def test_one_card_is_two_ranks_for_tests_alone() -> None:
    assert said("--devices", "cuda:0,cuda:0", HOMESERVE_TESTING="1").ranks == 2
    with pytest.raises(SettingError, match="HOMESERVE_TESTING_CARDS is for tests"):
        said(HOMESERVE_TESTING_CARDS="/tree")
    assert said(HOMESERVE_TESTING_CARDS="/tree", HOMESERVE_TESTING="1").cards_root == "/tree"
    assert said(HOMESERVE_TESTING="1").warnings == ()


def test_how_many_cards_a_backend_has_is_not_known_before_the_box_is() -> None:
    """What needs several ranks is checked when they were counted (homeserve.cards)."""
    settings = said("--backend", "cuda", "--layout", "tensor", "--token-vector", "2,1")
    assert not settings.ranks_known and settings.wants_cards
    assert said("--backend", "rocm", "--devices", "rocm:0,rocm:1", "--layout", "tensor").ranks_known
