"""A card at work: memory, virtual memory, pinned memory, kernels, graphs, losses. The real code, over fake drivers."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from fake_cards import CAPTURE_UNSUPPORTED, ECC, LAUNCH_FAILED, NOT_SUPPORTED, OUT_OF_MEMORY, FakeCards, fake_cards

from backends.gpu.arch import Vendor
from backends.gpu.card import Card
from backends.gpu.device import Device, PeerDevice, StreamDevice
from backends.gpu.errors import DeviceLost, DriverError, OutOfDeviceMemory
from backends.gpu.launch import Launch
from backends.gpu.ops import mixers

VENDORS: tuple[Vendor, ...] = get_args(Vendor)
MIB = 1 << 20
PATIENCE_S = 60.0
ROWS, WIDTH = 3, 48
LAUNCH = {"nvidia": "cuLaunchKernel", "amd": "hipModuleLaunchKernel"}


@dataclass
class Bench:
    """A fake card and what the tests do with it."""

    cards: FakeCards
    vendor: Vendor
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.card: Card = self.cards.open(self.vendor, say=self.said.append)

    def put(self, target: int, array: np.ndarray) -> None:
        staging = self.card.pinned(array.nbytes, "staging")
        staging.bytes[:] = array.reshape(-1).view(np.uint8)
        self.card.upload(target, staging.address, array.nbytes)
        self.card.wait()
        staging.close()

    def get(self, source: int, nbytes: int) -> np.ndarray:
        staging = self.card.pinned(nbytes, "staging")
        self.card.download(staging.address, source, nbytes)
        self.card.wait()
        got = staging.bytes.copy()
        staging.close()
        return got

    def norm(self, seed: int = 0) -> tuple[Launch, int, np.ndarray]:
        """A launch of norm_rows, where its result lies, and what it has to be."""
        x = np.random.default_rng(seed).normal(size=(ROWS, WIDTH)).astype(np.float32)
        weight = np.linspace(0.5, 2, WIDTH, dtype=np.float32)
        src, out, gains = (self.card.allocate(size, "test") for size in (x.nbytes, x.nbytes, weight.nbytes))
        self.put(src.address, x)
        self.put(gains.address, weight)
        args = (src.address, WIDTH, 0, 0, gains.address, out.address, WIDTH, 0, 0, 0, 0, WIDTH, 1e-6)
        want = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + 1e-6) * weight
        return Launch(mixers.NORM, (ROWS, 1, 1), args), out.address, want

    def floats(self, source: int) -> np.ndarray:
        return self.get(source, 4 * ROWS * WIDTH).view(np.float32).reshape(ROWS, WIDTH)


@pytest.fixture(params=VENDORS)
def bench(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    made = Bench(fake_cards(tmp_path, mib=64), request.param)
    yield made
    made.card.close()
    if made.card.driver.lost:
        made.cards.end_process(made.vendor)


def held_bytes() -> int:
    """What the system holds for the cards of this process: blocks of their files in memory."""
    total = 0
    for each in Path("/proc/self/fd").iterdir():
        try:
            if os.readlink(each).startswith("/memfd:card"):
                total += os.stat(each).st_blocks * 512
        except FileNotFoundError:
            continue  # the one that listed the folder
    return total


# -------------------------------------------------------------------------------------------------------------- memory


def test_a_card_is_a_device(bench: Bench) -> None:
    device: Device = bench.card
    assert device.facts.vendor == bench.vendor and not device.counts


def test_new_memory_is_zero_and_aligned(bench: Bench) -> None:
    for _ in range(3):
        memory = bench.card.allocate(5000, "weights")
        assert memory.address % 256 == 0
        assert not bench.get(memory.address, 5000).any()
        bench.card.fill(memory.address, 0xFF, 5000)
        memory.close()
        memory.close()


def test_bytes_go_up_across_and_down(bench: Bench) -> None:
    first, second = (bench.card.allocate(1000, "weights") for _ in range(2))
    sent = np.arange(1000).astype(np.uint8)
    bench.put(first.address, sent)
    bench.card.copy(second.address + 100, first.address, 300)
    bench.card.fill(second.address, 7, 50)
    want = np.concatenate((np.full(50, 7), np.zeros(50), sent[:300], np.zeros(600))).astype(np.uint8)
    np.testing.assert_array_equal(bench.get(second.address, 1000), want)


def test_what_does_not_fit_is_told_with_the_arithmetic_and_the_card_goes_on(bench: Bench) -> None:
    held = bench.card.allocate(40 * MIB, "weights")
    with pytest.raises(OutOfDeviceMemory) as caught:
        bench.card.allocate(30 * MIB, "kv", "2 layers x 15 MiB")
    assert isinstance(caught.value, MemoryError)
    assert caught.value.card == bench.card.facts.told
    assert (
        f"{bench.card.facts.told} has no room for kv: 30.0 MiB (2 layers x 15 MiB) wanted, 24.0 MiB of 64.0 MiB free"
        in caught.value.message
    )
    assert "ask for less" in caught.value.fix
    held.close()
    bench.card.allocate(30 * MIB, "kv").close()


def test_what_two_processes_hold_of_a_card_they_both_see(bench: Bench) -> None:
    code = (
        "import sys\n"
        "from backends.gpu.card import open_card\n"
        "card = open_card(sys.argv[1], say=print)\n"
        "memory = card.allocate(24 << 20, 'weights')\n"
        "print(card.free_bytes() >> 20, flush=True)\n"
        "sys.stdin.read()\n"
        "card.close()\n"
    )
    environment = os.environ | bench.cards.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", code, bench.vendor]
    mine = bench.card.allocate(16 * MIB, "weights")
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "24\n"
        assert bench.card.free_bytes() == 24 * MIB
        other.stdin.close()
        assert other.wait(PATIENCE_S) == 0
    assert bench.card.free_bytes() == 48 * MIB
    mine.close()


# ----------------------------------------------------------------------------------------------------- virtual memory


def test_memory_is_released_and_restored_behind_a_fixed_address(bench: Bench) -> None:
    before = bench.card.free_bytes(), held_bytes()
    kv = bench.card.reserve(5 * MIB, "kv")
    address = kv.address
    assert (kv.nbytes, kv.backed, bench.card.free_bytes(), held_bytes()) == (5 * MIB, False, *before)
    for _ in range(3):
        kv.back()
        assert kv.backed and kv.address == address
        assert before[0] - bench.card.free_bytes() == 6 * MIB
        bench.card.wait()
        assert held_bytes() - before[1] == 6 * MIB
        assert not bench.get(address, 5 * MIB).any()
        bench.card.fill(address, 0xAB, 5 * MIB)
        kv.release()
        kv.release()
        assert (kv.backed, bench.card.free_bytes(), held_bytes()) == (False, *before)
    kv.close()


def test_a_release_waits_for_what_still_writes(bench: Bench) -> None:
    kv = bench.card.reserve(2 * MIB, "kv")
    kv.back()
    bench.card.fill(kv.address, 1, 2 * MIB)
    kv.release()
    bench.card.wait()
    kv.close()


def test_released_memory_is_gone_for_whoever_still_uses_it(bench: Bench) -> None:
    kv = bench.card.reserve(2 * MIB, "kv")
    kv.back()
    kv.release()
    with pytest.raises(DriverError, match=r"failed: \w*INVALID_VALUE|failed: hipErrorInvalidValue"):
        bench.card.fill(kv.address, 1, 16)


@pytest.mark.parametrize("step", [0, 1, 2], ids=["create", "map", "access"])
def test_a_backing_that_fails_leaves_nothing(bench: Bench, step: int) -> None:
    functions = {
        "nvidia": ("cuMemCreate", "cuMemMap", "cuMemSetAccess"),
        "amd": ("hipMemCreate", "hipMemMap", "hipMemSetAccess"),
    }
    kv = bench.card.reserve(4 * MIB, "kv", "2 layers x 2 MiB")
    before = bench.card.free_bytes(), held_bytes()
    bench.cards.fail(bench.vendor, functions[bench.vendor][step], OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory, match=r"no room for kv: 4.0 MiB \(2 layers x 2 MiB\) wanted"):
        kv.back()
    assert (kv.backed, bench.card.free_bytes(), held_bytes()) == (False, *before)
    kv.back()
    assert not bench.get(kv.address, 4 * MIB).any()
    kv.close()
    assert (bench.card.free_bytes(), held_bytes()) == before


# ------------------------------------------------------------------------------------------------------- pinned memory


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * MIB + 5, 9 * MIB])
def test_pinned_memory_is_as_large_as_asked_in_whole_pages(bench: Bench, nbytes: int) -> None:
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = bench.card.pinned(nbytes, "image")
    assert (memory.nbytes, memory.bytes.nbytes, memory.address % mmap.PAGESIZE) == (nbytes, nbytes, 0)
    assert bench.cards.registered(bench.vendor) == whole
    assert not memory.bytes.any()
    memory.close()
    memory.close()
    assert bench.cards.registered(bench.vendor) == 0
    with pytest.raises(ValueError, match="image: this memory was closed"):
        memory.bytes  # noqa: B018


def test_memory_of_the_caller_is_pinned_and_stays_the_callers(bench: Bench) -> None:
    mine = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    array = np.frombuffer(mine, np.uint8)
    address = array.ctypes.data
    with pytest.raises(ValueError, match="inside a page"):
        bench.card.pin(address + 16, 100, "weights copy")
    pinned = bench.card.pin(address, 5000, "weights copy")
    pinned.bytes[:3] = 1, 2, 3
    there = bench.card.allocate(5000, "weights")
    bench.card.upload(there.address, address, 5000)
    bench.card.wait()
    pinned.close()
    assert list(array[:4]) == [1, 2, 3, 0] == list(bench.get(there.address, 4))


def test_pinned_memory_outlives_what_the_card_still_does_with_it(bench: Bench) -> None:
    there, sent = bench.card.allocate(5000, "weights"), np.arange(5000).astype(np.uint8)
    staging = bench.card.pinned(5000, "staging")
    staging.bytes[:] = sent
    bench.card.upload(there.address, staging.address, 5000)
    staging.close()
    np.testing.assert_array_equal(bench.get(there.address, 5000), sent)


def test_memory_that_cannot_be_pinned_is_a_memory_error(bench: Bench) -> None:
    function = "cuMemHostRegister_v2" if bench.vendor == "nvidia" else "hipHostRegister"
    bench.cards.fail(bench.vendor, function, OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match="image: 5000 bytes of host memory could not be pinned"):
        bench.card.pinned(5000, "image")


def test_moves_take_pinned_memory_alone(bench: Bench) -> None:
    there = bench.card.allocate(9000, "weights")
    plain = np.zeros(9000, np.uint8)
    pinned = bench.card.pinned(4096, "staging")
    for move in (bench.card.upload, bench.card.download):
        ends = (there.address, plain.ctypes.data) if move == bench.card.upload else (plain.ctypes.data, there.address)
        with pytest.raises(ValueError, match="9000 bytes at 0x[0-9a-f]+, which is not pinned"):
            move(*ends, 9000)
    with pytest.raises(ValueError, match="not pinned"):
        bench.card.upload(there.address, pinned.address + 1, 4096)


# ---------------------------------------------------------------------------------------------------- launches, graphs


def test_a_kernel_computes_what_numpy_does(bench: Bench) -> None:
    launch, out, want = bench.norm()
    bench.card.prepare([mixers.NORM, mixers.NORM])
    bench.card.launch([launch])
    np.testing.assert_allclose(bench.floats(out), want, rtol=1e-5, atol=1e-6)
    assert bench.card.counts == {"norm_rows": 1}


def test_a_recording_runs_nothing_until_it_is_replayed_and_is_counted_then(bench: Bench) -> None:
    launch, out, want = bench.norm()
    zero = Launch(mixers.ZERO, (ROWS, 1, 1), (out, WIDTH, WIDTH))
    recording = bench.card.record([zero, launch, launch])
    assert recording.graph and not bench.card.counts
    assert not bench.floats(out).any()
    bench.card.replay(recording)
    bench.card.replay(recording)
    np.testing.assert_allclose(bench.floats(out), want, rtol=1e-5, atol=1e-6)
    assert bench.card.counts == {"zero": 2, "norm_rows": 4}
    recording.close()
    recording.close()
    assert bench.card.counts == {"zero": 2, "norm_rows": 4} and not bench.said
    with pytest.raises(ValueError, match="closed"):
        bench.card.replay(recording)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, CAPTURE_UNSUPPORTED])
@pytest.mark.parametrize("end", [False, True], ids=["begin", "end"])
def test_a_driver_that_refuses_to_record_is_told_about_once_and_launches(bench: Bench, code: int, end: bool) -> None:
    begin, finish = ("cuStreamBeginCapture_v2", "cuStreamEndCapture")
    if bench.vendor == "amd":
        begin, finish = ("hipStreamBeginCapture", "hipStreamEndCapture")
    launch, out, want = bench.norm()
    bench.card.prepare([mixers.NORM])
    bench.cards.fail(bench.vendor, finish if end else begin, code, count=0)
    recordings = [bench.card.record([launch]) for _ in range(2)]
    assert [each.graph for each in recordings] == [0, 0]
    assert not bench.card.counts and not bench.floats(out).any()
    bench.card.replay(recordings[0])
    bench.card.replay(recordings[1])
    np.testing.assert_allclose(bench.floats(out), want, rtol=1e-5, atol=1e-6)
    assert bench.card.counts == {"norm_rows": 2}
    assert len(bench.said) == 1 and "its driver records no launches" in bench.said[0]


def test_no_launches_are_a_recording_too(bench: Bench) -> None:
    bench.card.replay(bench.card.record([]))
    bench.card.wait()
    assert not bench.card.counts


def test_a_launch_may_ask_for_more_block_memory_than_the_usual(bench: Bench) -> None:
    launch, out, want = bench.norm()
    bench.card.launch([Launch(launch.symbol, launch.grid, launch.args, shared=60 << 10)])
    np.testing.assert_allclose(bench.floats(out), want, rtol=1e-5, atol=1e-6)


def test_an_argument_that_does_not_fit_its_parameter_is_named(bench: Bench) -> None:
    launch, _, _ = bench.norm()
    args = (*launch.args[:-2], 1 << 31, 1e-6)
    with pytest.raises(ValueError, match="norm_rows: width = 2147483648 is no i32"):
        bench.card.launch([Launch(launch.symbol, launch.grid, args)])


def test_another_thread_may_use_the_card(bench: Bench) -> None:
    launch, out, want = bench.norm()
    got: list[np.ndarray] = []

    def work() -> None:
        bench.card.launch([launch])
        got.append(bench.floats(out))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-6)


def test_two_cards_of_one_process_do_not_take_each_others_work(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=2, mib=64)
    first, second = cards.open("nvidia", 0), cards.open("nvidia", 1)
    memory = first.allocate(16 * MIB, "weights")
    assert (first.free_bytes(), second.free_bytes()) == (48 * MIB, 64 * MIB)
    memory.close()
    first.close()
    second.close()


def test_a_closed_card_has_given_all_back(bench: Bench) -> None:
    before = held_bytes()
    launch, _, _ = bench.norm()
    bench.card.replay(bench.card.record([launch]))
    bench.card.reserve(2 * MIB, "kv").back()
    bench.card.pinned(5000, "staging")
    bench.card.close()
    bench.card.close()
    assert (held_bytes(), bench.cards.registered(bench.vendor)) == (before, 0)
    again = bench.cards.open(bench.vendor)
    assert again.free_bytes() == 64 * MIB
    again.close()


# ------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(("code", "fix"), [(LAUNCH_FAILED, "dmesg"), (ECC, "ECC could not correct")])
def test_a_lost_card_is_told_at_the_wait_and_by_every_call_after_it(bench: Bench, code: int, fix: str) -> None:
    launch, out, _ = bench.norm()
    recording = bench.card.record([launch])
    bench.cards.lose(bench.vendor, 0, code, launch=2)
    bench.card.replay(recording)
    bench.card.wait()
    bench.card.replay(recording)
    with pytest.raises(DeviceLost, match="nothing of this card is usable any more") as caught:
        bench.card.wait()
    assert caught.value.card == bench.card.facts.told and fix in caught.value.fix
    calls: tuple[Callable[[], object], ...] = (
        lambda: bench.card.replay(recording),
        lambda: bench.card.allocate(16, "kv"),
        lambda: bench.card.fill(out, 0, 16),
        lambda: bench.card.launch([launch]),
        lambda: bench.card.record([launch]),
        bench.card.free_bytes,
        bench.card.wait,
    )
    for call in calls:
        with pytest.raises(DeviceLost) as again:
            call()
        assert again.value.message == caught.value.message


def test_out_of_memory_inside_a_step_leaves_the_card_usable(bench: Bench) -> None:
    launch, out, want = bench.norm()
    bench.card.prepare([mixers.NORM])
    bench.cards.fail(bench.vendor, LAUNCH[bench.vendor], OUT_OF_MEMORY)
    with pytest.raises(OutOfDeviceMemory, match=f"{LAUNCH[bench.vendor]} failed"):
        bench.card.launch([launch])
    assert not bench.card.counts
    bench.card.launch([launch])
    np.testing.assert_allclose(bench.floats(out), want, rtol=1e-5, atol=1e-6)


def test_a_kernel_that_writes_where_no_memory_is_loses_the_card(bench: Bench) -> None:
    """In a process of its own: the emulation does not survive it either."""
    code = (
        "import sys\n"
        "from backends.gpu.card import open_card\n"
        "from backends.gpu.errors import DeviceLost\n"
        "from backends.gpu.launch import Launch\n"
        "from backends.gpu.ops import mixers\n"
        "card = open_card(sys.argv[1], say=print)\n"
        "kv = card.reserve(2 << 20, 'kv')\n"
        "kv.back()\n"
        "kv.release()\n"
        "card.launch([Launch(mixers.ZERO, (1, 1, 1), (kv.address, 64, 64))])\n"
        "try:\n"
        "    card.wait()\n"
        "except DeviceLost as lost:\n"
        "    print(lost.message)\n"
        "card.close()\n"
    )
    environment = os.environ | bench.cards.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code, bench.vendor], env=environment, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert "llegal" in done.stdout.replace("ILLEGAL", "illegal") and bench.card.facts.told in done.stdout


# ------------------------------------------------------------------------------------------- memory of another process


PEER = """
import sys
from backends.gpu.card import open_card
from backends.gpu.errors import DriverError

card = open_card(sys.argv[1], index=1, say=print)
handle, nbytes = bytes.fromhex(sys.argv[2]), int(sys.argv[3])
try:
    theirs = card.open(handle, nbytes)
except DriverError as error:
    sys.exit(error.message)
if "try" in sys.argv:
    own, kv, staging = card.allocate(nbytes, "own"), card.reserve(nbytes, "kv"), card.pinned(nbytes, "staging")
    print(card.try_copy(theirs.address, own.address, nbytes, 0.2), flush=True)
    for each in (theirs, own, kv, staging):
        each.close()
    card.close()
    sys.exit()
staging, mine = card.pinned(nbytes, "staging"), card.allocate(nbytes, "mine")
card.copy(mine.address, theirs.address, nbytes)
card.download(staging.address, mine.address, nbytes)
card.wait()
staging.bytes[:] += 1
card.upload(mine.address, staging.address, nbytes)
card.copy(theirs.address, mine.address, nbytes)
card.wait()
theirs.close()
card.close()
"""
"""Another process with a card of its own: adds one to each byte behind a handle."""


def _with_peer(cards: FakeCards, vendor: Vendor, *more: str) -> tuple[str, np.ndarray, np.ndarray]:
    """(what the peer says, what was there, what is there now)."""
    bench = Bench(cards, vendor)
    memory = bench.card.allocate(2 * MIB, "rows")
    sent = np.arange(2 * MIB).astype(np.uint8)
    bench.put(memory.address, sent)
    environment = os.environ | cards.environment | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PEER, vendor, bench.card.export(memory).hex(), str(memory.nbytes), *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
    now = bench.get(memory.address, memory.nbytes)
    bench.card.close()
    return (done.stdout + done.stderr).strip(), sent, now


@pytest.mark.parametrize("vendor", VENDORS)
def test_memory_is_shared_with_the_card_of_another_process(vendor: Vendor, tmp_path: Path) -> None:
    said, sent, now = _with_peer(fake_cards(tmp_path, cuda=2, rocm=2), vendor)
    assert said == ""
    np.testing.assert_array_equal(now, sent + 1)


def test_memory_that_shares_a_block_with_others_has_no_handle(bench: Bench) -> None:
    """A real driver gives one, of all that lies in the block."""
    with pytest.raises(DriverError, match="IpcGetMemHandle failed"):
        bench.card.export(bench.card.allocate(2 * MIB - 4096, "rows"))


def test_a_copy_that_cannot_be_tried_leaves_no_stream(bench: Bench) -> None:
    copies = {"nvidia": "cuMemcpyDtoDAsync_v2", "amd": "hipMemcpyDtoDAsync"}
    ends = {"nvidia": "cuStreamDestroy_v2", "amd": "hipStreamDestroy"}
    memory = bench.card.allocate(2 * MIB, "rows")
    bench.cards.fail(bench.vendor, copies[bench.vendor], NOT_SUPPORTED)
    bench.cards.fail(bench.vendor, ends[bench.vendor], NOT_SUPPORTED, call=2)
    with pytest.raises(DriverError, match="DtoDAsync"):
        bench.card.try_copy(memory.address, memory.address + MIB, MIB, PATIENCE_S)
    with pytest.raises(DriverError, match="StreamDestroy"):  # the second to be ended is the card's own
        bench.card.close()


def test_a_copy_between_cards_can_lie(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=2)
    cards.lie("nvidia", 1)
    said, sent, now = _with_peer(cards, "nvidia")
    assert said == "" and (now != sent + 1).any()


def test_cards_that_do_not_reach_each_other_say_so(tmp_path: Path) -> None:
    said, sent, now = _with_peer(fake_cards(tmp_path, cuda=2, facts={"cuda1": {"peers": 0}}), "nvidia")
    assert "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED" in said
    np.testing.assert_array_equal(now, sent)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_copy_is_tried_on_a_stream_of_its_own(vendor: Vendor, tmp_path: Path) -> None:
    said, _, now = _with_peer(fake_cards(tmp_path, cuda=2, rocm=2), vendor, "try")
    assert said == "True" and not now.any()


def test_a_tried_copy_that_never_ends_is_given_up_and_so_is_all_memory(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=2)
    cards.hang("nvidia", 1)
    said, sent, now = _with_peer(cards, "nvidia", "try")
    assert said.splitlines()[0] == "False" and "a copy on it never ended" in said
    np.testing.assert_array_equal(now, sent)


def test_a_card_says_whom_it_reaches_and_whether_it_is_idle(tmp_path: Path) -> None:
    cards = fake_cards(tmp_path, cuda=3, facts={"cuda2": {"peers": 0}})
    card = cards.open("nvidia")
    device: StreamDevice = card
    peer: PeerDevice = card
    uuid = "GPU-5ee1c0de-0000-4000-8000-00000000000"
    assert peer.reaches(uuid + "1") == ""
    assert "no peer access" in peer.reaches(uuid + "2")
    assert "not shown" in peer.reaches("GPU-0")
    assert device.stream and device.idle()
    card.allocate(4096, "weights")
    assert not device.idle()
    card.wait()
    assert device.idle()
    card.close()
