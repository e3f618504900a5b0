"""The goodput search on servers with a known limit, with noise and without; costs by their closed form."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.bench.cost import Fleet, cost_of
from kvbaton.bench.goodput import GoodputSearch, fewest_requests
from kvbaton.bench.goodput_run import trial_at
from kvbaton.bench.stats import wilson
from kvbaton.bench.workload import LoadSpec
from kvbaton.types import LocalError


def search(limit_per_s: float, requests: int, random: Random, start: float = 1.0, noise: float = 0.0) -> GoodputSearch:
    """A server where the share in both gates is 0.98 up to the limit and falls steeply beyond it."""
    found = GoodputSearch(0.9, start, max_trials=40)
    while (rate := found.next_rate()) is not None:
        truth = 0.98 if rate <= limit_per_s else max(0.0, 0.85 - (rate / limit_per_s - 1))
        truth = min(1.0, max(0.0, truth + random.uniform(-noise, noise)))
        met = sum(random.random() < truth for _ in range(requests))
        found.record(rate, met / requests, requests)
    return found


@settings(max_examples=30)
@given(st.floats(0.3, 80), st.integers(0, 99))
def test_the_bracket_holds_the_truth(limit: float, seed: int) -> None:
    result = search(limit, 600, Random(seed)).result()
    assert result.failed_at_per_s is not None
    assert result.rate_per_s <= limit * 1.001 and result.failed_at_per_s >= limit * 0.999
    assert result.failed_at_per_s / result.rate_per_s < 1.25 or result.unclear


def test_few_requests_leave_it_unclear_rather_than_guess() -> None:
    found = GoodputSearch(0.9, 2.0, max_trials=3, patience=3)
    for _ in range(3):
        rate = found.next_rate()
        assert rate == 2.0
        assert found.record(rate, 0.9, 10) == "unclear"
    result = found.result()
    assert result.rate_per_s == 0 and result.unclear == (2.0,) and "undecided" in result.note


def test_a_server_without_limit_says_the_ceiling_was_not_reached() -> None:
    found = GoodputSearch(0.9, 1.0, max_trials=5)
    while (rate := found.next_rate()) is not None:
        found.record(rate, 1.0, 100)
    result = found.result()
    assert result.failed_at_per_s is None and result.rate_per_s == 16 and "may be higher" in result.note


def test_a_hopeless_server_gives_zero() -> None:
    found = GoodputSearch(0.9, 1.0, max_trials=50)
    while (rate := found.next_rate()) is not None:
        found.record(rate, 0.0, 100)
    assert found.result().rate_per_s == 0


def test_a_pass_above_a_failure_is_said() -> None:
    found = GoodputSearch(0.9, 1.0)
    found.record(4.0, 0.2, 200)
    found.record(8.0, 1.0, 200)
    found.record(1.0, 1.0, 200)
    assert found.result().rate_per_s == 1.0 and "state" in found.result().note


def test_a_trial_is_long_enough_to_pass() -> None:
    """Five seconds at 2 requests/s cannot show 90%: all of ten within the gates leaves 72%."""
    assert wilson(10, 10).low < 0.75
    assert fewest_requests(0.9) == 35
    assert wilson(35, 35).low > 0.9 >= wilson(34, 34).low
    load = LoadSpec("", steady_s=5.0)
    slow, fast = trial_at(load, 2.0, 0, 0.9), trial_at(load, 100.0, 3, 0.9)
    assert slow.steady_s * slow.rate_per_s >= 35
    assert (fast.steady_s, fast.seed) == (5.0, 3000)


def test_bm_17_each_pool_by_its_own_work() -> None:
    cost = cost_of(Fleet(prefill_gpus=4, decode_gpus=12), 1.0, 64_000, 12_000)
    assert cost.input_tokens_per_s_per_prefill_gpu == 16_000
    assert cost.output_tokens_per_s_per_decode_gpu == 1_000
    assert cost.total_tokens_per_s_per_gpu == 4_750


def test_cost_per_million_output_tokens() -> None:
    fleet = Fleet(prefill_gpus=1, decode_gpus=2, prefill_price_per_hour=4, decode_price_per_hour=3)
    cost = cost_of(fleet, 1800, 10_000_000, 500_000)
    assert cost.gpu_hours == 1.5 and cost.money == 5.0
    assert cost.blended_per_million_output_tokens == 10.0
    assert cost.prefill_pool_per_million_output_tokens == 4.0
    assert cost.decode_pool_per_million_output_tokens == 6.0


def test_cost_of_nothing_is_unknown_not_zero() -> None:
    cost = cost_of(Fleet(colocated_gpus=2, colocated_price_per_hour=1), 3600, 0, 0)
    assert cost.blended_per_million_output_tokens is None and cost.money == 2
    assert cost.prefill_pool_per_million_output_tokens is None


def test_half_a_split_is_refused() -> None:
    with pytest.raises(LocalError, match="both pools"):
        Fleet(prefill_gpus=1)
