"""Breaks the code on purpose and sees the test that guards it go red; called by scripts/test.

tests/mutants/mutants.toml lists `[[mutant]] patch, test, timeout_s`. Each patch is applied to a fresh copy of the
checkout (with the native libraries of the installed package beside it, or built anew where the patch touches native
code), and its test runs there. *Red* is pytest's exit 1 and nothing else: a test that cannot be collected proves
nothing, so that counts as broken, like a patch that no longer applies.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
TREES = ("homeserve", "backends", "budget", "cuda_kernels", "hip_kernels", "scripts", "tests", "docs")
FILES = ("pyproject.toml", "CMakeLists.txt", "README.md", "LICENSE")
COMPILED = (".cpp", ".cc", ".c", ".h", ".hpp", ".cu", ".hip", "CMakeLists.txt")
NATIVE = ("backends/cpu/native/", "backends/host/native/", "CMakeLists.txt")
"""What the native libraries are built from. Device code and its emulation are compiled by their tests."""
QUICK_S = 120
"""Of a sample: the longest that a mutant's test may take; and nothing is compiled for it, which takes minutes."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="try this many, drawn by the seed from those that are quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-k", metavar="WORD", default="", help="only those whose patch or test has this in its name")
    parser.add_argument("names", nargs="*", help="only these patches")
    options = parser.parse_args()
    chosen = choose(options.names, options.sample, options.seed, options.k)
    counts = {"red": 0, "green": 0, "hung": 0, "broken": 0}
    for mutant in chosen:
        started = time.monotonic()
        verdict, words = try_mutant(mutant)
        counts[verdict] += 1
        print(
            f"   {verdict:<6} {mutant['patch']:<44} {time.monotonic() - started:6.1f} s  {mutant['test']}", flush=True
        )
        if verdict != "red":
            print("\n".join(f"      {line}" for line in words.strip().splitlines()[-25:]), flush=True)
    broken = f", {counts['broken']} broken" if counts["broken"] else ""
    print(f"{counts['red']} red, {counts['green']} green, {counts['hung']} hung{broken}", flush=True)
    return 0 if chosen and counts["red"] == len(chosen) else 1


def choose(names: list[str], sample: int | None, seed: int, word: str = "") -> list[dict[str, object]]:
    mutants = tomllib.loads((ROOT / "tests" / "mutants" / "mutants.toml").read_text()).get("mutant", [])
    mutants = [mutant for mutant in mutants if word in mutant["patch"] or word in mutant["test"]]
    if names:
        return [mutant for mutant in mutants if mutant["patch"] in names or Path(mutant["patch"]).stem in names]
    if sample is None:
        return list(mutants)
    quick = [mutant for mutant in mutants if float(str(mutant["timeout_s"])) <= QUICK_S and not compiles(mutant)]
    return random.Random(seed).sample(quick, min(sample, len(quick)))


def compiles(mutant: dict[str, object]) -> bool:
    """Whether anything has to be compiled before its test can run, or by it."""
    return any(name.endswith(COMPILED) for name in touched(mutant))


def needs_build(mutant: dict[str, object]) -> bool:
    """Whether the native libraries have to be built again."""
    return any(name.startswith(NATIVE) for name in touched(mutant))


def touched(mutant: dict[str, object]) -> list[str]:
    patch = ROOT / "tests" / "mutants" / str(mutant["patch"])
    return [line[6:] for line in patch.read_text().splitlines() if line.startswith("+++ b/")]


def try_mutant(mutant: dict[str, object]) -> tuple[str, str]:
    """(verdict, what pytest or git said)."""
    patch = ROOT / "tests" / "mutants" / str(mutant["patch"])
    with tempfile.TemporaryDirectory(prefix="homeserve-mutant-") as scratch:
        copy = Path(scratch)
        copy_tree(copy)
        # Outside any repository, `git apply` is a strict patch: no fuzz, all hunks or none.
        done = run(["git", "apply", "--unsafe-paths", "--whitespace=nowarn", str(patch)], copy, 60)
        if done is None or done[0] != 0:
            return "broken", f"the patch does not apply:\n{done[1] if done else 'git hung'}"
        if needs_build(mutant):
            built = build(copy)
            if built is None or built[0] != 0:
                return "broken", f"the mutant does not compile:\n{built[1] if built else 'the build hung'}"
        command = [str(BIN / "pytest"), "-q", "-x", "-rfE", "-p", "no:cacheprovider", str(mutant["test"])]
        done = run(command, copy, float(str(mutant["timeout_s"])))
    if done is None:
        return "hung", f"no verdict after {mutant['timeout_s']} s"
    if done[0] == 1 and not re.search(r"^(FAILED|ERROR) ", done[1], flags=re.MULTILINE):
        return "broken", f"the run failed, but no test did:\n{done[1]}"
    return {0: "green", 1: "red"}.get(done[0], "broken"), done[1]


def copy_tree(copy: Path) -> None:
    """The working tree, and the installed native libraries where the tree has none."""
    ignore = shutil.ignore_patterns("__pycache__", "*.so", "*.dylib")
    for name in TREES:
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    for name in FILES:
        shutil.copy2(ROOT / name, copy / name)
    where = "import importlib.util as u; print(list(u.find_spec('backends').submodule_search_locations)[0])"
    found = subprocess.run(
        [sys.executable, "-P", "-c", where], capture_output=True, text=True, check=True, cwd=copy, timeout=60
    )
    for folder in ("cpu", "host"):
        libraries = Path(found.stdout.strip()) / folder / "lib"
        if libraries.is_dir():
            shutil.copytree(libraries, copy / "backends" / folder / "lib", dirs_exist_ok=True)


def build(copy: Path) -> tuple[int, str] | None:
    """Compile the native libraries of the copy into the copy."""
    steps = (
        ["cmake", "-S", ".", "-B", "build/native", "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"],
        ["cmake", "--build", "build/native"],
        ["cmake", "--install", "build/native", "--prefix", "."],
    )
    done: tuple[int, str] | None = (0, "")
    for step in steps:
        done = run(step, copy, 900)
        if done is None or done[0] != 0:
            break
    return done


def run(command: list[str], cwd: Path, timeout_s: float) -> tuple[int, str] | None:
    """(exit code, output), or None after the time: then the whole process group is killed."""
    env = dict(os.environ, PYTHONPATH=str(cwd), PYTHONSAFEPATH="1", PATH=f"{BIN}{os.pathsep}{os.environ['PATH']}")
    env.pop("HOMESERVE_TEST_REPORT", None)
    child = subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        return None
    return child.returncode, output


if __name__ == "__main__":
    sys.exit(main())
