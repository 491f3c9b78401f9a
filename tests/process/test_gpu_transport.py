"""Rows on cards go from process to process: by the host, between the cards, by a collectives library. Which way is
tried out, agreed on and said; what dies, lies or hangs is found within its bound.

The cards are emulated (peer_device.py), the library is tests/fakes/nccl.cpp; processes, memory and exchanges are real.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

# The test folders are no package (pytest's importlib mode); this one has modules of its own.
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import transport_rank as rank_side
from fake_cards import FakeCards, fake_cards

from backends.acts import ActShape, make_memory
from backends.gpu.transport.aperture import OTHERS_BYTES
from backends.gpu.transport.nccl_library import Library, NcclError

ROOT = Path(__file__).resolve().parents[2]
FAKE = ROOT / "tests" / "fakes" / "nccl.cpp"
PATIENCE_S = 120.0
"""A bound on every wait. It is for hangs: nothing is measured with it."""
BOUND_S = 4.0
DEPTH = 3
CLOSED = {"closed": True, "held": 0}
DEFAULTS = "NCCL_NVLS_ENABLE=0 NCCL_CUMEM_ENABLE=0"


class Ranks:
    """Processes with a card each, that share the acts of one shape."""

    def __init__(self, ranks: int, job: str, environ: dict[str, str], **options: Any) -> None:
        routes = [(rank, rank + 1) for rank in range(ranks - 1)]
        shape = ActShape(ranks, 4096, rank_side.ROOM.message_floats, DEPTH, tuple(routes))
        fd = make_memory(shape)
        chosen = {"fleet": ["cuda"] * ranks, "timeout_s": PATIENCE_S} | options
        words = [str(fd), json.dumps(asdict(shape))]
        self.processes = [
            subprocess.Popen(
                [sys.executable, rank_side.__file__, *words, str(rank), job, json.dumps(chosen)],
                pass_fds=(fd,),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,  # a line is read without what is behind it
                env={**os.environ, **environ},
            )
            for rank in range(ranks)
        ]
        os.close(fd)
        try:
            assert self.hear() == [{"up": True}] * ranks
        except BaseException:
            self.close()
            raise
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.flush()

    def hear(self) -> list[dict[str, Any]]:
        """The next thing that each rank says."""
        heard = []
        for process in self.processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.communicate(timeout=PATIENCE_S)[1]
            heard.append(json.loads(line))
        return heard

    def said(self, rank: int) -> list[dict[str, Any]]:
        """All that a rank says from here to its end."""
        out, err = self.processes[rank].communicate(timeout=PATIENCE_S)
        assert self.processes[rank].returncode == 0, err
        return [json.loads(line) for line in out.splitlines()]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate(timeout=PATIENCE_S)


Start = Callable[..., Ranks]


@pytest.fixture(scope="session")
def nccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the library's fake, under both vendors' names."""
    folder = tmp_path_factory.mktemp("nccl")
    built = folder / "libnccl.so.2"
    flags = ["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    subprocess.run([shutil.which("g++") or "c++", *flags, "-o", str(built), str(FAKE)], check=True, timeout=PATIENCE_S)
    (folder / "librccl.so.1").symlink_to(built)
    return folder


@pytest.fixture
def started(nccl: Path) -> Iterator[Start]:
    made: list[Ranks] = []

    def start(ranks: int, job: str, /, **options: Any) -> Ranks:
        environ = {"LD_LIBRARY_PATH": str(nccl), **options.pop("environ", {})}
        made.append(Ranks(ranks, job, environ, **options))
        return made[-1]

    yield start
    for ranks in made:
        ranks.close()


KINDS = ("host", "peer", "nccl")


def by(kind: str) -> dict[str, Any]:
    return {"environ": {"HOMESERVE_TRANSPORT": kind}}


def wanted_sum(seed: int, ranks: int, rows: int, width: int) -> str:
    total = rank_side.part_of(seed, 0, rows, width)
    for rank in range(1, ranks):
        total = total + rank_side.part_of(seed, rank, rows, width)
    return rank_side.digest(total)


# ------------------------------------------------------------------------------------------------------------ exchanges


def wanted_sums(ranks: int) -> list[dict[str, Any]]:
    """What every rank says of `sums`."""
    return [{"digest": wanted_sum(seed, ranks, *shape)} for seed, shape in enumerate(rank_side.SUMS * 3)]


def wanted_gathers(ranks: int, rank: int) -> list[dict[str, Any]]:
    def gathered(seed: int, shares: Any) -> np.ndarray[Any, Any]:
        return np.concatenate([rank_side.part_of(seed, of, 4, shares[of]) for of in range(ranks)], axis=1)

    every = [[gathered(seed, shares)] for seed, shares in enumerate(rank_side.SHARES)]
    every.append([gathered(99 + index, shares) for index, shares in enumerate(rank_side.TWO_PARTS)])
    return [
        {"digest": rank_side.digest(*parts) if target in (None, rank) else None}
        for parts in every
        for target in rank_side.TARGETS
    ]


def wanted_messages(ranks: int, rank: int) -> list[dict[str, Any]]:
    if rank < ranks - 1:
        return []
    every = [[rank_side.part_of(seq, 0, 2, 40), rank_side.part_of(seq, 1, 2, 3)] for seq in range(12)]
    return [{"digest": rank_side.digest(*(both if seq % 2 == 0 else both[:1]))} for seq, both in enumerate(every)]


@pytest.mark.parametrize(("kind", "ranks"), [("host", 3), ("peer", 2), ("peer", 3), ("nccl", 3)])
def test_rows_come_whole_to_every_rank_and_sums_in_the_order_of_the_ranks(
    started: Start, kind: str, ranks: int
) -> None:
    fleet = started(ranks, "exchanges", **by(kind))
    assert [each["kind"] for each in fleet.hear()] == [kind] * ranks
    for rank in range(ranks):
        wanted = [*wanted_sums(ranks), *wanted_gathers(ranks, rank), *wanted_messages(ranks, rank)]
        assert fleet.said(rank) == [*wanted, CLOSED]


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_without_credit_is_not_sent_and_spoils_none(started: Start, kind: str) -> None:
    fleet = started(2, "too_many", **by(kind))
    assert [each["kind"] for each in fleet.hear()] == [kind] * 2
    assert fleet.said(0)[0] == {"error": "NoCredit", "sent": DEPTH}
    assert fleet.said(1)[0] == {"values": [0.0, 1.0, 2.0]}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_wrong_alone_is_told_before_the_peers_know(started: Start, kind: str) -> None:
    fleet = started(2, "refused", **by(kind))
    fleet.hear()
    for rank in range(2):
        said = fleet.said(rank)
        assert "was bound for" in said[0]["refused"] or "apart" in said[0]["refused"]
        assert "32 apart and not 16" in said[1]["refused"]
        assert said[2] == {"value": 2.0}


# --------------------------------------------------------------------------------------------------- what can go wrong


@pytest.mark.parametrize(
    ("kind", "job"),
    [("host", "another_plan"), ("peer", "another_plan"), ("peer", "another_width"), ("nccl", "another_width")],
)
def test_ranks_at_different_places_know_it_before_a_row_is_used(started: Start, kind: str, job: str) -> None:
    fleet = started(2, job, **by(kind))
    fleet.hear()
    for rank in range(2):
        (error,) = fleet.said(rank)
        assert (error["error"], error["peer"], error["label"]) == ("StampMismatch", 1 - rank, "ffn")
        assert error["again"] == error["words"]
        assert ("of plan 8" in error["words"]) == (job == "another_plan")
        assert ("1 x 32" in error["words"]) == (job == "another_width")


@pytest.mark.parametrize("kind", ["peer", "nccl"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_dies_or_stops_is_late_within_the_bound(started: Start, kind: str, how: signal.Signals) -> None:
    fleet = started(2, "for_ever", timeout_s=BOUND_S, **by(kind))
    fleet.hear()
    assert fleet.hear() == [{"ready": True}] * 2
    fleet.processes[1].send_signal(how)
    (error,) = fleet.said(0)
    assert (error["error"], error["label"]) == ("PeerLate", "for ever")
    assert error["again"] == error["words"]


# ----------------------------------------------------------------------------------------------------------- the choice


def test_cards_that_copy_to_each_other_do(started: Start) -> None:
    for opened in started(2, "nothing").hear():
        assert (opened["kind"], opened["notes"]) == ("peer", [])
        assert opened["why"] == "copies between all cards were seen to arrive"
        assert opened["lines"]["mailboxes"] > 0


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("nothing", "what rank 1 copied to this card is not there"),
        ("the first", "what rank 1 copied to this card is not there"),
        ("hang", "a copy between this card and that of rank 0 did not end within 2 s"),
    ],
)
def test_a_card_that_lies_about_its_copies_is_told_of_and_not_used(started: Start, lie: str, words: str) -> None:
    fleet = started(2, "sums", lie=["", lie], environ={"NCCL_FAKE": "old"})
    for opened in fleet.hear():
        assert opened["kind"] == "host"
        assert words in opened["why"]
        assert opened["told"] == opened["notes"]
        assert "copies between the cards cannot be trusted" in opened["notes"][0]
        assert words in opened["notes"][0]
        assert ("mailboxes" in opened["lines"]) == (lie == "hang"), "what may still be written to stays held"
    for rank in range(2):
        assert fleet.said(rank)[:-1] == wanted_sums(2)


@pytest.mark.parametrize(
    ("lie", "words"),
    [
        ("refuse", "rank 1: the handle cannot be opened"),
        ("no", "rank 1: the driver says no to Emulated sm_86 of rank 0"),
    ],
)
def test_a_driver_that_says_no_is_believed_and_the_library_used(started: Start, lie: str, words: str) -> None:
    for opened in started(2, "nothing", lie=["", lie]).hear():
        assert (opened["kind"], opened["notes"]) == ("nccl", [])
        assert words in opened["why"] and "a sum by the library was right" in opened["why"]


def test_a_transport_that_is_closed_takes_nothing_of_a_window(started: Start) -> None:
    fleet = started(2, "nothing", window=OTHERS_BYTES + (2 << 20))
    assert [opened["kind"] for opened in fleet.hear()] == ["peer", "peer"]
    for rank in range(2):
        assert fleet.said(rank) == [CLOSED | {"mapped": 0}]


def test_mailboxes_that_do_not_fit_a_window_are_refused_with_the_arithmetic(started: Start) -> None:
    for opened in started(2, "nothing", window=OTHERS_BYTES + (512 << 10)).hear():
        assert (opened["kind"], opened["notes"]) == ("nccl", [])
        assert "rank 0: 1 group x 2 MiB = 2 MiB of peer window against 0.50 MiB usable" in opened["why"]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("old", "NCCL 2.13.4 is too old, 2.14.0 is wanted"),
        ("fail-init", "unhandled system error"),
        ("hang-init", "a communicator of 2 ranks did not come about in time"),
        ("wrong-sum", "a sum of all ranks is wrong in 1 of 4096 places"),
    ],
)
def test_a_library_that_fails_its_trial_is_not_used(started: Start, words: str, why: str) -> None:
    fleet = started(2, "sums", lie=["no", "no"], environ={"NCCL_FAKE": words})
    for opened in fleet.hear():
        assert opened["kind"] == "host"
        assert why in opened["why"]
    for rank in range(2):
        assert fleet.said(rank) == [*wanted_sums(2), CLOSED]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"fleet": []}, "it is not known what the other ranks run on"),
        ({"plain": True}, "rank 0's driver has no memory handles for other processes"),
        (by("host"), "HOMESERVE_TRANSPORT=host"),
    ],
)
def test_where_cards_have_nothing_in_common_it_is_the_host(started: Start, options: dict[str, Any], why: str) -> None:
    fleet = started(2, "sums", **options)
    for opened in fleet.hear():
        assert (opened["kind"], opened["notes"]) == ("host", [])
        assert why in opened["why"]
    for rank in range(2):
        assert fleet.said(rank) == [*wanted_sums(2), CLOSED]


def test_cards_of_amd_use_their_own_library(started: Start) -> None:
    options = {"fleet": ["rocm", "rocm"], "arch": ["gfx1103", "gfx1103"], "lie": ["no", "no"]}
    for opened in started(2, "nothing", **options).hear():
        assert opened["kind"] == "nccl"


@pytest.mark.parametrize(
    ("asked", "options", "words"),
    [
        ("peer", {"lie": ["", "nothing"]}, "HOMESERVE_TRANSPORT=peer cannot be had: no copies between the cards"),
        ("nccl", {"fleet": ["cuda", "rocm"]}, "HOMESERVE_TRANSPORT=nccl cannot be had: ranks on cuda, rocm"),
        ("wires", {}, "HOMESERVE_TRANSPORT=wires is no transport"),
    ],
)
def test_a_choice_of_the_users_is_met_or_refused(
    started: Start, asked: str, options: dict[str, Any], words: str
) -> None:
    for refused in started(2, "nothing", **by(asked), **options).hear():
        assert refused["refused"] == "TransportRefused"
        assert words in refused["words"]


def test_a_group_of_which_a_call_fails_is_not_left_open(nccl: Path) -> None:
    library = Library("nvidia", str(nccl / "libnccl.so.2"))
    memory = os.memfd_create("communicator")  # as the fake makes it for an id, which stays open
    os.truncate(memory, 64 << 20)
    communicator = library.communicator(f"/proc/self/fd/{memory}".encode().ljust(128, b"\0"), 0, 1, PATIENCE_S)
    os.close(memory)
    with pytest.raises(NcclError, match="ncclSend failed: invalid argument"), communicator.group():
        communicator.send(4096, 1, 0, 1)  # to itself
    with pytest.raises(NcclError, match="ncclGroupEnd failed"):  # of none
        library.call("ncclGroupEnd")
    communicator.close()


# ------------------------------------------------------------------------------------------------------- over a driver


def over_driver(cards: FakeCards, *places: tuple[str, int]) -> dict[str, Any]:
    """Options for ranks on cards of the fake drivers."""
    names = {"nvidia": "cuda", "amd": "rocm"}
    return {"driver": places, "fleet": [names[vendor] for vendor, _ in places], "environ": cards.environment}


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_cards_of_a_driver_copy_to_each_other(started: Start, tmp_path: Path, vendor: str) -> None:
    cards = fake_cards(tmp_path, cuda=3, rocm=3)
    fleet = started(3, "exchanges", **over_driver(cards, *((vendor, index) for index in range(3))))
    for opened in fleet.hear():
        assert opened["kind"] == "peer", opened["why"]
    for rank in range(3):
        wanted = [*wanted_sums(3), *wanted_gathers(3, rank), *wanted_messages(3, rank)]
        assert fleet.said(rank) == [*wanted, CLOSED]


def test_a_driver_whose_copies_lie_is_told_of_and_not_used(started: Start, tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=2)
    cards.lie("nvidia", 1)
    fleet = started(2, "exchanges", **over_driver(cards, ("nvidia", 0), ("nvidia", 1)))
    for opened in fleet.hear():
        assert opened["kind"] == "host"
        assert "copies between the cards cannot be trusted" in opened["notes"][0]
    for rank in range(2):
        assert fleet.said(rank) == [*wanted_sums(2), *wanted_gathers(2, rank), *wanted_messages(2, rank), CLOSED]


@pytest.mark.parametrize(
    ("facts", "places", "why"),
    [
        ({"cuda1": {"peers": 0}}, (("nvidia", 0), ("nvidia", 1)), "there is no peer access between them"),
        ({}, (("nvidia", 0), ("amd", 0)), "ranks on cuda, rocm have only the host in common"),
        ({}, (("nvidia", 0), ("nvidia", 0)), "ranks 0 and 1 share one card"),
    ],
)
def test_cards_of_drivers_that_do_not_reach_each_other_use_the_host(
    started: Start, tmp_path: Path, facts: dict[str, Any], places: Any, why: str
) -> None:
    fleet = started(2, "exchanges", **over_driver(fake_cards(tmp_path, cuda=2, facts=facts), *places))
    for opened in fleet.hear():
        assert (opened["kind"], opened["notes"]) == ("host", [])
        assert why in opened["why"]
    for rank in range(2):
        assert fleet.said(rank) == [*wanted_sums(2), *wanted_gathers(2, rank), *wanted_messages(2, rank), CLOSED]


# ---------------------------------------------------------------------------------------------- the library's variables


def test_defaults_are_set_before_the_first_communicator(started: Start, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    started(2, "nothing", environ={"HOMESERVE_TRANSPORT": "nccl", "NCCL_FAKE_NOTES": str(notes)}).hear()
    assert [line.strip() for line in notes.read_text().splitlines()] == [DEFAULTS] * 2


def test_a_users_variable_stands(started: Start, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    mine = {"NCCL_NVLS_ENABLE": "1", "HOMESERVE_TRANSPORT": "nccl", "NCCL_FAKE_NOTES": str(notes)}
    started(2, "nothing", environ=mine).hear()
    assert [line.strip() for line in notes.read_text().splitlines()] == [
        DEFAULTS.replace("S_ENABLE=0", "S_ENABLE=1")
    ] * 2
