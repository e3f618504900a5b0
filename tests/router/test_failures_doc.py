"""docs/failures.md against the tests: every row is shown by tests that exist, every test of failures is in a row."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
TEXT = (HERE.parents[1] / "docs" / "failures.md").read_text()
NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")
# What the doc owes an answer for, whatever else it has.
OWED = (
    "prefill dies before prefill",
    "prefill dies during prefill",
    "prefill dies after prefill",
    "transfer cut",
    "transfer stalled",
    "transfer corrupted",
    "transfer partial",
    "decode dies before admission",
    "decode dies after the first token",
    "decode dies mid-stream",
    "decode pool gone while prefill is healthy",
    "prefill pool gone",
    "router restarted",
    "worker restarted at the same address",
    "stale lease",
    "slow worker",
    "clock jump",
    "partition of one direction",
)


def rows() -> list[list[str]]:
    """The tables of failures; not that of words."""
    found = []
    for line in TEXT.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and len(cells) == 5 and cells[0] != "failure" and not set(cells[0]) <= {"-"}:
            found.append(cells)
    return found


def functions(path: Path) -> set[str]:
    return set(re.findall(r"^(?:async )?def (\w+)\(", path.read_text(), re.MULTILINE))


def test_every_row_is_shown_by_tests_that_exist() -> None:
    assert len(rows()) > 25
    for row in rows():
        named = NAMED.findall(row[-1])
        assert named, f"{row[0]}: no test is named"
        assert re.sub(NAMED, "", row[-1]).strip(", ") == "", f"{row[0]}: {row[-1]}"
        for file, name in named:
            assert name in functions(HERE / file), f"{row[0]}: {file} has no {name}"


def test_every_failure_that_is_owed_an_answer_has_a_row() -> None:
    first_cells = [row[0] for row in rows()]
    for failure in OWED:
        assert any(cell.startswith(failure) for cell in first_cells), failure


def test_every_test_of_failures_is_in_a_row() -> None:
    named = set(NAMED.findall(TEXT))
    for path in sorted(HERE.glob("test_failures_*.py")):
        if path.name == Path(__file__).name:
            continue
        for name in sorted(functions(path)):
            if name.startswith("test_"):
                assert (path.name, name) in named, f"{path.name}::{name} is in no row of docs/failures.md"
