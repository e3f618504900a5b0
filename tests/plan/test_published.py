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
