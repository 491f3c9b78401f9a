"""Runs every kernel test on every ISA level, and counts the cases of each: a level without cases is a failure.

A test that takes `level` runs once for each level that this CPU has, and through SIMDe for the AVX-512 levels that it
lacks. HOMESERVE_ISA leaves one level. SIMDe, and GPU kernels for their emulation, build before the first test, outside
of any test's time limit.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

# The test folders are no package (pytest's importlib mode); this one has modules of its own.
sys.path.insert(0, str(Path(__file__).parent))

import kernel_rig as rig
import kernel_sanitized as sanitized
import kernel_simde as simde
import simt_rig as simt

# Sanitizers of the CPU's library have nothing to see in emulated kernels, which bring their own.
collect_ignore_glob = ["test_gpu_*.py", "test_simt*.py"] if rig.SANITIZED else []

LEVELS = ("baseline", "avx2", "avx512", "avx512vnni")
_passed: pytest.StashKey[Counter[str]] = pytest.StashKey()
LEVEL = "level"
"""Property of a report that tells its level, wherever the test ran: a run may be spread over several processes."""


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_passed] = Counter()
    config.pluginmanager.register(Levels(config), "kernel levels")
    if rig.SANITIZED:
        sanitized.open_gaps()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "level" in metafunc.fixturenames:
        metafunc.parametrize("level", rig.tested_levels(), scope="session")


def pytest_collection_finish(session: pytest.Session) -> None:
    levels = {
        item.callspec.params.get("level")
        for item in session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    if any(str(level).startswith(rig.SIMDE) for level in levels):
        simde.libraries()
    _build_kernels(session)


def _build_kernels(session: pytest.Session) -> None:
    """All that test_simt_symbols.py runs, several at a time; what other tests load of it is then there."""
    modules = {item.module for item in session.items if isinstance(item, pytest.Function)}
    for module in modules:
        if module.__name__.endswith("test_simt_symbols") and simt.compiler() and not session.config.option.collectonly:
            simt.prepare(dict.fromkeys(module.wanted()))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> object:
    report = (yield).get_result()
    if report.when == "call" and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        level = item.callspec.params.get("level")
        if level is not None:
            report.user_properties.append((LEVEL, level))


class Levels:
    """Counts what passed on each level."""

    def __init__(self, config: pytest.Config) -> None:
        self._passed = config.stash[_passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._passed.update(value for name, value in report.user_properties if name == LEVEL)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    passed = config.stash[_passed]
    if not passed:
        return
    if rig.SANITIZED:
        terminalreporter.write_line(f"kernel cases under the sanitizers: {sum(passed.values())}")
        return
    terminalreporter.write_line("kernel cases: " + " ".join(f"{level}={passed[level]}" for level in LEVELS))
    emulated = [f"{level}={passed[rig.SIMDE + level]}" for level in simde.LEVELS]
    terminalreporter.write_line(f"kernel cases through SIMDe: {' '.join(emulated)}")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run of the whole folder in which a level of this CPU had no case is no success."""
    config = session.config
    passed = config.stash[_passed]
    options = config.option
    parts = options.keyword or options.collectonly or rig.SANITIZED or any("::" in each for each in config.args)
    if parts or hasattr(config, "workerinput") or not passed or session.exitstatus != pytest.ExitCode.OK:
        return
    missing = [level for level in rig.native_levels() if not passed[level]]
    if missing:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
