"""docs/cases.md says for every case which test shows it, or why it cannot apply; the tests are there and name it."""

from __future__ import annotations

import ast
import json
import os
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "cases.md"
SHARED = Path(os.environ.get("KVBATON_SHARED", ROOT.parent / "shared"))
ROW = re.compile(r"^\| ([A-Z]{2}-\d\d) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NUM_CASES = 105


def rows() -> dict[str, str]:
    found = [(case, how) for case, _, how in ROW.findall(PAGE.read_text())]
    assert len(found) == len(dict(found)), "a case is listed twice"
    return dict(found)


@cache
def source_of(path: str, name: str) -> str | None:
    """A test with its decorators; None if there is no such test."""
    text = (ROOT / path).read_text() if (ROOT / path).is_file() else ""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            return "\n".join(text.splitlines()[start - 1 : node.end_lineno])
    return None


def test_every_case_is_in_the_table() -> None:
    assert len(rows()) == NUM_CASES
    cases = SHARED / "cases" / "cases.jsonl"
    if not cases.is_file():
        pytest.skip("the shared data is not beside the repository (KVBATON_SHARED)")
    assert list(rows()) == [json.loads(line)["id"] for line in cases.read_text().splitlines()]


def test_every_case_has_a_test_that_names_it_or_a_reason() -> None:
    wrong = []
    for case, how in rows().items():
        references = REFERENCE.findall(how)
        if not references and not how.startswith("cannot apply: "):
            wrong.append(f"{case}: neither a test nor a reason")
        for path, name in references:
            source = source_of(path, name)
            if source is None:
                wrong.append(f"{case}: there is no {path}::{name}")
            elif case not in source and case.lower().replace("-", "_") not in source:
                wrong.append(f"{case}: {path}::{name} does not name it")
    assert not wrong, "\n".join(wrong)


def summary() -> str:
    """What docs/reliability.md counts: ``python tests/test_cases.py``."""
    how = rows().values()
    tests = {reference for each in how for reference in REFERENCE.findall(each)}
    missing = sum(each.startswith("cannot apply: ") for each in how)
    return f"{len(how)} cases: {len(how) - missing} are shown by {len(tests)} tests, {missing} cannot apply"


def test_few_cases_cannot_apply() -> None:
    """A reason is no way out: it is for what kvbaton does not have at all."""
    assert sum(how.startswith("cannot apply: ") for how in rows().values()) <= 1


if __name__ == "__main__":
    print(summary())
