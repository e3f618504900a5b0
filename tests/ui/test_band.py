"""The planned band of the prompt:output ratio."""

from __future__ import annotations

import pytest

from kvbaton.types import LocalError
from kvbaton.ui.band import Band, read_band


def test_a_band_is_two_numbers() -> None:
    assert read_band(" 2, 8.5 ") == Band(2.0, 8.5)
    assert read_band("") is None


@pytest.mark.parametrize("text", ["2", "2,8,9", "low,high", "8,2", "-1,2", "3,3", "1,inf", "nan,2"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(LocalError) as caught:
        read_band(text)
    assert caught.value.field == "plan_band" and text in str(caught.value)


@pytest.mark.parametrize(
    ("ratio", "place"), [(None, "unknown"), (1.9, "below"), (2.0, "inside"), (8.0, "inside"), (8.1, "above")]
)
def test_where_traffic_lies(ratio: float | None, place: str) -> None:
    assert Band(2.0, 8.0).place(ratio) == place
