"""The prompt:output ratio: its planned band, and the gauges that say how far the traffic has left it."""

from __future__ import annotations

import pytest

from kvbaton.observe.metrics import Metrics
from kvbaton.observe.ratio import WINDOW_S, Band, RatioGauges, read_band
from kvbaton.types import LocalError


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


def count(metrics: Metrics, prompt: float, cached: float, output: float) -> None:
    for what, amount in (("prompt", prompt), ("cached", cached), ("output", output)):
        metrics.add(f"kvbaton_router_{what}_tokens_total", amount=amount)


def test_the_gauges_follow_the_traffic_out_of_the_band_and_back() -> None:
    metrics, gauges = Metrics("router"), RatioGauges(Band(2.0, 8.0))

    def value(name: str) -> float | None:
        return metrics.values(f"kvbaton_router_{name}").get(())

    def after(ratio: float, now_s: float) -> tuple[float | None, float | None]:
        count(metrics, 2 * ratio * 1000.0, ratio * 1000.0, 1000.0)  # half of the prompt was cached
        gauges.export(metrics, now_s)
        return value("prompt_output_ratio"), value("plan_drift")

    assert after(4.0, 0.0) == (None, None), "one look is no rate"
    assert after(4.0, 60.0) == (4.0, 1.0)
    assert after(16.0, 60.0 + 2 * WINDOW_S) == (16.0, 2.0), "what was before the window is forgotten"
    assert after(1.0, 60.0 + 4 * WINDOW_S) == (1.0, 0.5)
    gauges.export(metrics, 60.0 + 6 * WINDOW_S)
    assert (value("prompt_output_ratio"), value("plan_drift")) == (None, None), "no traffic, no ratio"
    assert metrics.values("kvbaton_router_plan_ratio") == {("low",): 2.0, ("high",): 8.0}


def test_without_a_plan_there_is_a_ratio_but_no_drift() -> None:
    metrics, gauges = Metrics("router"), RatioGauges(None)
    gauges.export(metrics, 0.0)
    count(metrics, 3000.0, 0.0, 1000.0)
    gauges.export(metrics, 5.0)
    assert metrics.values("kvbaton_router_prompt_output_ratio") == {(): 3.0}
    text = metrics.exposition().decode()
    assert "\nkvbaton_router_plan_drift " not in text and "\nkvbaton_router_plan_ratio{" not in text


def test_scrapers_however_many_keep_the_window_small() -> None:
    metrics, gauges = Metrics("router"), RatioGauges(None)
    for look in range(20_000):
        gauges.export(metrics, look * 0.05)
    assert len(gauges.seen) <= WINDOW_S + 2
