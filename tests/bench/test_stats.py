"""Every statistic against its closed form, and the failures from the field (BM-*) as streams with known instants."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.bench import stats
from kvbaton.bench.samples import RequestSample, fill_from_stream
from kvbaton.bench.scripted import chat_delta, sse, usage_chunk
from kvbaton.bench.sse import StreamReader
from kvbaton.bench.stats import Gates


def sample_of(events: Sequence[tuple[float, bytes]], encode: Any = None, **fields: Any) -> RequestSample:
    """A sample as the client makes it, from (milliseconds, bytes)."""
    reader = StreamReader()
    for time_ms, data in events:
        reader.feed(data, time_ms / 1e3)
    reader.close(events[-1][0] / 1e3)
    given: dict[str, Any] = {"index": 0, "phase": "steady", "intended_s": 0.0, "started_s": 0.0}
    given |= {"max_tokens": 128, "prompt_tokens": 1, "status": 200, **fields}
    sample = RequestSample(**given)
    fill_from_stream(sample, reader, 0.0, encode)
    return sample


def content(text: str = "x") -> bytes:
    return chat_delta(content=text)


def completion(text: str) -> bytes:
    return sse({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


DONE = sse(b"[DONE]")


def ms(value: float | None) -> float:
    assert value is not None
    return value * 1e3


def test_bm_01_reasoning_counts_and_the_answer_is_timed_apart() -> None:
    sample = sample_of(
        [
            (10, chat_delta(role="assistant", content="")),
            (200, chat_delta(reasoning_content="hm")),
            (230, content()),
            (260, content()),
            (290, content()),
            (500, usage_chunk(4)),
            (501, DONE),
        ]
    )
    assert ms(stats.ttft_s(sample)) == pytest.approx(200)
    assert ms(stats.answer_ttft_s(sample)) == pytest.approx(230)
    assert ms(stats.e2e_s(sample)) == pytest.approx(290)
    assert ms(stats.tpot_s(sample)) == pytest.approx(30)
    assert sample.output_tokens == 4


def test_bm_02_role_empty_null_and_comments_are_no_tokens() -> None:
    sample = sample_of(
        [
            (5, chat_delta(role="assistant", content="")),
            (5, chat_delta(content=None)),
            (100, b": keepalive\n\n"),
            (300, content("a")),
            (350, content("b")),
            (351, DONE),
        ]
    )
    assert ms(stats.ttft_s(sample)) == pytest.approx(300)
    assert [round(ms(gap)) for gap in stats.chunk_gaps_s(sample)] == [50]


@pytest.mark.parametrize("piece", [content("c"), completion("c")], ids=["chat", "completions"])
def test_bm_04_usage_and_done_are_not_latency(piece: bytes) -> None:
    sample = sample_of([(100, piece), (150, piece), (200, piece), (1200, usage_chunk(3)), (1201, DONE)], closed_s=1.201)
    assert ms(stats.e2e_s(sample)) == pytest.approx(200)
    assert [round(ms(gap)) for gap in stats.itl_s(sample)[0]] == [50, 50]
    assert sample.closed_s == pytest.approx(1.201)


def running(completion_tokens: int, text: str) -> bytes:
    return chat_delta(content=text, usage={"prompt_tokens": 1, "completion_tokens": completion_tokens})


def test_bm_05_several_tokens_in_a_chunk() -> None:
    sample = sample_of([*((40 * n, running(4 * n, "abcd")) for n in range(1, 101)), (4001, DONE)])
    per_token = stats.summarize([stats.itl_s(sample)[0]], [stats.itl_s(sample)[1]])
    between_chunks = stats.summarize([stats.chunk_gaps_s(sample)])
    assert per_token is not None and between_chunks is not None
    assert ms(per_token.mean) == pytest.approx(10, rel=0.01)
    assert ms(between_chunks.mean) == pytest.approx(40, rel=0.01)
    assert sample.output_tokens == 400
    rates = stats.rates([sample])
    assert rates.peak_output_tokens_per_s >= rates.output_tokens_per_s == pytest.approx(100, rel=0.01)


@pytest.mark.parametrize("with_usage", [True, False])
def test_bm_07_bos_is_not_counted_and_text_is_tokenized_whole(with_usage: bool) -> None:
    def encode(text: str) -> list[str]:
        return text.split()  # the client calls its tokenizer without special tokens

    events = [(20 * n, content(f" w{n}")) for n in range(1, 201)]
    tail = [(4000, usage_chunk(200))] if with_usage else []
    sample = sample_of([*events, *tail, (4001, DONE)], encode, max_tokens=200)
    assert sample.output_tokens == 200
    assert sample.counted_by == ("usage" if with_usage else "tokenizer")
    assert sample.tokenizer_tokens == 200
    gaps = stats.summarize([stats.itl_s(sample)[0]])
    assert gaps is not None and ms(gaps.mean) == pytest.approx(20) and ms(gaps.p99) == pytest.approx(20)


def test_bm_09_a_broken_stream_is_a_failure_and_gives_nothing_to_the_headline() -> None:
    ten = [(10 * n, content()) for n in range(1, 11)]
    broken = sample_of([*ten, (101, sse({"error": {"message": "kv lost"}})), (102, DONE)])
    dropped = sample_of(ten)
    whole = sample_of([*((10 * n, content()) for n in range(1, 201)), (2001, DONE)])
    cohort = [broken, dropped, whole]
    assert [sample.ok for sample in cohort] == [False, False, True]
    assert sum(stats.failures(cohort).values()) == 2
    assert any("kv lost" in reason for reason in stats.failures(cohort))
    assert any("early end" in reason for reason in stats.failures(cohort))
    assert stats.rates(cohort).output_tokens == 200
    assert stats.attainment(cohort, Gates(10, 10)).share == pytest.approx(1 / 3)


def test_bm_12_usage_chunk_with_no_choices() -> None:
    sample = sample_of([(10, content()), (20, content()), (30, content()), (40, usage_chunk(3)), (40, DONE)])
    assert sample.output_tokens == 3
    assert ms(stats.tpot_s(sample)) == pytest.approx(10)


def test_bm_16_reasoning_tokens_are_already_in_completion_tokens() -> None:
    usage = usage_chunk(100, completion_tokens_details={"reasoning_tokens": 60})
    sample = sample_of([(10, content()), (20, usage), (20, DONE)], status=201)
    assert sample.ok and sample.output_tokens == 100 and sample.reasoning_tokens == 60


def timed(tokens: int, ttft_ms: float, end_ms: float) -> RequestSample:
    step = (end_ms - ttft_ms) / max(1, tokens - 1)
    events = [(ttft_ms + step * n, content()) for n in range(tokens)]
    return sample_of([*events, (end_ms, usage_chunk(tokens)), (end_ms, DONE)])


def test_bm_18_tpot_of_each_request_and_none_for_one_token() -> None:
    cohort = [timed(11, 100, 200), timed(1, 100, 100), timed(6, 100, 600)]
    tpots = [stats.tpot_s(sample) for sample in cohort]
    assert ms(tpots[0]) == pytest.approx(10) and tpots[1] is None and ms(tpots[2]) == pytest.approx(100)
    summary = stats.summarize([[tpot] for tpot in tpots if tpot is not None])
    assert summary is not None and summary.count == 2 and ms(summary.mean) == pytest.approx(55)
    assert [Gates(1.0, 0.02).met_by(sample) for sample in cohort] == [True, True, False]


def test_a_stop_token_at_once_is_a_whole_answer() -> None:
    end = sse({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    sample = sample_of([(50, chat_delta(role="assistant")), (60, end), (60, DONE)], closed_s=0.06)
    assert sample.ok and stats.ttft_s(sample) is None
    assert Gates(0.1, 0.1).met_by(sample) and not Gates(0.05, 0.1).met_by(sample)


def test_no_usage_and_no_tokenizer_counts_chunks_and_says_so() -> None:
    sample = sample_of([(10, content()), (20, content()), (20, DONE)])
    assert (sample.output_tokens, sample.counted_by) == (2, "chunks")


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=60))
def test_quantiles_equal_numpy_and_weights_equal_repetition(values: list[float]) -> None:
    summary = stats.summarize([values])
    assert summary is not None
    for percent in stats.PERCENTILES:
        assert summary.value(f"p{percent}") == pytest.approx(float(np.percentile(values, percent)))
    assert summary.mean == pytest.approx(float(np.mean(values))) and summary.max == max(values)
    weights = [1 + number % 4 for number in range(len(values))]
    weighted = stats.summarize([values], [weights])
    repeated = np.repeat(values, weights)
    assert weighted is not None
    assert weighted.p95 == pytest.approx(float(np.percentile(repeated, 95)))
    assert weighted.mean == pytest.approx(float(np.mean(repeated)))


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says() -> None:
    chance = np.random.default_rng(5)
    hits = 0
    for trial in range(60):
        drawn = chance.exponential(1.0, 80)
        summary = stats.summarize([[float(value)] for value in drawn], seed=trial)
        assert summary is not None
        hits += summary.intervals["mean"].low <= 1.0 <= summary.intervals["mean"].high
    assert 50 <= hits <= 60


def test_bootstrap_keeps_the_gaps_of_a_request_together() -> None:
    apart = stats.summarize([[value] * 10 for value in range(20)])
    as_if_independent = stats.summarize([[value] for value in range(20) for _ in range(10)])
    assert apart is not None and as_if_independent is not None
    width = [found.intervals["mean"].high - found.intervals["mean"].low for found in (apart, as_if_independent)]
    assert width[0] > 2 * width[1]


def test_same_seed_same_intervals() -> None:
    groups = [[0.1 * n, 0.2 * n] for n in range(30)]
    assert stats.summarize(groups, seed=3) == stats.summarize(groups, seed=3)


def test_wilson_against_its_formula() -> None:
    found = stats.wilson(9, 10)
    assert (found.low, found.high) == (pytest.approx(0.5958, abs=1e-3), pytest.approx(0.9821, abs=1e-3))
    assert stats.wilson(0, 0) == stats.Interval(0, 1)
    assert stats.wilson(10, 10).high == 1.0


def test_runs_of_misses_are_worth_fewer_independent_requests() -> None:
    alternating = [bool(n % 2) for n in range(100)]
    in_runs = [n // 25 % 2 == 0 for n in range(100)]
    assert stats.effective_count(alternating) == 100
    assert stats.effective_count(in_runs) < 15


def test_stalls_are_gaps_over_the_bound_in_order() -> None:
    one = sample_of([(100, content()), (700, content()), (800, content()), (801, DONE)])
    two = sample_of([(50, content()), (1000, content()), (1000, DONE)], index=2)
    found = stats.stalls([one, two], 0.5)
    assert [(stall.index, round(stall.gap_s, 3)) for stall in found] == [(2, 0.95), (0, 0.6)]


def test_rates_of_nothing_are_zero_and_finite() -> None:
    found = stats.rates([])
    assert found.output_tokens_per_s == 0 and math.isfinite(found.peak_output_tokens_per_s)
    assert json.dumps(stats.failures([])) == "{}"
