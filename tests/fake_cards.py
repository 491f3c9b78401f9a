"""Cards that are not there: fake drivers and compilers of both vendors, built from tests/fakes.

    cards = fake_cards(tmp_path, cuda=2, rocm=1, mib=256)

    card = cards.open("nvidia", 1)                                  # in this process: a backends.gpu.card.Card
    subprocess.run(argv, env=os.environ | cards.environment)        # in another one: the product finds them by itself

The libraries lie in one folder under the names that the system's loader looks for (libcuda.so.1, libamdhip64.so,
libnvrtc.so.13, libhiprtc.so), so LD_LIBRARY_PATH is all that another process needs. In this process they are loaded by
path: the loader read its path when the process began. Each call makes copies, so cards of two folders know nothing of
each other; processes of one folder share its cards and see each other's memory.

`fail`, `lose`, `lie` and `hang` add rules, at any time, also while other processes run with these cards. Code is
compiled by g++ for the emulation, once for all tests (the cache of tests/kernel/simt_rig.py); XDG_CACHE_HOME is set, so
that no code of a fake is ever among a user's kernels, and HOMESERVE_TUNE=off: how long an emulation takes says nothing
of a card.

What the cards do is told in tests/fakes/fake_driver.cpp, what compilers do in fake_compiler.cpp.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS / "kernel"))

import simt_rig as rig  # noqa: E402

from backends.gpu import jit  # noqa: E402
from backends.gpu.arch import Vendor  # noqa: E402
from backends.gpu.card import Card, open_card  # noqa: E402

FAKES = TESTS / "fakes"
ROCM_DRIVER = 70_151_831
CUDA_DRIVER = 13_000
_PREFIX: dict[Vendor, str] = {"nvidia": "cuda", "amd": "rocm"}
_DRIVERS: dict[Vendor, tuple[str, ...]] = {
    "nvidia": ("libcuda.so.1",),
    "amd": ("libamdhip64.so", "libamdhip64.so.7"),
}
_COMPILERS: dict[Vendor, str] = {"nvidia": "libnvrtc.so.13", "amd": "libhiprtc.so"}

OUT_OF_MEMORY, ECC, ILLEGAL_ADDRESS, LAUNCH_FAILED, NOT_SUPPORTED, CAPTURE_UNSUPPORTED = 2, 214, 700, 719, 801, 900


@dataclass
class FakeCards:
    """One folder of fakes. `environment`: what another process needs in its own."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def driver(self, vendor: Vendor) -> str:
        """The file of the driver, for this process."""
        return str(self.folder / _DRIVERS[vendor][0])

    def compiler(self, vendor: Vendor) -> jit.Jit:
        return jit.Jit(vendor, str(self.folder / _COMPILERS[vendor]))

    def open(self, vendor: Vendor, index: int = 0, say: Callable[[str], None] = print, uuid: str = "") -> Card:
        return open_card(
            vendor,
            index=index,
            uuid=uuid,
            say=say,
            library=self.driver(vendor),
            compiler=self.compiler(vendor),
            environ=os.environ | {"XDG_CACHE_HOME": self.environment["XDG_CACHE_HOME"]},
        )

    def fail(self, vendor: Vendor, function: str, code: int, *, call: int = 1, count: int = 1, card: int = -1) -> None:
        """From now on the `call`-th call of a function, and `count` in all (0: every further one), fail with a status;
        where `card` is told, those for this card alone."""
        self._rule(vendor, f"fail {function} {code} {call} {count} {card}")

    def lose(self, vendor: Vendor, card: int, code: int = LAUNCH_FAILED, *, launch: int = 1) -> None:
        """The `launch`-th launch from now on takes the card with it, in every process."""
        self._rule(vendor, f"lose {card} {code} {launch}")

    def lie(self, vendor: Vendor, card: int) -> None:
        """Copies between this card and memory of other processes put something else."""
        self._rule(vendor, f"lie {card}")

    def hang(self, vendor: Vendor, card: int) -> None:
        """Copies between this card and memory of other processes never end."""
        self._rule(vendor, f"hang {card}")

    def registered(self, vendor: Vendor) -> int:
        """Bytes of this process's memory that are pinned."""
        count = ctypes.CDLL(self.driver(vendor)).fake_registered
        count.restype = ctypes.c_uint64
        return int(count())

    def end_process(self, vendor: Vendor) -> None:
        """Forgets what this process had of a card that it lost, as its end would."""
        ctypes.CDLL(self.driver(vendor)).fake_end_of_process()

    def _rule(self, vendor: Vendor, line: str) -> None:
        path = self.folder / f"{_PREFIX[vendor]}.cards"
        fresh = path.with_suffix(".new")
        fresh.write_text(path.read_text() + line + "\n")
        fresh.replace(path)


def fake_cards(
    folder: Path,
    *,
    cuda: int = 1,
    rocm: int = 1,
    mib: int = 1024,
    cuda_driver: int = CUDA_DRIVER,
    rocm_driver: int = ROCM_DRIVER,
    facts: Mapping[str, Mapping[str, Any]] | None = None,
    without: tuple[str, ...] = (),
) -> FakeCards:
    """Cards of `mib` MiB each in a folder of their own below `folder`.

    `facts`: of single cards, by `cuda0`, `rocm1`: name, uuid, pci, mib, arch, warp, units, integrated, vmm, peers (0 or
    1), taken (MiB that somebody else holds). `without`: functions that the drivers lack. A count of -1 leaves the
    vendor's libraries out.
    """
    place = folder / f"cards-{len(list(folder.glob('cards-*')))}"
    place.mkdir(parents=True)
    for vendor, count, driver in (("nvidia", cuda, cuda_driver), ("amd", rocm, rocm_driver)):
        if count >= 0:
            _install(place, vendor, without)  # type: ignore[arg-type]
            _describe(place, vendor, count, driver, mib, facts or {})  # type: ignore[arg-type]
    store = rig.CACHE / "given"
    store.mkdir(parents=True, exist_ok=True)
    (place / "compiler").write_text(f"{sys.executable}\n{FAKES / 'compile.py'}\n{store}\n{_decides()}\n")
    searched = os.pathsep.join(filter(None, (str(place), os.environ.get("LD_LIBRARY_PATH"))))
    environment = {"LD_LIBRARY_PATH": searched, "XDG_CACHE_HOME": str(place / "cache"), "HOMESERVE_TUNE": "off"}
    return FakeCards(place, environment)


def _install(place: Path, vendor: Vendor, without: tuple[str, ...]) -> None:
    flags = ("-DROCM",) if vendor == "amd" else ()
    code = rig.library(FAKES / "fake_driver.cpp", *flags, "-ldl").read_bytes()
    for name in without:  # a name that nobody asks for, of the same length
        code = code.replace(b"\0" + name.encode() + b"\0", b"\0_" + name[1:].encode() + b"\0")
    for name in _DRIVERS[vendor]:
        (place / name).write_bytes(code)
    shutil.copy(rig.library(FAKES / "fake_compiler.cpp", *flags, "-ldl"), place / _COMPILERS[vendor])


def _describe(
    place: Path, vendor: Vendor, count: int, driver: int, mib: int, facts: Mapping[str, Mapping[str, Any]]
) -> None:
    lines = [f"driver {driver}"]
    for index in range(count):
        told = _usual(vendor, index) | {"mib": mib} | dict(facts.get(f"{_PREFIX[vendor]}{index}", {}))
        lines.append("card " + " ".join(f"{key}={str(value).replace(' ', '_')}" for key, value in told.items()))
    (place / f"{_PREFIX[vendor]}.cards").write_text("\n".join(lines) + "\n")


def _usual(vendor: Vendor, index: int) -> dict[str, Any]:
    if vendor == "nvidia":
        return {
            "name": "NVIDIA GeForce RTX 3090",
            "uuid": f"GPU-5ee1c0de-0000-4000-8000-{index:012x}",
            "pci": f"0000:{index + 1:02X}:00.0",
            "arch": "sm_86",
            "warp": 32,
            "units": 4,
        }
    return {
        "name": "AMD Radeon 780M Graphics",
        "uuid": f"GPU-{0xA11D0000 + index:016x}",
        "pci": f"0000:{index + 0x41:02x}:00.0",
        "arch": "gfx1103",
        "warp": 32,
        "units": 4,
    }


def _decides() -> str:
    """What decides a library beside what a compiler is given."""
    total = hashlib.sha256(" ".join((rig.compiler() or "", *rig.FLAGS)).encode())
    for path in (*sorted(rig.SIMT.glob("*")), FAKES / "compile.py"):
        total.update(path.read_bytes())
    return total.hexdigest()[:16]
