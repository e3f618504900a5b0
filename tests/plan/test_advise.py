"""Advice from scrapes and records: engines' own names, differences and restarts, honesty about what is missing."""

from __future__ import annotations

import json

import pytest

from kvbaton.plan.advise import StepPrice, advise, parse_metrics, window
from kvbaton.plan.advise_log import from_lines
from kvbaton.types import LocalError

GAP_EDGES = (0.01, 0.05, 0.1, 0.5)


def vllm(prompt: int, output: int, hits: int, preempted: int, gaps: tuple[int, ...], requests: int = 100) -> str:
    buckets = "\n".join(
        f'vllm:inter_token_latency_seconds_bucket{{le="{edge}",model_name="m"}} {count}'
        for edge, count in zip((*GAP_EDGES, "+Inf"), gaps, strict=True)
    )
    return f"""# HELP vllm:prompt_tokens_total Prefill tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{model_name="m"}} {prompt}
vllm:generation_tokens_total{{model_name="m"}} {output}
vllm:prefix_cache_hits_total{{model_name="m"}} {hits}
vllm:prefix_cache_queries_total{{model_name="m"}} {prompt}
vllm:num_preemptions_total{{model_name="m"}} {preempted}
vllm:request_success_total{{finished_reason="stop",model_name="m"}} {requests * 0.9}
vllm:request_success_total{{finished_reason="length",model_name="m"}} {requests * 0.1}
vllm:num_requests_waiting{{model_name="m"}} 3
vllm:num_requests_running{{model_name="m"}} 20
vllm:kv_cache_usage_perc{{model_name="m"}} 0.7
vllm:request_prefill_time_seconds_sum{{model_name="m"}} {prompt / 10_000}
vllm:request_queue_time_seconds_sum{{model_name="m"}} {requests * 0.2}
vllm:request_queue_time_seconds_count{{model_name="m"}} {requests}
vllm:time_to_first_token_seconds_sum{{model_name="m"}} {requests * 0.5}
vllm:time_to_first_token_seconds_count{{model_name="m"}} {requests}
{buckets}
"""


BEFORE = vllm(0, 0, 0, 0, (0, 0, 0, 0, 0), requests=0)
ROUGH = vllm(400_000, 20_000, 40_000, 0, (15_000, 19_000, 19_500, 20_000, 20_000))
PRICE = StepPrice(50e-6, 1e-3, "test")


def test_vllm_window() -> None:
    seen = window([BEFORE, BEFORE], [ROUGH, ROUGH], 60.0)
    assert (seen.prompt_tokens, seen.output_tokens, seen.requests) == (800_000, 40_000, 200)
    assert seen.cached_share == pytest.approx(0.1)
    assert (seen.waiting, seen.running) == (6, 40)
    assert seen.kv_usage == pytest.approx(0.7)
    assert seen.gap_p50_s == pytest.approx(0.01 * 10_000 / 15_000)
    assert seen.gap_p99_s == pytest.approx(0.1 + 0.4 * 300 / 500)


def test_a_fleet_that_a_split_may_help() -> None:
    advice = advise(window([BEFORE, BEFORE], [ROUGH, ROUGH], 60.0), PRICE)
    assert advice.prefill_share == pytest.approx(0.9 * 800_000 * 50e-6 / (0.9 * 800_000 * 50e-6 + 40.0))
    assert advice.miss_share == pytest.approx(0.9)
    assert advice.plan_a_split
    assert any("prefix" in each for each in advice.tune_first)
    assert any("chunk budget" in each for each in advice.tune_first)


@pytest.mark.parametrize(
    ("after", "workers"),
    [
        (vllm(8_000, 20_000, 0, 0, (19_000, 19_900, 20_000, 20_000, 20_000)), 2),  # prefill is a sliver
        (vllm(400_000, 20_000, 0, 0, (19_990, 20_000, 20_000, 20_000, 20_000)), 2),  # no gap to remove
        (ROUGH, 1),  # one worker cannot be divided
        (vllm(30_000, 20_000, 0, 0, (15_000, 19_000, 19_500, 20_000, 20_000)), 2),  # 300 tokens a prompt
    ],
)
def test_a_fleet_that_stays(after: str, workers: int) -> None:
    assert not advise(window([BEFORE] * workers, [after] * workers, 60.0), PRICE).plan_a_split


def test_preemption_and_queueing_come_first() -> None:
    after = vllm(400_000, 20_000, 0, 30, (15_000, 19_000, 19_500, 20_000, 20_000))
    after = after.replace('queue_time_seconds_sum{model_name="m"} 20.0', 'queue_time_seconds_sum{model_name="m"} 45.0')
    advice = advise(window([BEFORE, BEFORE], [after, after], 60.0), PRICE)
    assert "preemptions" in advice.tune_first[0]
    assert any("queueing" in each for each in advice.tune_first)


def test_a_restarted_worker_counts_from_zero() -> None:
    seen = window([ROUGH], [vllm(1_000, 10, 0, 0, (1, 1, 1, 1, 1), requests=5)], 60.0)
    assert seen.prompt_tokens == 1_000


def test_sglang_names_and_what_it_does_not_say() -> None:
    def scrape(factor: int) -> str:
        return f"""sglang:prompt_tokens_total{{model_name="m"}} {100_000 * factor}
sglang:generation_tokens_total{{model_name="m"}} {10_000 * factor}
sglang:num_running_reqs{{model_name="m"}} 4.0
sglang:num_queue_reqs{{model_name="m"}} 1.0
sglang:token_usage{{model_name="m"}} 0.4
sglang:cache_hit_rate{{model_name="m"}} 0.25
"""

    seen = window([scrape(1)], [scrape(3)], 30.0)
    assert (seen.prompt_tokens, seen.output_tokens, seen.cached_share) == (200_000, 20_000, 0.25)
    advice = advise(seen)
    assert advice.prefill_share is None
    assert "gap_p99_s" in advice.unknown
    assert not advice.plan_a_split
    assert "unknown" in advice.why


def test_our_own_busy_seconds_are_exact() -> None:
    def scrape(factor: int) -> str:
        return f"""kvbaton_worker_computed_prompt_tokens_total {9_000 * factor}
kvbaton_worker_cached_prompt_tokens_total {1_000 * factor}
kvbaton_worker_output_tokens_total {500 * factor}
kvbaton_worker_prefill_busy_seconds_total {6 * factor}
kvbaton_worker_decode_busy_seconds_total {4 * factor}
"""

    advice = advise(window([scrape(1)], [scrape(2)], 20.0))
    assert advice.prefill_share == pytest.approx(0.6)
    assert advice.miss_share == pytest.approx(0.9)


def test_records() -> None:
    lines = [
        json.dumps({"prompt_tokens": 2_000, "cached_tokens": 500, "output_tokens": 100, "ttft_s": 0.4, "queue_s": 0.1,
                    "tpot_s": 0.02, "max_gap_s": 0.2, "finished_at_s": float(n)})
        for n in range(50)
    ]  # fmt: skip
    advice = advise(from_lines(lines, 2), PRICE)
    assert advice.miss_share == pytest.approx(0.75)
    assert advice.uncached_tokens == pytest.approx(1_500)
    assert advice.queue_share_of_ttft == pytest.approx(0.25)
    with pytest.raises(LocalError, match="no request records"):
        from_lines([], 1)


def test_a_scrape_of_something_else_is_refused() -> None:
    with pytest.raises(LocalError, match="no metrics"):
        parse_metrics("node_cpu_seconds_total 5\n")
