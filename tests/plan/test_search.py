"""Every dimension of the search is really tried, for both arms alike, and what wins is what simulates best."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from plan.small_scenario import profile_scenario

from kvbaton.plan import report_html, report_text
from kvbaton.plan.answer import Answer
from kvbaton.plan.hardware import GpuNumbers, gpu
from kvbaton.plan.kv_math import Sharding
from kvbaton.plan.scenario import Engine, Scenario, load, parse, trace_of
from kvbaton.plan.search import Choice, best_single, best_split, drift_band, usd_per_hour
from kvbaton.plan.sizing import Layout, Sizer
from kvbaton.plan.verdict import MOST_ADVANTAGE, plan
from kvbaton.types import LocalError


def scenario(**search: object) -> Scenario:
    return parse({
        "workload": {"prompt_tokens": 6000, "output_tokens": 60, "requests": 40, "shared_prefix": 0.6},
        "slo": {"ttft_ms": 1500, "tpot_ms": 40},
        "model": {"preset": "Llama-3.1-8B"},
        "engine": {"uncertainty": 0.0, "max_running": 32},
        "hardware": {"max_gpus": 4, "gpu": "L40S"},
        "search": {"tp": [1, 2], "chunk_budgets": [512, 4096], "thresholds": [0, 2048], "verify": 2, "precision": 0.1,
                   "sensitivity": False, "cache_tiers_gb": [0, 64], **search},
    })  # fmt: skip


@pytest.fixture(scope="module")
def answer() -> Answer:
    return plan(scenario())


def test_every_dimension_is_tried(answer: Answer) -> None:
    tried = {each.name: each.tried for each in answer.searched}
    assert set(tried["parallelism of the prefill phase"]) == {"tp1 pp1 cp1 dp1", "tp2 pp1 cp1 dp1"}
    assert set(tried["parallelism of the decode phase"]) == {"tp1 pp1 cp1 dp1", "tp2 pp1 cp1 dp1"}
    assert set(tried["chunk budget"]) == {"512", "4,096"}
    assert set(tried["chunk budget of the decode pool"]) == {"512", "4,096"}
    assert len(tried["pool ratio"]) >= 2
    assert set(tried["routing threshold, uncached tokens"]) >= {"0", "2,048"}
    assert set(tried["cache tier, GB a GPU"]) == {"0", "64"}
    for each in answer.searched:
        assert not each.single or any(each.single == value for value in each.tried) or "ratio" in each.name, each


def test_both_arms_try_the_tier() -> None:
    wanted = scenario()
    sizer = Sizer(wanted, trace_of(wanted), Engine(wanted), lambda line: None)
    single, pair = best_single(sizer), best_split(sizer)
    assert single is not None
    assert pair is not None
    assert {each.split for each in sizer.tried if each.cache_gb} == {False, True}
    for choice, split in ((single, False), (pair, True)):
        for layout, goodput in sizer.tried.items():
            if layout.split != split:
                continue
            best = goodput / usd_per_hour(sizer.engine, layout, sizer)
            assert best <= choice.per_dollar * (1.0 + wanted.search.precision) + 1e-9, layout


def test_a_tier_costs_what_its_memory_costs() -> None:
    wanted = scenario()
    dear = msgspec.structs.replace(wanted.hardware, usd_per_host_gb_hour=0.01)
    dear_one = msgspec.structs.replace(wanted, hardware=dear)
    sizer = Sizer(dear_one, trace_of(dear_one), Engine(dear_one), lambda line: None)
    layout, _ = next(iter(sizer.split_layouts()))
    bare = usd_per_hour(sizer.engine, layout, sizer)
    tiered = usd_per_hour(sizer.engine, msgspec.structs.replace(layout, cache_gb=100.0), sizer)
    assert tiered - bare == pytest.approx(layout.prefill * layout.prefill_sharding.num_gpus * 100.0 * 0.01)


def test_decode_has_its_own_parallelism() -> None:
    wanted = scenario(decode_tp=[4], decode_pp=[1], pp=[1, 2])
    sizer = Sizer(wanted, trace_of(wanted), Engine(wanted), lambda line: None)
    assert {each.label for each in sizer.shardings(decode=True)} == {"tp4 pp1 cp1 dp1"}
    assert len(sizer.shardings()) == 4  # TP1 and TP2, each with one stage and with two


def test_a_trace_without_block_ids_has_no_tier_to_try() -> None:
    wanted = parse({"workload": {"prompt_tokens": 10, "output_tokens": 10}, "model": {"preset": "Llama-3.1-8B"}})
    assert Sizer(wanted, trace_of(wanted), Engine(wanted), lambda line: None).tiers_gb() == ()
    with pytest.raises(LocalError, match="cache_tiers_gb"):
        scenario(cache_tiers_gb=[-1])


def test_cheaper_things_are_simulated_and_ordered(answer: Answer) -> None:
    by_name = {each.what: each for each in answer.cheaper}
    for what in ("keep the cache in 8 bits", "route by prefix affinity over the single pool",
                 "add a cache tier in host memory or on disk", "tune the chunk budget of the single pool"):  # fmt: skip
        assert by_name[what].source == "simulated", by_name[what]
        assert "% goodput" in by_name[what].gain
    assert answer.cheaper[-1].source == "not evaluated"


def test_the_drift_band_is_where_the_limits_are_missed() -> None:
    wanted = scenario()
    sizer = Sizer(wanted, trace_of(wanted), Engine(wanted), lambda line: None)
    pair = best_split(sizer)
    assert pair is not None
    rate, now = 0.6 * pair.goodput, 100.0
    band = drift_band(sizer, pair, rate, now)
    assert band.low < now < band.high
    longer = sizer.trace.scaled(prompt=band.high / now)
    assert sizer.with_engine(sizer.engine, longer).holds(pair.layout, rate, longer)
    too_long = sizer.trace.scaled(prompt=1.3 * band.high / now)
    assert not sizer.with_engine(sizer.engine, too_long).holds(pair.layout, rate, too_long)
    idle = drift_band(sizer, Choice(pair.layout, pair.goodput, pair.usd_per_hour), 0.3 * pair.goodput, now)
    assert idle.high >= band.high  # the less of the fleet is used, the more the workload may move


def test_a_wanted_rate_gets_the_cheapest_fleet_that_carries_it(tmp_path: Path) -> None:
    """n = ceil(rate / g_p), m = ceil(rate / g_d), grown where a simulation says so, and nothing too many."""
    wanted = load(profile_scenario(tmp_path, max_gpus=7, rate=6.0, requests=20))
    sizer = Sizer(wanted, trace_of(wanted), Engine(wanted), lambda line: None)
    assert sizer.wanted is not None
    assert sizer.wanted > 6.0  # headroom for the variance of the arrivals
    for choice in (best_single(sizer), best_split(sizer)):
        assert choice is not None
        assert choice.carries
        layout = choice.layout
        assert 1 < sizer.layout_gpus(layout) < 7
        assert choice.per_dollar == pytest.approx(sizer.wanted / usd_per_hour(sizer.engine, layout, sizer))
        for prefill, decode in ((1, 0), (0, 1)):
            less = msgspec.structs.replace(layout, prefill=layout.prefill - prefill, decode=layout.decode - decode)
            if less.decode and less.prefill >= layout.split:
                assert sizer.goodput(less, sizer.wanted) < sizer.wanted


def test_a_fleet_that_carries_the_rate_is_better_than_a_cheaper_one_that_does_not() -> None:
    layout = Layout(0, 1, Sharding(), Sharding(), 512, 512)
    carries, dear, short = (Choice(layout, *each, wanted=5.0) for each in ((9.0, 4.0), (6.0, 5.0), (4.9, 1.0)))
    assert carries.better_than(dear)
    assert carries.better_than(short)
    assert not short.better_than(dear)
    assert carries.per_dollar == 5.0 / 4.0  # more than is wanted is worth nothing
    assert Choice(layout, 9.0, 4.0).per_dollar == 9.0 / 4.0


LIMITS = {"ttft_ms": 500, "tpot_ms": 15}
COMPUTES = {"name": "computes", "bf16_tflops": 1000.0, "memory_gb": 80.0, "memory_gb_per_s": 1000.0}
READS = {"name": "reads", "bf16_tflops": 50.0, "memory_gb": 80.0, "memory_gb_per_s": 4000.0}


def two_kinds(**slo: float) -> Scenario:
    return parse({
        "workload": {"prompt_tokens": 2000, "output_tokens": 30, "requests": 30},
        "slo": {**LIMITS, **slo},
        "model": {"preset": "Llama-3.1-8B"},
        "engine": {"uncertainty": 0.0},
        "hardware": {"max_gpus": 3, "gpu": COMPUTES, "decode_gpu": READS, "decode_usd_per_gpu_hour": 1.0,
                     "fabric": {"gb_per_s": 50.0}},
        "search": {"tp": [1], "chunk_budgets": [2048], "thresholds": [0], "verify": 1, "precision": 0.2,
                   "sensitivity": False},
    })  # fmt: skip


def test_gpus_and_fabrics_may_be_given_by_their_numbers() -> None:
    engine = Engine(two_kinds())
    assert "computes" in engine.source
    assert "reads" in engine.source
    assert "own fabric" in engine.handoff().link.source
    with pytest.raises(LocalError, match="memory_gb_per_s must be positive"):
        gpu(GpuNumbers(bf16_tflops=1.0, memory_gb=1.0, memory_gb_per_s=0.0))
    with pytest.raises(LocalError, match="bf16_tflops"):
        parse({"workload": {"prompt_tokens": 1, "output_tokens": 1}, "hardware": {"gpu": {"memory_gb": 1.0}}})


def test_the_single_pool_may_stand_on_either_kind_of_gpu() -> None:
    wanted = two_kinds(ttft_ms=20_000, tpot_ms=500)
    sizer = Sizer(wanted, trace_of(wanted), Engine(wanted), lambda line: None)
    kinds = {layout.decode_gpus: layout for layout, _ in sizer.colocated_layouts()}
    assert set(kinds) == {False, True}
    assert usd_per_hour(sizer.engine, kinds[True], sizer) == 3 * 1.0
    assert usd_per_hour(sizer.engine, kinds[False], sizer) == 3 * 2.0
    steps = {kind: sizer.fleet(layout).pools[0].worker.step for kind, layout in kinds.items()}
    assert steps[True].fixed_s < steps[False].fixed_s  # reads its weights faster
    assert steps[True].per_token_s > steps[False].per_token_s  # and computes slower


def test_a_split_that_alone_keeps_the_limits_is_the_answer() -> None:
    """One kind of GPU is too slow to compute prompts, the other to read weights: no single pool of either will do."""
    answer = plan(two_kinds())
    assert answer.verdict == "split"
    assert "next to nothing" in answer.reason
    assert answer.colocated.goodput_per_s == 0
    assert answer.colocated.attainment < 0.9  # what it would do at the split's rate is shown
    assert answer.split is not None
    assert answer.split.goodput_per_s > 0
    assert json.loads(answer.encode())["advantage"] == MOST_ADVANTAGE
    assert "no single pool" in answer.cheaper[0].gain
    assert answer.verdict in report_html.render(answer)
    assert answer.reason in report_text.render(answer)
