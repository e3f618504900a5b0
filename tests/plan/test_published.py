"""Published coefficients: read, converted, and the workloads they were published for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.plan.published import PhaseShare, SplitwiseTable, read_distserve, read_splitwise
from kvbaton.plan.step_time import StepWork, pairs
from kvbaton.plan.workload import read_trace
from kvbaton.types import LocalError

Shared = Callable[[str], Path]


def test_distserve_coefficients_give_the_same_times_in_our_form(shared: Shared) -> None:
    table = read_distserve(shared("distserve") / "profiler-a100-80g.distserve.json", "facebook/opt-13b", 1)
    model = table.step_model()
    for tokens in (256, 1_024, 2_048):
        ours = model.step_s(StepWork(prefill_tokens=tokens, prefill_pairs=pairs(0, tokens)))
        assert ours * 1e3 == pytest.approx(table.prefill_ms([tokens]), rel=0.05)
    for batch in (1, 16, 64):
        work = StepWork(num_decodes=batch, context_tokens=batch * 512)
        assert model.step_s(work) * 1e3 == pytest.approx(table.decode_ms([512] * batch), rel=0.35)
    with pytest.raises(LocalError, match="tp 3"):
        read_distserve(shared("distserve") / "profiler-a100-80g.distserve.json", "facebook/opt-13b", 3)


def test_splitwise_medians(shared: Shared) -> None:
    path = shared("splitwise-sim") / "perf_model.csv"
    a100 = read_splitwise(path, "llama2-70b", "a100-80gb", 8)
    h100 = read_splitwise(path, "llama2-70b", "h100-80gb", 8)
    sizes, batches = (512, 1_024, 2_048, 4_096, 8_192), (8, 16, 32, 64)
    assert [a100.prompt_ms[size] for size in sizes] == pytest.approx([92.8, 154.5, 274.2, 661, 1_550], rel=0.005)
    assert [h100.prompt_ms[size] for size in sizes] == pytest.approx([53.9, 77.9, 136.8, 390, 845], rel=0.005)
    assert [a100.token_ms[batch] for batch in batches] == pytest.approx([46.5, 50.4, 53.0, 71.6], rel=0.005)
    assert [h100.token_ms[batch] for batch in batches] == pytest.approx([32.5, 34.2, 38.6, 50.2], rel=0.005)


def share(shared: Shared, name: str, table: SplitwiseTable) -> PhaseShare:
    trace = read_trace(shared("azure-llm-2023") / f"AzureLLMInferenceTrace_{name}.csv").requests
    return PhaseShare(
        sum(table.prompt_s(each.prompt_tokens) for each in trace) / len(trace),
        sum(table.decode_s_per_request(each.output_tokens, 32) for each in trace) / len(trace),
    )


@pytest.mark.parametrize("hardware", ["a100-80gb", "h100-80gb"])
def test_coding_wants_more_prefill_than_conversation(shared: Shared, hardware: str) -> None:
    table = read_splitwise(shared("splitwise-sim") / "perf_model.csv", "llama2-70b", hardware, 8)
    code, conv = share(shared, "code", table), share(shared, "conv", table)
    assert code.prefill_share > 0.7 > 0.5 > conv.prefill_share
    assert code.prefill_per_decode > 5 * conv.prefill_per_decode


def mooncake_ratio(shared: Shared, hardware: str, batch: int) -> float:
    """Prefill workers for each decode worker on the synthetic trace, by the measured table and an endless cache."""
    table = read_splitwise(shared("splitwise-sim") / "perf_model.csv", "llama2-70b", hardware, 8)
    trace = read_trace(shared("mooncake-fast25") / "synthetic_trace.jsonl")
    assert trace.block_tokens is not None
    seen: set[int] = set()
    prefill_s = decode_s = 0.0
    for each in trace.requests:
        known = next((n for n, block in enumerate(each.block_ids) if block not in seen), len(each.block_ids))
        seen.update(each.block_ids)
        prefill_s += table.prompt_s(each.prompt_tokens - min(known * trace.block_tokens, each.prompt_tokens - 1))
        decode_s += table.decode_s_per_request(each.output_tokens, batch)
    return prefill_s / decode_s


@pytest.mark.parametrize(("hardware", "at_4", "at_8", "at_16"), [
    ("a100-80gb", 0.65, 1.29, 2.37), ("h100-80gb", 0.50, 0.99, 1.88),
])  # fmt: skip
def test_mooncake_synthetic_is_near_one_to_one_only_where_few_decode_together(
    shared: Shared, hardware: str, at_4: float, at_8: float, at_16: float
) -> None:
    """From times of the phases alone the batch decides: 1:1 at 6 (A100) to 8 (H100) sequences a step, 2:1 at twice as
    many. How many do decode together follows from rate and step time, which test_pool_ratio simulates."""
    ratios = [mooncake_ratio(shared, hardware, batch) for batch in (4, 8, 16)]
    assert ratios == pytest.approx([at_4, at_8, at_16], rel=0.02)
    assert ratios[0] < 1.0 < ratios[2]
