"""The statistics that the data folders state, recomputed from the files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.plan.trace_stats import TraceStats, cache_hits, describe, lru_curve
from kvbaton.plan.workload import Trace, TraceRequest, read_trace
from kvbaton.types import LocalError

Shared = Callable[[str], Path]


def rounded(stats: TraceStats, side: str) -> tuple[int, ...]:
    each = getattr(stats, side)
    return tuple(int(value + 0.5) for value in (each.mean, each.p10, each.p50, each.p90, each.p99, each.max))


MOONCAKE = {
    "conversation": {
        "rows": 12_031, "rate": 3.40, "minutes": (2.40, 4.12), "cv": 3.03, "ratio": 35.1, "in_out": (40_937, 1_165),
        "prompt": (12_035, 964, 6_909, 27_367, 85_400, 126_195), "output": (343, 24, 350, 597, 1_119, 2_000),
        "hits": (37.4, 36.6), "unique": 182_790, "lru": (4.5, 11.3, 21.5, 29.3, 36.2, 37.1),
    },
    "synthetic": {
        "rows": 3_993, "rate": 3.91, "minutes": None, "cv": 1.01, "ratio": 102.8, "in_out": (59_876, 583),
        "prompt": (15_325, 30, 11_587, 38_611, 66_456, 191_378), "output": (149, 4, 69, 389, 768, 893),
        "hits": (65.1, 64.0), "unique": 43_924, "lru": (8.4, 28.4, 43.1, 58.2, 65.1, 65.1),
    },
}  # fmt: skip
# The folder's 0.5M, 2.6M, 5.1M, 10.2M, 25.6M and 51.2M tokens are 1,000 to 100,000 blocks of 512.
CAPACITIES = tuple(512 * blocks for blocks in (1_000, 5_000, 10_000, 20_000, 50_000, 100_000))


@pytest.mark.parametrize("name", list(MOONCAKE))
def test_mooncake(shared: Shared, name: str) -> None:
    want = MOONCAKE[name]
    trace = read_trace(shared("mooncake-fast25") / f"{name}_trace.jsonl")
    stats = describe(trace)
    assert stats.rows == want["rows"]
    assert round(stats.rate_per_s, 2) == want["rate"]
    assert round(stats.gap_cv, 2) == want["cv"]
    if want["minutes"]:
        assert (round(stats.min_minute_rate_per_s, 2), round(stats.max_minute_rate_per_s, 2)) == want["minutes"]
    assert rounded(stats, "prompt") == want["prompt"]
    assert rounded(stats, "output") == want["output"]
    assert round(stats.prompt_per_output, 1) == want["ratio"]
    assert (round(stats.prompt_tokens_per_s), round(stats.output_tokens_per_s)) == want["in_out"]
    assert stats.token_hit is not None
    assert stats.block_hit is not None
    assert (round(stats.token_hit * 100, 1), round(stats.block_hit * 100, 1)) == want["hits"]
    assert stats.unique_blocks == want["unique"]
    assert tuple(round(hit * 100, 1) for hit in lru_curve(trace, CAPACITIES).values()) == want["lru"]


AZURE = {
    "code": ((8_819, 2.57, 13.15), 10.5, 73.5, (2_048, 147, 1_469, 5_188, 7_436, 7_437), (28, 7, 13, 55, 251, 1_899)),
    "conv": (
        (19_366, 5.53, 1.09), 8.45, 5.5, (1_155, 207, 1_020, 2_735, 4_142, 14_050), (211, 54, 129, 424, 601, 1_000),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(AZURE))
def test_azure(shared: Shared, name: str) -> None:
    counts, peak, ratio, prompt, output = AZURE[name]
    stats = describe(read_trace(shared("azure-llm-2023") / f"AzureLLMInferenceTrace_{name}.csv"))
    assert (stats.rows, round(stats.rate_per_s, 2), round(stats.gap_cv, 2)) == counts
    assert stats.max_minute_rate_per_s == pytest.approx(peak, abs=0.05)
    assert (rounded(stats, "prompt"), rounded(stats, "output")) == (prompt, output)
    assert stats.prompt_per_output == pytest.approx(ratio, abs=0.06)


@pytest.mark.parametrize(
    ("name", "rows", "rate", "prompt", "output"),
    [
        ("llama_lmsys_05", 1_024, 0.506, (62, 17, 177, 586), (162, 117, 389, 533)),
        ("llama_creation_05", 512, 0.467, (308, 309, 400, 566), (1_144, 1_106, 1_708, 2_341)),
        ("llama_summarization_05", 1_302, 0.480, (2_753, 2_943, 3_880, 4_075), (171, 162, 269, 357)),
        ("mistral_lmsys_05", 1_024, 0.538, (73, 20, 215, 754), (189, 132, 473, 606)),
        ("mistral_creation_05", 725, 0.522, (356, 353, 440, 576), (761, 741, 982, 1_210)),
    ],
)
def test_apex(shared: Shared, name: str, rows: int, rate: float, prompt: tuple[int, ...], output: tuple[int, ...]) -> (
    None
):  # fmt: skip
    stats = describe(read_trace(shared("apex-traces") / f"{name}.csv"))
    assert (stats.rows, round(stats.rate_per_s, 3)) == (rows, rate)
    for side, want in (("prompt", prompt), ("output", output)):
        each = getattr(stats, side)
        assert (each.mean, each.p50, each.p90, each.p99) == pytest.approx(want, abs=0.51)


def test_arxiv_lengths(shared: Shared) -> None:
    (path,) = shared("vidur-traces").glob("arxiv*.csv")
    trace = read_trace(path)
    stats = describe(trace)
    assert (stats.rows, trace.has_arrivals) == (28_257, False)
    assert rounded(stats, "prompt") == (2_588, 1_242, 2_730, 3_702, 3_933, 4_054)
    assert rounded(stats, "output")[:5] == (291, 78, 167, 372, 3_271)


@pytest.mark.parametrize(
    ("name", "rows", "prompt", "output"),
    [
        ("workload_me2_01_mixed", 608, (9_218, 2_910, 24_418), (3_021, 874, 11_809)),
        ("sharegpt-llama-3.1-8b-300-sps10", 300, (857, 732, 1_460), (653, 632, 770)),
    ],
)
def test_llmservingsim_lengths(shared: Shared, name: str, rows: int, prompt: tuple[int, ...],
                               output: tuple[int, ...]) -> None:  # fmt: skip
    stats = describe(read_trace(shared("llmservingsim-vllm") / f"{name}.csv"))
    assert stats.rows == rows
    assert (stats.prompt.mean, stats.prompt.p50, stats.prompt.p90) == pytest.approx(prompt, abs=0.51)
    assert (stats.output.mean, stats.output.p50, stats.output.p90) == pytest.approx(output, abs=0.51)


def test_partial_blocks_and_eviction() -> None:
    requests = (TraceRequest(0, 700, 1, (0, 1)), TraceRequest(1, 700, 1, (0, 1)), TraceRequest(2, 700, 1, (0, 2)))
    trace = Trace("t", requests, 512)
    assert cache_hits(trace, None) == ((700 + 512) / 2_100, 3 / 6, 3)
    assert cache_hits(trace, 0)[0] == 0.0
    with pytest.raises(LocalError, match="block ids"):
        cache_hits(Trace("t", requests), None)
