"""docs/security.md names a test for every threat, and every test of security is named there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "security.md"
NAMED = re.compile(r"`(tests/[a-z_/]+\.py)::(test_\w+)`")
OWN = ("test_security*.py", "test_auth*.py", "test_upgrade*.py")


def names_in(path: Path) -> set[str]:
    found = ast.walk(ast.parse(path.read_text()))
    return {
        node.name
        for node in found
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def named() -> set[tuple[str, str]]:
    return set(NAMED.findall(PAGE.read_text()))


def test_every_test_that_is_named_exists() -> None:
    assert len(named()) > 60
    assert not [f"{file}::{name}" for file, name in sorted(named()) if name not in names_in(ROOT / file)]


def test_every_test_of_security_is_named() -> None:
    files = sorted(path for pattern in OWN for path in (ROOT / "tests").rglob(pattern))
    assert len(files) >= 10
    there = {(str(path.relative_to(ROOT)), name) for path in files for name in names_in(path)}
    unnamed = there - named() - {("tests/test_security_doc.py", name) for name in names_in(Path(__file__))}
    assert not sorted(f"`{file}::{name}`" for file, name in unnamed)


def test_every_threat_has_a_test() -> None:
    """A row of a table of threats without one is a claim."""
    text = PAGE.read_text()
    begin, end = text.index("## Threats"), text.index("## Bounds")
    rows = [line for line in text[begin:end].splitlines() if line.startswith("| ") and not line.startswith("| threat")]
    assert len(rows) >= 30
    assert not [row for row in rows if not NAMED.search(row)]
