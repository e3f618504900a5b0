"""Shared data of the planner's tests: read where it lies, skipped with the reason where it does not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture
def shared() -> Callable[[str], Path]:
    """``shared("distserve")``: that folder of the shared data."""
    root = Path(os.environ.get("KVBATON_SHARED") or REPOSITORY.parent / "shared") / "data"

    def find(name: str) -> Path:
        path = root / name
        if not path.exists():
            pytest.skip(f"needs the shared data file {path} (set KVBATON_SHARED)")
        return path

    return find
