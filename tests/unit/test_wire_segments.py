"""Shared-memory files: owner, names, sweep; and the doorbell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from homeserve.errors import WireError, WorkerStartError
from homeserve.wire.doorbell import BellReader, BellWriter
from homeserve.wire.segments import Segment, names, start_time, sweep


def test_a_segment_is_private_named_after_its_owner_and_shared_by_descriptor(tmp_path: Path) -> None:
    owner = Segment.create("plans", 8192, at=tmp_path)
    assert owner.path is not None
    assert re.fullmatch(rf"homeserve-{os.getpid()}-\d+-[0-9a-f]{{8}}-plans", owner.path.name)
    assert owner.path.stat().st_mode & 0o777 == 0o600
    assert names(at=tmp_path) == [owner.path.name]
    child = Segment.attach(os.dup(owner.fd), 8192)
    owner.unlink()
    assert names(at=tmp_path) == []
    owner.view[:4] = b"plan"
    assert bytes(child.view[:4]) == b"plan"
    child.close()
    owner.close()
    owner.close()


def test_a_segment_of_another_size_is_refused(tmp_path: Path) -> None:
    owner = Segment.create("plans", 4096, at=tmp_path)
    with pytest.raises(WireError, match="4096 bytes where 8192"):
        Segment.attach(owner.fd, 8192)
    owner.close()


def test_no_room_is_an_error_that_says_where_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(WorkerStartError, match=str(tmp_path)):
        Segment.create("plans", 1 << 62, at=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_what_dead_owners_left_and_nothing_else(tmp_path: Path) -> None:
    mine = Segment.create("plans", 4096, at=tmp_path)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(timeout=20)
    now = start_time(os.getpid())
    assert now is not None
    stale = [
        tmp_path / f"homeserve-{dead.pid}-{now}-0123abcd-plans",
        tmp_path / f"homeserve-{os.getpid()}-{now - 1}-0123abcd-report-0",  # our number, an older process
    ]
    other = [tmp_path / "homeserve-notes.txt", tmp_path / f"homeserve-{dead.pid}-plans"]
    for path in stale + other:
        path.write_bytes(b"")
    assert sorted(sweep(at=tmp_path)) == sorted(path.name for path in stale)
    assert mine.path is not None
    assert sorted(tmp_path.iterdir()) == sorted([*other, mine.path])
    assert sweep(at=tmp_path) == []
    mine.close()


def test_a_zombie_and_a_missing_process_have_no_start_time() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()  # ends with the process, which stays a zombie until it is waited for
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(child.pid) is None
    child.wait()
    child.stdout.close()
    assert start_time(child.pid) is None
    assert start_time(os.getpid()) is not None


def test_the_bell_counts_and_ends_with_its_writer() -> None:
    read_fd, write_fd = os.pipe()
    writer, reader = BellWriter(write_fd), BellReader(read_fd, blocking=False)
    assert reader.poll_nowait() == 0 and not reader.ended
    for _ in range(3):
        assert writer.ring()
    assert reader.poll_nowait() == 3
    assert writer.ring()
    writer.close()
    assert reader.poll_nowait() == 1 and not reader.ended
    assert reader.poll_nowait() == 0 and reader.ended
    reader.close()


def test_a_bell_whose_reader_is_gone_says_so() -> None:
    read_fd, write_fd = os.pipe()
    writer = BellWriter(write_fd)
    os.close(read_fd)
    assert not writer.ring()
    writer.close()


def test_a_bell_that_would_block_is_a_bug() -> None:
    read_fd, write_fd = os.pipe()
    writer = BellWriter(write_fd)
    with pytest.raises(AssertionError, match="doorbell is full"):
        for _ in range(1 << 20):
            writer.ring()
    writer.close()
    os.close(read_fd)
