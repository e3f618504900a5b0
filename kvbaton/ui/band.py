"""The band of the prompt:output ratio that a plan was made for, and where the traffic lies in it.

The ratio is computed prompt tokens (those no prefix cache had) for each output token, as in the alert rules. Pure.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbaton.types import LocalError

Place = Literal["inside", "above", "below", "unknown"]


class Band(msgspec.Struct, frozen=True):
    low: float
    high: float

    def place(self, ratio: float | None) -> Place:
        if ratio is None:
            return "unknown"
        return "above" if ratio > self.high else "below" if ratio < self.low else "inside"


def read_band(text: str) -> Band | None:
    """``LOW,HIGH``; empty: there is no plan."""
    if not text.strip():
        return None
    fix = "give two numbers such as 2,8: computed prompt tokens for each output token"
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise LocalError(f"plan_band {text!r} is not LOW,HIGH", field="plan_band", fix=fix) from None
    if not 0 <= low < high < float("inf"):
        raise LocalError(f"plan_band {text!r} is no band", field="plan_band", fix=fix)
    return Band(low, high)
