"""tests/claims.toml, tests/allowed_skips.toml and mutants.toml name only what exists and runs.

Ids are looked up in the syntax tree, not collected: the contract holds without the oracles' packages. That each of them
also *passed* is checked by scripts/tiers.py, which has the outcomes.
"""

from __future__ import annotations

import ast
import functools
import runpy
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"

FOLDERS: dict[str, tuple[str, ...]] = runpy.run_path(str(ROOT / "scripts" / "tiers.py"))["FOLDERS"]


def read(name: str) -> dict[str, Any]:
    return tomllib.loads((TESTS / name).read_text())


@functools.cache
def functions(path: Path) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """Test functions of a file, those in classes as `Class::test`; also those that it has from a file beside it."""
    found: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = {}
    for node in ast.parse(path.read_text()).body:
        beside = path.parent / f"{node.module}.py" if isinstance(node, ast.ImportFrom) else path
        if isinstance(node, ast.ImportFrom) and beside.is_file():
            there = functions(beside)
            found.update({each.name: there[each.name] for each in node.names if each.name in there})
        if isinstance(node, ast.ClassDef):
            members = [(f"{node.name}::", member) for member in node.body]
        else:
            members = [("", node)]
        for prefix, member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test"):
                found[prefix + member.name] = member
    return found


def problem_of(test: str) -> str:
    """What is wrong with a test id; empty when it names a test that runs in a tier."""
    file, _, name = test.partition("::")
    path = ROOT / file
    if not path.is_file():
        return f"{test}: no such file"
    if path.relative_to(TESTS).parts[0] not in FOLDERS["full"]:
        return f"{test}: runs in no tier"
    function = functions(path).get(name.partition("[")[0])
    if function is None:
        return f"{test}: no such test"
    if any("skip" in ast.unparse(decorator) for decorator in function.decorator_list):
        return f"{test}: is skipped"
    return ""


def test_every_claim_rests_on_tests_or_records_that_exist() -> None:
    problems = []
    for claim in read("claims.toml")["claim"]:
        assert claim["says"].strip()
        tests, records = claim.get("tests", []), claim.get("records", [])
        if not tests and not records:
            problems.append(f"{claim['says']}: nothing holds it")
        problems += filter(None, map(problem_of, tests))
        problems += [f"{record}: no such record" for record in records if not (ROOT / record).is_file()]
    assert not problems


def test_every_mutant_of_a_claim_exists() -> None:
    known = {mutant["patch"] for mutant in read("mutants/mutants.toml").get("mutant", [])}
    named = {mutant for claim in read("claims.toml")["claim"] for mutant in claim.get("mutants", [])}
    assert named <= known


def test_every_mutant_has_a_patch_and_a_test_and_every_patch_is_listed() -> None:
    mutants = read("mutants/mutants.toml").get("mutant", [])
    assert not [problem for mutant in mutants if (problem := problem_of(mutant["test"]))]
    assert all(0 < mutant["timeout_s"] <= 600 for mutant in mutants)
    assert {mutant["patch"] for mutant in mutants} == {path.name for path in (TESTS / "mutants").glob("*.patch")}


def test_every_allowed_skip_has_a_reason_and_a_tier() -> None:
    for skip in read("allowed_skips.toml")["skip"]:
        assert skip["test"].startswith("tests/")
        assert skip["reason"].strip()
        assert set(skip["tiers"]) <= set(FOLDERS)


def test_a_wrong_id_is_seen() -> None:
    assert "no such file" in problem_of("tests/unit/test_of_nothing.py::test_it")
    assert "no such test" in problem_of("tests/contract/test_claims.py::test_of_nothing")
    assert problem_of("tests/contract/test_claims.py::test_a_wrong_id_is_seen") == ""
