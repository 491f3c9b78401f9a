"""Runs the test tiers one after the other and says what happened; called by scripts/test inside its environment.

The rules it keeps
- Tests see the *installed* package: pytest's console script, `importlib` mode and PYTHONSAFEPATH keep the checkout off
  the import path, so a file that the wheel forgets fails here.
- A skip is a failure unless tests/allowed_skips.toml lists it for this tier with a reason; every skip is printed. On CI
  the list is shorter: what can be installed there must be.
- A tier that ran no test is a failure: an empty folder must not read as green.
- In `full`, every test that tests/claims.toml names must have run and passed, or been skipped as listed.
- Samples (hypothesis, mutants) take a seed made from the commit; it is printed, and HOMESERVE_TEST_SEED sets it.
"""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

FOLDERS = {
    "fast": ("contract", "unit"),
    "full": ("contract", "unit", "kernel", "process", "model", "flip", "server", "clients", "page"),
    "slow": ("contract", "unit", "kernel", "process", "model", "flip", "server", "clients", "page"),
}
FOLDER_LIMIT_S = {"fast": 600, "full": 2400, "slow": 3 * 3600}
"""The longest that one folder may take; a hang of pytest itself ends here."""
SPREAD = ("contract", "unit", "kernel", "model")
"""Folders whose tests run in two processes side by side: they start few others and measure nothing. All else has the
machine to itself."""
MUTANT_SAMPLE = 3
"""Mutants tried by `full`; `mutants` tries them all."""


@dataclass
class Outcome:
    """One tier's line in the summary."""

    name: str
    seconds: float
    ok: bool
    why: str = ""
    counts: dict[str, int] = field(default_factory=dict)


@dataclass
class Run:
    """Everything that the tiers reported: test id -> outcome, and (id, reason) of every skip."""

    results: dict[str, str] = field(default_factory=dict)
    skips: list[tuple[str, str]] = field(default_factory=list)


def main(argv: list[str]) -> int:
    tier, extra = argv[0], argv[1:]
    seed = int(os.environ.get("HOMESERVE_TEST_SEED") or commit()[:8] or "0", 16)
    print(f"tier {tier}, seed {seed:x} (HOMESERVE_TEST_SEED={seed:x} repeats it)", flush=True)
    if tier == "mutants":
        return mutants(seed, None, extra)
    if tier == "soak":
        return soak(seed, extra)
    return run_tier(tier, seed, extra)


def run_tier(tier: str, seed: int, extra: list[str]) -> int:
    run = Run()
    outcomes = [check()] if tier != "fast" else []
    outcomes += [run_folder(folder, tier, seed, extra, run) for folder in FOLDERS[tier]]
    if tier == "full" and not extra:
        started = time.monotonic()
        code = mutants(seed, MUTANT_SAMPLE)
        outcomes.append(Outcome("mutants", time.monotonic() - started, code == 0))
    if not extra:
        outcomes.append(judge_skips(tier, run))
        if tier != "fast":
            outcomes.append(judge_claims(tier, run))
    return summary(tier, outcomes)


def check() -> Outcome:
    started = time.monotonic()
    code = subprocess.run([str(ROOT / "scripts" / "check")], check=False).returncode
    return Outcome("check", time.monotonic() - started, code == 0)


def run_folder(folder: str, tier: str, seed: int, extra: list[str], run: Run) -> Outcome:
    """pytest over tests/FOLDER in its own process, its output passed through."""
    print(f"\n── {folder}", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="homeserve-tier-") as scratch:
        report = Path(scratch) / "report.json"
        env = dict(os.environ, PYTHONSAFEPATH="1", HOMESERVE_TEST_REPORT=str(report), HOMESERVE_TEST_TIER=tier)
        env["HOMESERVE_TEST_SEED"] = f"{seed:x}"
        env["PATH"] = f"{BIN}{os.pathsep}{env.get('PATH', '')}"
        env.pop("PYTHONPATH", None)
        command = [str(BIN / "pytest"), f"tests/{folder}", f"--hypothesis-seed={seed}", "--durations=5", "-q", *extra]
        if folder in SPREAD and not extra:
            command.append("--numprocesses=2")
            env |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), "1")
        try:
            code = subprocess.run(command, cwd=ROOT, env=env, timeout=FOLDER_LIMIT_S[tier], check=False).returncode
        except subprocess.TimeoutExpired:
            return Outcome(folder, time.monotonic() - started, False, f"over {FOLDER_LIMIT_S[tier]} s")
        data = json.loads(report.read_text()) if report.exists() else {"results": {}, "skips": []}
    run.results.update(data["results"])
    run.skips += [(test, reason) for test, reason in data["skips"]]
    counts: dict[str, int] = {}
    for result in data["results"].values():
        counts[result] = counts.get(result, 0) + 1
    why = {0: "", 1: "tests failed", 5: "ran no test"}.get(code, f"pytest exit {code}")
    return Outcome(folder, time.monotonic() - started, code == 0, why, counts)


def judge_skips(tier: str, run: Run) -> Outcome:
    """Every skip must be listed; every one is printed."""
    unlisted = []
    if run.skips:
        print("\n── skips")
    for test, reason in run.skips:
        allowed = may_skip(test, tier)
        print(f"   {'allowed' if allowed else 'NOT LISTED'}: {test}: {reason}")
        if not allowed:
            unlisted.append(test)
    return Outcome("skips", 0, not unlisted, f"{len(unlisted)} not in tests/allowed_skips.toml" if unlisted else "")


def may_skip(test: str, tier: str) -> bool:
    listed = tomllib.loads((ROOT / "tests" / "allowed_skips.toml").read_text()).get("skip", [])
    on_ci = bool(os.environ.get("CI"))
    return any(
        fnmatch.fnmatchcase(test, entry["test"]) and tier in entry["tiers"] and (not on_ci or entry.get("ci", False))
        for entry in listed
    )


def judge_claims(tier: str, run: Run) -> Outcome:
    """Every test that a claim names ran and passed; a claim on a parametrised test needs all of its cases."""
    claims = tomllib.loads((ROOT / "tests" / "claims.toml").read_text()).get("claim", [])
    broken = set()
    for test in {test for claim in claims for test in claim.get("tests", [])}:
        cases = {name: result for name, result in run.results.items() if name == test or name.startswith(f"{test}[")}
        if not cases or any(
            result != "passed" and not (result == "skipped" and may_skip(name, tier)) for name, result in cases.items()
        ):
            broken.add(test)
    for test in sorted(broken):
        print(f"   a claim rests on a test that did not pass: {test}")
    return Outcome("claims", 0, not broken, f"{len(broken)} tests did not pass" if broken else "")


def summary(tier: str, outcomes: list[Outcome]) -> int:
    print(f"\n── summary of {tier}")
    total = {"passed": 0, "failed": 0, "skipped": 0}
    for outcome in outcomes:
        counts = ", ".join(f"{count} {name}" for name, count in sorted(outcome.counts.items()))
        verdict = "ok" if outcome.ok else f"FAILED {outcome.why}".rstrip()
        print(f"   {outcome.name:<9} {outcome.seconds:7.1f} s  {verdict}{'  (' + counts + ')' if counts else ''}")
        for name in total:
            total[name] += outcome.counts.get(name, 0)
    print(f"   {'in all':<9} {sum(outcome.seconds for outcome in outcomes):7.1f} s")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped", flush=True)
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def mutants(seed: int, sample: int | None, extra: Sequence[str] = ()) -> int:
    print("\n── mutants", flush=True)
    command = [sys.executable, str(ROOT / "scripts" / "mutants.py"), "--seed", str(seed)]
    if sample is not None:
        command += ["--sample", str(sample)]
    return subprocess.run([*command, *extra], check=False).returncode


def soak(seed: int, extra: list[str]) -> int:
    """`slow` again and again with new seeds, for HOMESERVE_TEST_SOAK_MINUTES (480) or to the first failure."""
    ends = time.monotonic() + 60 * float(os.environ.get("HOMESERVE_TEST_SOAK_MINUTES") or 480)
    rounds = 0
    while True:
        rounds += 1
        print(f"\n══ soak, round {rounds}, seed {seed:x}", flush=True)
        code = run_tier("slow", seed, extra)
        if code or time.monotonic() >= ends:
            return code
        seed = (seed * 1103515245 + 12345) % 2**32


def commit() -> str:
    """The commit's hash, or an empty string outside a git checkout."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
