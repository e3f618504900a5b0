"""That a tier's memory goes: every start sweeps what is left over, so another process may be the one to remove it."""

from __future__ import annotations

import time
from pathlib import Path

WAIT_S = 60.0  # a bound on a wait, not a claim about speed


def assert_goes(path: Path) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while path.exists():
        assert time.monotonic() < deadline_s, f"{path} stays"
        time.sleep(0.005)
