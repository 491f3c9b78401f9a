"""Which form of a linear layer is ahead on this card: measured at a bind, kept beside the compiled kernels.

    classes of a plan ─▶ few against many at 4, 8, 16 rows ─▶ border ─┬─▶ Forms, for the life of the program
                      └▶ many against a library at 32, 64 … rows ─▶ border, once what both compute was compared

Measured on what the plan has anyway: weights that lie on the card, the op's own buffers and scratch, launches recorded
and replayed, by the card's own clock (`Timed`). Rows are random numbers: a card that multiplies zeros is faster. Layers
of one class are taken one after the other, so that a matrix comes from memory as it does in a step. Both sides make
what they need of their rows, though in a step the op before often quantises them for nothing: a bias of a few percent
against the few-row form.

What stays as it is without measuring (backends.gpu.forms):
- a border for which the two sides differ by less than the measurements of either do among themselves;
- a class that `BOUND_S` has no time left for, the largest classes first; a smaller one behind it may have;
- everything on a device without a clock, or with HOMESERVE_TUNE=off.

An entry is a file of its own in the folder of compiled kernels. Its name is a digest of what it depends on: the card's
name, arch and driver, the sources of the kernels, the library, the class, and the most rows. It says the same inside,
so a file of another kind or a damaged one is measured anew, and written anew in one step.

A library's product is compared with linear_many's, on the card, at each bind, also where the border comes from an
entry: it is not ours, and what is installed changes. Where it is further away than `WITHIN`, or raises, its class goes
without it, and that is told.

Ranks measure each for itself and may come to other borders: see backends.gpu.forms why that is right.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from backends.gpu import library_gemm, library_torch, sources
from backends.gpu.arch import Arch
from backends.gpu.cache import default_folder
from backends.gpu.device import Device, Memory, Timed
from backends.gpu.entries import About, Entries
from backends.gpu.errors import GpuError, OutOfDeviceMemory
from backends.gpu.forms import FEW_LEAST, FEW_MOST, NEVER, Forms, ShapeClass, few_rows_most, possible
from backends.gpu.launch import Symbol
from backends.gpu.library_gemm import LINE, SLAB_BYTES, Finder, Gemm, GemmRefused
from backends.gpu.ops import linear, many, quants
from backends.gpu.plan import Placed, Plan
from backends.gpu.trial import Sample, Timing, Trial, samples_of

log = logging.getLogger(__name__)

VARIABLE = "HOMESERVE_TUNE"
CHOICES = ("on", "off")
FEW_ROWS = (4, 8, 16)
"""Rows at which few is measured against many. Beyond FEW_MOST few reads a matrix once more for every eight."""
LIBRARY_ROWS = (32, 64, 128, 256, 512, 1024)
"""Rows at which many is measured against a library."""
BOUND_S = 0.4
"""Of the card's time, for all that a program has measured."""
WITHIN = 2.0**-8
"""Of a row's largest number: so far may a library's product be from ours. Both sum halves in single precision; a wrong
scale, line or transpose is off by all of it."""


class TuneRefused(GpuError):
    """HOMESERVE_TUNE is no word that it can be."""


@dataclass
class Tuned:
    """What a program runs with. `library_bytes`: what of the card was taken while the library first multiplied, by
    whomever; of the programs of a card, the first one has them."""

    forms: Forms
    gemm: Gemm | None = None
    slab: Memory | None = None
    library_bytes: int = 0


def open_tuning(device: Device, environ: Mapping[str, str], tell: Callable[[str], None]) -> Tuning | None:
    """As the user's variables say; None where nothing is to be measured, or the device has no clock. Begins to import
    torch where it is wanted. Raises TuneRefused, GemmRefused."""
    tune, wanted = environ.get(VARIABLE, "") or "on", library_gemm.choice(environ)
    if tune not in CHOICES:
        raise TuneRefused(f"{VARIABLE}={tune} is neither on nor off", fix=f"set it to one of {', '.join(CHOICES)}")
    measures = tune == "on" and isinstance(device, Timed)
    if wanted == "torch" and not measures:
        raise GemmRefused(
            f"{library_gemm.VARIABLE}=torch and nothing is measured: a library is taken where it was measured ahead",
            fix=f"set {VARIABLE}=on, or {library_gemm.VARIABLE}=own",
        )
    if not measures or not isinstance(device, Timed):
        return None
    if wanted == "auto" and not library_torch.installed():
        log.info("%s: no torch is installed, own kernels multiply", device.facts.told)
        wanted = "own"
    finder = None if wanted == "own" else library_torch.Finding()
    entries = Entries(default_folder(environ), tell)
    return Tuning(device, entries, tell, finder, required=wanted == "torch")


class Tuning:
    """Of one card. `finder`: of the library that may multiply; `required`: one that cannot be had is an error."""

    def __init__(
        self,
        device: Timed,
        entries: Entries,
        tell: Callable[[str], None],
        finder: Finder | None = None,
        *,
        required: bool = False,
    ) -> None:
        self._device, self._entries, self._tell = device, entries, tell
        self._finder, self._required = finder, required
        self._gemm: Gemm | None = None

    def possible(self) -> tuple[Forms, ...]:
        """What `tune` may choose, for a plan that has room and kernels for it."""
        return possible(self._device.facts.arch, library=self._finder is not None)

    def tune(self, plan: Plan, places: Placed) -> Tuned:
        """Measure what is not known, and choose. The program has run nothing yet, its weights lie on the card. Raises
        GemmRefused where the library is required and cannot be had; DriverError, DeviceLost."""
        arch = self._device.facts.arch
        samples, trial = samples_of(plan, places), Trial(self._device, places, BOUND_S)
        few = {each: found for each in samples if (found := self._few(each, samples[each], trial)) is not None}
        tuned = Tuned(Forms(arch, few))
        if self._finder is not None:
            self._add_library(tuned, samples, trial, places)
        places.forms = tuned.forms
        places.library = tuned.slab.address if tuned.slab is not None else 0
        self._log(tuned.forms, samples, trial.spent)
        return tuned

    # ------------------------------------------------------------------------------------------------------------- few

    def _few(self, each: ShapeClass, samples: Sequence[Sample], trial: Trial) -> int | None:
        """None: as without measuring."""
        arch = self._device.facts.arch
        rows_most = min(sample.rows for sample in samples)
        about = self._about(each, "few", rows_most if rows_most < FEW_MOST else FEW_MOST)
        known = self._entries.get(about)
        if known is not None and FEW_LEAST <= known <= FEW_MOST:
            return known
        sides = Forms(arch, every_few=FEW_MOST), Forms(arch, every_few=FEW_LEAST)
        found = []
        for rows in (rows for rows in FEW_ROWS if rows <= rows_most):
            times = trial.times(samples, rows, sides)
            if times is None:
                return None
            found.append((rows, *times))
        if not found:
            return None
        border = few_border(found, few_rows_most(each.quant, arch))
        self._entries.put(about, border)
        return border

    # --------------------------------------------------------------------------------------------------------- library

    def _add_library(
        self, tuned: Tuned, samples: Mapping[ShapeClass, list[Sample]], trial: Trial, places: Placed
    ) -> None:
        """The slab is held only where a class has chosen the library."""
        trial.gemm = self._found()
        if trial.gemm is None:
            return
        free = self._device.free_bytes()
        try:
            slab = self._device.allocate(SLAB_BYTES, LINE, "rows of a matrix unpacked for a library")
        except OutOfDeviceMemory as error:
            self._tell(f"{error.message}; own kernels multiply")
            return
        places.library = slab.address
        chosen: dict[ShapeClass, int] = {}
        try:
            chosen = self._libraries(samples, trial, tuned.forms)
        finally:
            places.library = 0
            if not chosen:
                slab.close()
        tuned.library_bytes = max(0, free - self._device.free_bytes() - (slab.nbytes if chosen else 0))
        if chosen:
            tuned.forms, tuned.slab, tuned.gemm = replace(tuned.forms, library=chosen), slab, trial.gemm

    def _libraries(
        self, samples: Mapping[ShapeClass, list[Sample]], trial: Trial, forms: Forms
    ) -> dict[ShapeClass, int]:
        """Borders of the classes that take the library; one that refuses to multiply has none."""
        found: dict[ShapeClass, int] = {}
        try:
            for each, taken in samples.items():
                border = self._library(each, taken, trial, forms)
                if border != NEVER:
                    found[each] = border
        except GemmRefused as error:
            self._refuse(error)
            return {}
        return found

    def _found(self) -> Gemm | None:
        if self._gemm is None and self._finder is not None:
            try:
                self._gemm = self._finder(self._device)
            except GemmRefused as error:
                self._refuse(error)
        return self._gemm

    def _refuse(self, error: GemmRefused) -> None:
        """Raises it where the library is required; else it is told once, and nobody asks again."""
        self._finder, self._gemm = None, None
        if self._required:
            raise error
        self._tell(f"{self._device.facts.told}: {error.message}; own kernels multiply")

    def _library(self, each: ShapeClass, samples: Sequence[Sample], trial: Trial, forms: Forms) -> int:
        """NEVER: own kernels. Raises GemmRefused."""
        assert trial.gemm is not None, "found before"
        if 2 * many.padded(each.cols) > SLAB_BYTES:
            return NEVER
        rows_most = min(sample.rows for sample in samples)
        about = self._about(each, trial.gemm.title, rows_most)
        border = self._entries.get(about)
        if border is None:
            found = self._library_times(samples, rows_most, trial, forms)
            if found is None:
                return NEVER
            border = found
            self._entries.put(about, border)
        if not LIBRARY_ROWS[0] <= border <= rows_most:
            return NEVER
        off = max(trial.distance(sample, border, _sides(forms)) for sample in samples[:1])
        if off > WITHIN:
            self._tell(
                f"{self._device.facts.told}: {trial.gemm.title} multiplies {each.told} with an error of {off:.1e} of"
                " the largest number; own kernels do that"
            )
            return NEVER
        return border

    def _library_times(self, samples: Sequence[Sample], rows_most: int, trial: Trial, forms: Forms) -> int | None:
        """From the most rows down, as long as the library leads; None where time ended before the first."""
        border = NEVER
        for rows in reversed([rows for rows in LIBRARY_ROWS if rows <= rows_most]):
            times = trial.times(samples, rows, _sides(forms))
            if times is None:
                return None if border == NEVER else border
            own, library = times
            if not library.leads(own):
                break
            border = rows
        return border

    # ---------------------------------------------------------------------------------------------------------- inside

    def _about(self, each: ShapeClass, what: str, rows: int) -> About:
        facts = self._device.facts
        return {
            "card": facts.name,
            "arch": facts.arch.name,
            "driver": facts.driver,
            "kernels": kernels_digest(each.quant.name, facts.arch),
            "what": what,
            "class": each.told,
            "rows": str(rows),
        }

    def _log(self, forms: Forms, samples: Mapping[ShapeClass, list[Sample]], spent: float) -> None:
        told = []
        for each, (sample, *_) in samples.items():
            text = f"{each.told} few up to {forms.few_rows_most(sample.matrix)} rows"
            told.append(text + (f", library from {forms.library[each]}" if each in forms.library else ""))
        log.info("%s: %s (measured for %.0f ms)", self._device.facts.told, "; ".join(told), 1e3 * spent)


def few_border(found: Sequence[tuple[int, Timing, Timing]], fixed: int) -> int:
    """The most rows up to which few is ahead, of (rows, few, many) by rows. Where neither leads, few is taken up to
    `fixed`."""
    border = FEW_LEAST
    for rows, few, many_ in found:
        if not (few.leads(many_) or (rows <= fixed and not many_.leads(few))):
            break
        border = rows
    return border


def _sides(forms: Forms) -> tuple[Forms, Forms]:
    """Many, and a library, of the same rows."""
    every = replace(forms, few={}, library={}, every_few=FEW_LEAST)
    return every, replace(every, every_library=FEW_LEAST + 1)


@functools.cache
def kernels_digest(quant: str, arch: Arch) -> str:
    """Of all sources that a matrix of this type is measured with. Raises SourcesMissing."""
    symbols = [each for each in _MEASURED if quant in each.types or not each.types]
    return " ".join(sorted({sources.program(each, arch.vendor).digest[:16] for each in symbols}))


_MEASURED: tuple[Symbol, ...] = (
    *linear.LINEAR_FEW.values(),
    *many.LINEAR.values(),
    *quants.DEQUANTIZE["f16"].values(),
    quants.QUANTIZE_ROWS,
    many.HALVE,
)
