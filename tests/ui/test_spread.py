"""Percentiles and shares out of histogram counts."""

from __future__ import annotations

import pytest

from kvbaton.observe.metric import SECONDS
from kvbaton.observe.metrics import Metrics
from kvbaton.ui.spread import quantile, share_below, since, spread

BOUNDS = (1.0, 2.0, 4.0)


def test_a_quantile_lies_evenly_within_its_bucket() -> None:
    counts = [0, 10, 10, 0]
    assert quantile(BOUNDS, counts, 0.25) == 1.5
    assert quantile(BOUNDS, counts, 0.5) == 2.0
    assert quantile(BOUNDS, counts, 0.75) == 3.0


def test_above_the_last_bound_nothing_is_known_but_that() -> None:
    assert quantile(BOUNDS, [0, 0, 0, 5], 0.5) == 4.0
    assert share_below(BOUNDS, [0, 0, 0, 5], 100.0) == 0.0


@pytest.mark.parametrize(
    ("gate_s", "share"), [(0.5, 0.25), (1.0, 0.5), (1.5, 0.5), (3.0, 0.75), (4.0, 1.0), (9.0, 1.0)]
)
def test_the_share_within_a_gate(gate_s: float, share: float) -> None:
    assert share_below(BOUNDS, [2, 0, 2, 0], gate_s) == share


def test_nothing_counted_is_no_spread() -> None:
    assert spread(BOUNDS, [0, 0, 0, 0]) is None


def test_what_the_metrics_counted_in_between() -> None:
    metrics = Metrics("router")
    metrics.observe("kvbaton_router_ttft_seconds", "remote", value=0.03)
    before = metrics.counts("kvbaton_router_ttft_seconds")
    for reason, value in (("remote", 0.3), ("local_short", 0.4), ("local_short", 0.45)):
        metrics.observe("kvbaton_router_ttft_seconds", reason, value=value)
    found = spread(SECONDS, since(metrics.counts("kvbaton_router_ttft_seconds"), before), 0.5)
    assert found is not None
    assert (found.num, found.met) == (3, 1.0)
    assert 0.25 < found.p50_s < found.p90_s < found.p99_s <= 0.5  # all of one bucket, whatever the reason
