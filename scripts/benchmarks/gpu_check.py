"""Checks a real card in minutes: what `scripts/gpu_check` runs. One table, and the same as CSV.

    numerics    every kernel's case of tests/kernel/gpu_cases, run on the card
    bandwidth   few-row linear layers and decode attention, as a fraction of a copy within the card
    prefill     many-row linear layers as a fraction of torch's product; from how many rows on they are ahead
    launches    graphs against plain launches; memory that comes and goes behind an address
    fleet       two workers on one card that flip under an answer, over pinned host memory
    tokens      whole models against the CPU, and their speed

Each part is a process of its own with a share of the time: one that fails, hangs or lacks something is a row with the
reason, and the others run. Exit 0: every row is ok. 1: some are not. 2: there is no card to check.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from gpu_numerics import Tally, makers
from gpu_part import LOST, Job
from gpu_rows import HEAD, Place, Row, complain, line_of, verdict, write_csv

from backends.gpu.arch import Vendor
from backends.quant import QuantType
from budget.facts import Box, Card
from budget.probe import Sources, read_box
from homeserve import readiness
from homeserve.cards import BACKENDS, told_of, word_of
from homeserve.commands.doctor_cards import findings
from homeserve.settings import resolve

HERE = Path(__file__).resolve().parent
SECONDS = {"numerics": 150, "bandwidth": 70, "prefill": 70, "launches": 15, "fleet": 60, "tokens": 90}
QUICK_SECONDS = {"numerics": 30, "bandwidth": 12, "prefill": 12, "launches": 5, "fleet": 22, "tokens": 30}
TINY_SECONDS = dict.fromkeys(SECONDS, 300)
"""For tests, where a card is emulated."""
SIZES = {"full": (SECONDS, 470.0), "quick": (QUICK_SECONDS, 115.0), "tiny": (TINY_SECONDS, 1800.0)}
"""The share of each part, and what all of them take at most."""
GRACE_S, END_S = 3.0, 6.0
"""What a part may take beyond its share, and to end when it is told to."""
VENDORS: dict[str, Vendor] = {"nvidia": "nvidia", "amd": "amd"}
RETRIES = 3
"""How often numerics go on behind a case that ended its process."""


def main(argv: Sequence[str]) -> int:
    options = _options(argv)
    try:
        box, card = _card(options.device)
    except _NoCard as none:
        complain(*none.args)
        return 2
    ready = readiness.read([card.vendor], os.environ)[card.vendor]
    missing = _missing(box, card, ready)
    if missing:
        complain(*missing)
        return 2
    place = Place(told_of(card, box), ready.driver or "unknown", _commit())
    seed = _seed(place.commit) if options.seed is None else options.seed
    print(f"{place.device}, {place.driver}, commit {place.commit}, seed {seed:x}")
    print(HEAD, flush=True)
    rows = list(_all_rows(options, card, seed))
    if options.csv:
        write_csv(options.csv, rows, place)
    print(verdict(rows))
    return 0 if rows and all(row.ok for row in rows) else 1


def _options(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="", help="cuda:0, rocm:0, a UUID or a PCI address; the first one if absent")
    parser.add_argument("--parts", default=",".join(SECONDS), help="of %(default)s")
    parser.add_argument("--quick", action="store_true", help="2 minutes: five types, samples")
    parser.add_argument("--csv", type=Path, help="also write the rows to this file")
    parser.add_argument("--torch", default=sys.executable, metavar="PYTHON", help="one that has torch for this card")
    parser.add_argument("--model", default="", help="for the part tokens, instead of the default model")
    parser.add_argument("--types", default="", help="only these types of weights, by comma")
    parser.add_argument("--cases", default="", metavar="GLOB", help="only these cases of the part numerics")
    parser.add_argument(
        "--seed", type=lambda text: int(text, 16), help="of the cases, hexadecimal; the commit if absent"
    )
    parser.add_argument("--tiny", action="store_true", help="sizes for tests over emulated cards; no goal is judged")
    options = parser.parse_args(argv)
    options.parts, options.types = options.parts.split(","), options.types.upper()
    unknown = [*set(options.parts) - SECONDS.keys()]
    unknown += [name for name in options.types.split(",") if name and name not in QuantType.__members__]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    return options


# ------------------------------------------------------------------------------------------------------------- the card


class _NoCard(Exception):
    """What is missing, and what to do next."""


def _card(word: str) -> tuple[Box, Card]:
    settings = resolve(argparse.Namespace(), os.environ, Path.cwd())
    box = read_box(Sources(cards=settings.cards_root or None))
    cards = [card for card in box.cards if card.vendor in BACKENDS]
    known = "; ".join(told_of(card, box) for card in cards)
    if not cards:
        raise _NoCard("no card of NVIDIA or AMD was found here", "see homeserve doctor, and docs/INSTALL_GPU.md")
    if not word:
        return box, next((card for card in cards if not card.unified), cards[0])
    for card in cards:
        if word.lower() in (word_of(card, box), card.id.lower(), (card.pci or "").lower()):
            return box, card
    raise _NoCard(f"there is no card {word} here", f"there is: {known}")


def _missing(box: Box, card: Card, ready: readiness.Readiness) -> tuple[str, str] | None:
    """Why the card cannot be checked: everything that `doctor` says is missing for it. None: it can."""
    lacking = [each for each in findings(box, os.environ, {card.vendor: ready}) if each.card == word_of(card, box)]
    lacking = [each for each in lacking if each.fix]
    if not ready.missing and ready.sees(card.id, card.pci) is not None:
        for each in lacking:  # it runs nevertheless, and a part may say so too
            print(f"gpu_check: {each.what}; {each.fix}", file=sys.stderr)
        return None
    what = "; ".join(each.what for each in lacking) or f"{told_of(card, box)} cannot be used"
    return what, "; ".join(dict.fromkeys(each.fix for each in lacking)) or "see homeserve doctor"


def _commit() -> str:
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


# ------------------------------------------------------------------------------------------------------------ the parts


def _all_rows(options: argparse.Namespace, card: Card, seed: int) -> Iterator[Row]:
    """Of all parts, each printed as it comes."""
    size = "tiny" if options.tiny else "quick" if options.quick else "full"
    shares, most_s = SIZES[size]
    until = time.monotonic() + most_s
    for part in options.parts:
        left_s = until - time.monotonic() - GRACE_S - END_S
        job = Job(
            part, VENDORS[card.vendor], card.id, min(shares[part], left_s), size, seed,
            options.cases, options.types, options.torch, options.model,
        )  # fmt: skip
        if left_s < 1:
            found = [Row(part, "the whole part", ok=False, note=f"the {most_s:.0f} s of all parts are over")]
        else:
            found = numerics(job) if part == "numerics" else run(job).rows
        for row in found:
            print(line_of(row), flush=True)
            yield row


def _seed(commit: str) -> int:
    try:
        return int(commit[:8], 16)
    except ValueError:  # no commit is known
        return 1


@dataclass
class Outcome:
    """What a part's process said until it ended. `at`: what it had begun; `total`: cases that there are; `through`: it
    came to its end; else `why` it did not."""

    part: str
    rows: list[Row] = field(default_factory=list)
    cases: list[tuple[str, float, str]] = field(default_factory=list)
    at: str = ""
    total: int = 0
    through: bool = False
    why: str = ""

    def hear(self, line: str) -> None:
        told = json.loads(line)
        if "at" in told:
            self.at = told["at"]
        elif "case" in told:
            name, used, wrong = told["case"]
            self.cases.append((name, float(used), str(wrong)))
        elif "row" in told:
            self.rows.append(Row(**told["row"]))
        elif "cases" in told:
            self.total = int(told["cases"])
        elif "end" in told:
            self.through = True


def run(job: Job) -> Outcome:
    """A part, to its end or the end of its time. One that did not go through has a row that says so."""
    found = Outcome(job.part)
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "gpu_part.py"), job.as_json()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=_environment(os.environ),
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=_hear, args=(process.stdout, found), daemon=True)
        reader.start()
        late = _ended(process, job.seconds + GRACE_S)
        reader.join(END_S)
        if not reader.is_alive():  # else somebody who outlived the part has its output open
            process.stdout.close()
        errors.seek(0)
        said = errors.read().strip().splitlines()
    if not found.through or process.returncode:
        found.through = False
        found.why = f"not within {job.seconds:.0f} s" if late else _reason(process.returncode, said)
        if job.part != "numerics":
            found.rows.append(Row(job.part, found.at or "the whole part", ok=False, note=found.why))
    return found


def _hear(stdout: IO[str], found: Outcome) -> None:
    for line in stdout:
        if line.startswith("{"):
            found.hear(line)


def _ended(process: subprocess.Popen[str], limit_s: float) -> bool:
    """Waits for the end; ends it, with all that it started, where it takes too long: true then."""
    late = False
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        late = True
    finally:  # also where this process is told to end
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        with suppress(ProcessLookupError):  # servers of a part that died
            os.killpg(process.pid, signal.SIGTERM)
    return late


def _reason(code: int, said: Sequence[str]) -> str:
    last = said[-1][:400] if said else "it said nothing"
    return (
        last if code in (1, LOST) else f"its process ended with {'signal' if code < 0 else 'code'} {abs(code)}: {last}"
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """A part finds the modules beside it."""
    return {name: value for name, value in environ.items() if name != "PYTHONSAFEPATH"}


def numerics(job: Job) -> list[Row]:
    """All cases. One that ends the process (it loses the card, or hangs) is wrong, and the next process goes on behind
    it, as long as there is time."""
    tally, until, others = Tally(), time.monotonic() + job.seconds, []
    for _ in range(1 + RETRIES):
        found = run(replace(job, seconds=max(until - time.monotonic(), 1.0)))
        for name, used, wrong in found.cases:
            if wrong:
                tally.wrong[name] = wrong
            else:
                tally.used[name] = used
        job = replace(job, done=job.done + len(found.cases) + 1)
        tally.total = max(tally.total, found.total)
        if found.through:
            break
        if found.at in makers() and found.at not in {name for name, _, _ in found.cases}:
            tally.wrong[found.at] = found.why
        else:
            others.append(Row("numerics", found.at or "the whole part", ok=False, note=found.why))
            break
        if time.monotonic() > until:
            break
    return [*tally.rows(), *others]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.exit(main(sys.argv[1:]))
