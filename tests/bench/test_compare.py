"""Verdicts from cohorts with known differences, and a whole comparison of two scripted deployments."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from kvbaton.bench import verdict as judge
from kvbaton.bench.arms import Arm, Difference, parity
from kvbaton.bench.compare import CompareRuns, CompareSpec, compare
from kvbaton.bench.cost import Fleet
from kvbaton.bench.report import html_page, write_reports
from kvbaton.bench.samples import RequestSample, file_sha256, read_run
from kvbaton.bench.scripted import Script, ScriptedServer, even_script
from kvbaton.bench.sse import ChunkKind
from kvbaton.bench.stats import Gates
from kvbaton.bench.workload import LoadSpec
from kvbaton.types import LocalError


def request(index: int, ttft_s: float, gaps_s: Sequence[float]) -> RequestSample:
    times = list(itertools.accumulate([ttft_s, *gaps_s]))
    return RequestSample(
        index=index,
        phase="steady",
        intended_s=0.0,
        started_s=0.0,
        max_tokens=len(times),
        prompt_tokens=8,
        status=200,
        output_tokens=len(times),
        chunks=[(time, int(ChunkKind.CONTENT), 1.0) for time in times],
    )


def cohort(gap_s: float, seed: int, num: int = 60, ttft_s: float = 0.1) -> list[RequestSample]:
    chance = Random(seed)
    return [
        request(
            index, ttft_s * chance.uniform(0.9, 1.1), [gap_s * chance.choice((0.5, 0.9, 1.0, 1.6)) for _ in range(40)]
        )
        for index in range(num)
    ]


Pair = tuple[list[RequestSample], list[RequestSample]]


def pairs(gap_a: float, gap_b: float, **fields: Any) -> list[Pair]:
    return [(cohort(gap_a, seed, **fields), cohort(gap_b, seed + 50, **fields)) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("gap_b", "reading", "decision"),
    [(0.010, "better", "split"), (0.040, "worse", "do not split"), (0.020, "no difference", "do not split")],
)
def test_the_objective_decides_when_it_is_sure(gap_b: float, reading: str, decision: str) -> None:
    found = judge.compare_latency("itl", 95, pairs(0.020, gap_b))
    assert found.reading == reading
    assert found.ratio == pytest.approx(gap_b / 0.020, rel=0.03)
    verdict = judge.decide(found, None, [], "here")
    assert verdict.decision == decision
    assert verdict.sentence.startswith({"split": "Split:", "do not split": "Do not split:"}[decision])


def test_pairs_that_disagree_prove_nothing() -> None:
    mixed = [pairs(0.020, 0.008)[0], pairs(0.020, 0.021)[1]]
    found = judge.compare_latency("itl", 95, mixed)
    assert min(found.pair_ratios) < 1 < max(found.pair_ratios) and found.reading == "unclear"
    assert judge.decide(found, None, [], "here").decision == "not proven"


def test_doubts_outrank_any_difference() -> None:
    found = judge.compare_latency("itl", 95, pairs(0.020, 0.010))
    verdict = judge.decide(found, None, ["the arms differ in model"], "here")
    assert verdict.decision == "not proven" and "differ in model" in verdict.sentence


def test_the_price_of_the_advice_is_named() -> None:
    both = [(cohort(0.020, seed), cohort(0.010, seed, ttft_s=0.4)) for seed in (1, 2)]
    objective = judge.compare_latency("itl", 95, both)
    ttft = judge.compare_latency("ttft", 95, both)
    verdict = judge.decide(objective, None, [], "here", [objective, ttft])
    assert verdict.decision == "split" and "the price: p95 TTFT" in verdict.sentence


def test_gates_outrank_the_objective() -> None:
    """The split has smoother gaps, but its TTFT breaks the gate for everybody."""
    smooth_but_late = [(cohort(0.020, seed), cohort(0.010, seed, ttft_s=0.5)) for seed in (1, 2)]
    attained = judge.compare_attainment(smooth_but_late, Gates(0.2, 0.05))
    assert attained.reading == "worse" and attained.b == 0
    objective = judge.compare_latency("itl", 95, smooth_but_late)
    assert objective.reading == "better"
    assert judge.decide(objective, attained, [], "here").decision == "do not split"


def test_figures_of_whole_runs_need_runs_that_agree() -> None:
    clear = judge.compare_rate("cost", "", [(10.0, 6.0), (10.1, 6.0), (9.9, 6.1)], True)
    assert clear.reading == "better"
    assert judge.compare_rate("cost", "", [(10.0, 6.0)], True).reading == "unclear"
    assert judge.compare_rate("cost", "", [(10.0, 6.0), (10.0, 13.0)], True).reading == "unclear"


def test_no_false_verdict_between_equals() -> None:
    """Fifteen comparisons of an arm with itself: none may say split."""
    decisions = []
    for trial in range(15):
        same = [(cohort(0.02, 100 * trial + n, 25), cohort(0.02, 100 * trial + 50 + n, 25)) for n in (0, 1)]
        decisions.append(judge.decide(judge.compare_latency("itl", 95, same, trial), None, [], "").decision)
    assert "split" not in decisions


def arms(**fields: Any) -> tuple[Arm, Arm]:
    common = ("--max-batch-tokens", "256")
    one = Arm("colocated", "a", Fleet(colocated_gpus=2), up=("--colocated", "2", *common))
    two = Arm(
        "disaggregated", "b", Fleet(prefill_gpus=1, decode_gpus=1), up=("--prefill", "1", "--decode", "1", *common)
    )
    return one, two


def test_parity_allows_what_is_compared_and_nothing_else() -> None:
    one, two = arms()
    found = parity(one, two, {"models.data[0].id": "m"}, {"models.data[0].id": "m"})
    assert found and all(difference.allowed for difference in found)
    other = parity(one, two, {"models.data[0].id": "m"}, {"models.data[0].id": "n"})
    assert Difference("models.data[0].id", "m", "n", False) in other
    bigger = Arm("disaggregated", "b", Fleet(prefill_gpus=2, decode_gpus=1), up=two.up)
    assert Difference("GPUs", "2", "3", False) in parity(one, bigger, {}, {})
    flagged = two.with_flags(("--max-batch-tokens", "512"))
    assert Difference("--max-batch-tokens", "256", "512", False) in parity(one, flagged, {}, {})


def test_an_arm_is_an_address_or_a_fleet() -> None:
    with pytest.raises(LocalError, match="either"):
        Arm("x", "a", Fleet())


def scripts(gap_s: float, stall_every: int = 0) -> Callable[[int, dict[str, Any]], Script]:
    def choose(number: int, body: dict[str, Any]) -> Script:
        script = even_script(0.02, gap_s, 8)
        if stall_every and number % stall_every == 0:
            late = [(after + (0.08 if place > 4 else 0.0), data) for place, (after, data) in enumerate(script.steps)]
            return Script(late)
        return script

    return choose


async def compared(directory: Path, b_gap_s: float, **fields: Any) -> CompareRuns:
    async with ScriptedServer(scripts(0.010, 2)) as a, ScriptedServer(scripts(b_gap_s)) as b:
        load = LoadSpec("", tokenizer="none", rate_per_s=30, steady_s=0.7, input="4", max_lag_ms=1e6)
        spec = CompareSpec(
            Arm("colocated", "a", Fleet(colocated_gpus=2, colocated_price_per_hour=2.0), a.url),
            Arm("disaggregated", "b", Fleet(1, 1, 0, 2.0, 2.0), b.url),
            load,
            Gates(0.5, 0.05),
            (30.0, 60.0),
            stall_bound_s=0.05,
            directory=directory,
            **fields,
        )
        return await compare(spec, lambda line: None, lambda progress: None)


async def test_a_whole_comparison_of_two_addresses(tmp_path: Path) -> None:
    found = await compared(tmp_path, 0.005)
    result = found.result
    assert [run.arm for run in result.runs[:4]] == ["colocated", "disaggregated", "disaggregated", "colocated"]
    for run in result.runs:
        path = tmp_path / "samples" / run.samples_file
        assert file_sha256(path) == run.samples_sha256
        assert len(read_run(path).measured()) == run.summary.counts.measured
    first, second = (
        read_run(tmp_path / "samples" / f"{arm}-rate30-run{order}.jsonl.gz") for arm, order in (("a", 0), ("b", 1))
    )
    assert [sample.intended_s for sample in first.measured()] == [sample.intended_s for sample in second.measured()]
    assert result.rates[0].a.stalls.count > 0
    names = {one.name for one in result.rates[0].comparisons}
    assert {"p95 TTFT", "p95 TPOT", "p95 ITL", "requests in both gates", "GPU-hours"} <= names
    assert result.rates[0].a.cost is not None and result.rates[0].a.cost.money > 0
    paths = write_reports(found, tmp_path / "out")
    assert [path.name for path in paths] == ["report.html", "report.md", "report.json"]
    html, text, data = (path.read_text() for path in paths)
    assert html.count("<svg") == 7 and "http://" not in html.replace(result.arms["a"]["runs"], "").replace(
        result.arms["b"]["runs"], ""
    )
    assert "<script" not in html and result.verdict.sentence in text
    assert json.loads(data)["verdict"]["decision"] == result.verdict.decision
    assert all(run.samples_sha256 in text for run in result.runs)


async def test_what_an_endpoint_says_of_itself_is_no_part_of_the_page(tmp_path: Path) -> None:
    """Of a name that begins like a tag, too: a report is opened by people, with what strangers wrote in it."""
    found = await compared(tmp_path, 0.005)
    tag = "<img src=x onerror=alert(1)>"
    differences = parity(*arms(), {"models.data[0].id": tag, f"models.{tag}": "x"}, {"models.data[0].id": "m"})
    told = {style: {**arm, "name": tag, "runs": tag} for style, arm in found.result.arms.items()}
    result = msgspec.structs.replace(
        found.result, differences=differences, arms=told, title=tag, config={tag: tag}, versions={tag: tag}
    )
    html = html_page(CompareRuns(result, found.raw))
    assert "<img" not in html and html.count("&lt;img") > 10


async def test_tuning_needs_a_fleet_that_can_be_started(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="tuned"):
        await compared(tmp_path, 0.005, tuning=(("--x", "1"),))


async def test_a_bad_objective_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="judge"):
        await compared(tmp_path, 0.005, objective="itl:42")
