"""What a checkout of advisories says of installed packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.advisories import advisories_for, is_affected, normalized


def span(*events: tuple[str, str]) -> list[dict[str, object]]:
    return [{"ranges": [{"type": "ECOSYSTEM", "events": [{kind: bound} for kind, bound in events]}], "versions": []}]


@pytest.mark.parametrize(
    ("version", "affected", "expected"),
    [
        ("1.10", span(("introduced", "0"), ("fixed", "1.9")), False),
        ("1.8", span(("introduced", "0"), ("fixed", "1.9")), True),
        ("1.9", span(("introduced", "1.9"), ("last_affected", "1.9")), True),
        ("1.9.1", span(("introduced", "1.9"), ("last_affected", "1.9")), False),
        ("2.5", span(("introduced", "0"), ("fixed", "1"), ("introduced", "2"), ("fixed", "3")), True),
        ("1.5", span(("fixed", "1"), ("introduced", "0"), ("fixed", "3"), ("introduced", "2")), False),
        ("2", span(("introduced", "0"), ("fixed", "2"), ("introduced", "2")), True),
        ("no version", span(("introduced", "0"), ("fixed", "1")), True),
        ("1.0", [{"versions": ["0.9", "1.0"]}], True),
        ("1.0", [{"ranges": [{"type": "GIT", "events": [{"introduced": "0"}]}]}], False),
    ],
)
def test_which_versions_are_affected(version: str, affected: list[dict[str, object]], expected: bool) -> None:
    assert is_affected(version, affected) == expected


def test_a_checkout_is_read_and_dated(tmp_path: Path) -> None:
    for name, text in (
        ("a-b", "id: X-1\npublished: 2024-01-02T03:04:05Z\naffected: [{versions: ['1.0']}]\n"),
        ("a-b2", "id: X-2\nmodified: 2024-05-06T00:00:00Z\naffected: [{versions: ['1.0']}]\n"),
        (
            "c",
            "id: X-3\npublished: 2023-01-01T00:00:00Z\nwithdrawn: 2023-02-01T00:00:00Z\naffected: []\n",
        ),
    ):
        (tmp_path / "vulns" / name).mkdir(parents=True)
        (tmp_path / "vulns" / name / "X.yaml").write_text(text)
    found = advisories_for({normalized("A_b"): "1.0", "c": "1"}, tmp_path)
    assert found == (["a-b 1.0: X-1"], "2024-05-06")
