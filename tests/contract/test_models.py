"""Families live in homeserve/models alone, and the documents about them say what is so."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from homeserve.models import registry

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs/MODELS.md").read_text().partition("<!-- families -->")[2].partition("<!-- end")[0]
GUIDE = (ROOT / "docs/ADD_A_MODEL.md").read_text()

NOT_ARCHITECTURES = {
    "homeserve/text/vocabulary.py": {"llama", "gemma4"},
    "homeserve/text/assembly.py": {"llama", "gemma4"},
    "homeserve/text/tokenizer.py": {"llama", "gemma4"},
    "homeserve/text/token_cache.py": {"llama", "gemma4"},
}
"""Words that are values of `tokenizer.ggml.model`: kinds of vocabularies, which happen to be called like a model."""
PRE_TYPES = "homeserve/text/pretokenizers.py"
"""Its words are values of `tokenizer.ggml.pre`."""


def rows() -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()[2:]]


def named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def strings(text: str) -> Iterator[tuple[int, str]]:
    """Every string of a module that is no documentation."""
    tree = ast.parse(text)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def violations(path: str, text: str) -> list[str]:
    names = set(registry.known()) | set(registry.folder_families())
    names -= NOT_ARCHITECTURES.get(path, set())
    return [f"{path}:{line}: {value!r}" for line, value in strings(text) if value in names]


def test_no_architecture_is_named_outside_the_models() -> None:
    found = []
    for package in ("homeserve", "backends", "budget"):
        for path in sorted((ROOT / package).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if not relative.startswith("homeserve/models/") and relative != PRE_TYPES:
                found += violations(relative, path.read_text())
    assert not found


@pytest.mark.parametrize("line", ['if arch == "qwen35":', "match arch:\n    case 'gpt_oss':", 'TABLE = {"gemma3": 1}'])
def test_a_planted_name_is_found(line: str) -> None:
    text = f'"""Speaks of qwen35 and gemma3."""\n{line}' + ("\n    pass" if line.endswith(":") else "")
    text = text.replace("case 'gpt_oss':\n    pass", "case 'gpt_oss':\n        pass")
    assert len(violations("homeserve/engine/made.py", text)) == 1


def test_the_table_of_models_is_the_registry() -> None:
    assert [name for row in rows() for name in named(row[0])] == list(registry.known())
    folders = registry.folder_families()
    assert {name for row in rows() for name in named(row[1])} == set(folders)
    for row in rows():
        (arch,) = named(row[0])
        assert {folders[name].arch for name in named(row[1])} <= {arch}


def test_every_family_says_what_it_was_verified_against() -> None:
    """`files of others` where a checkpoint of others with logits is tested, `models of the tests` likewise."""
    of_others = (ROOT / "tests/model/test_families.py").read_text()
    of_tests = (ROOT / "tests/model/tiny_models.py").read_text()
    for row in rows():
        said = {
            "files of others": any(f'"{name}"' in of_others for name in named(row[1])),
            "models of the tests": any(f'    "{name}": _tiny(' in of_tests for name in named(row[1])),
        }
        assert row[3] == (", ".join(words for words, true in said.items() if true) or "unverified"), row[0]


def test_every_family_has_golden_plans() -> None:
    golden = ROOT / "tests/data/golden"
    for arch in registry.known():
        assert json.loads((golden / f"{arch}.json").read_text())


def test_the_guide_shows_the_file_that_is_there() -> None:
    (shown,) = re.findall(r"```python\n(\"\"\".*?)```", GUIDE, flags=re.DOTALL)
    assert shown == (ROOT / "homeserve/models/qwen3.py").read_text()
    assert f'    "qwen3": "{registry.MODULES["qwen3"]}",' in GUIDE


def test_the_guide_names_files_that_exist() -> None:
    for path in re.findall(r"`((?:homeserve|backends|tests)/[^`]+)`", GUIDE):
        assert (ROOT / path).exists(), path
