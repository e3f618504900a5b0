"""The simulator's error in a comparison: none where the simulator made the runs, the right one where they are slow."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from kvbaton.bench.arms import Arm
from kvbaton.bench.compare import CompareSpec, compare
from kvbaton.bench.cost import Fleet
from kvbaton.bench.prediction import FIGURES, fleet_spec, predict, trace_of_run
from kvbaton.bench.report import write_reports
from kvbaton.bench.samples import ClientReport, RequestSample, Run, RunFooter, RunHeader
from kvbaton.bench.scripted import ScriptedServer, even_script
from kvbaton.bench.sse import ChunkKind
from kvbaton.bench.workload import LoadSpec, plan_work
from kvbaton.plan.link import LinkModel
from kvbaton.plan.profile_file import Origin, ProfileFile, WorkerLimits
from kvbaton.plan.sim import Simulation
from kvbaton.plan.sim_host import SharedCores
from kvbaton.plan.step_time import StepModel
from kvbaton.plan.workload import Trace, TraceRequest

PROFILE = ProfileFile(
    origin=Origin(engine="kvbaton", engine_version="1", model_id="m", model_revision="r", hardware="test"),
    worker=WorkerLimits(num_blocks=2_000, block_size=16, max_batch_tokens=512, max_running=8, max_context=16_384,
                        token_bytes=20_000, num_layers=30),
    step=StepModel(0.010, 100e-6, 2e-9, 100e-6, 1e-7, source="measured: test"),
    link=LinkModel(1e-3, 2e9),
    admission_s=0.004,
    shared_cores=SharedCores(num_cores=2, slowdown=0.05, token_s=1e-4, worker_wait_s=0.002),
)  # fmt: skip
SINGLE = Arm("colocated", "a", Fleet(colocated_gpus=2), up=("--colocated", "2", "--chunk-tokens", "128"))
SPLIT = Arm("disaggregated", "b", Fleet(1, 1), up=("--prefill", "1", "--decode", "1", "--chunk-tokens", "128"))
LOAD = LoadSpec("", rate_per_s=3, steady_s=20, input="uniform:100:900", output="uniform:5:40", tokenizer="none")


def measured(arm: Arm, load: LoadSpec, slower: float = 1.0) -> Run:
    """A run that the simulator itself made, as samples; ``slower`` stretches its latencies."""
    work = plan_work(load, None)
    samples = [
        RequestSample(number, "steady", item.due_s or 0.0, item.due_s or 0.0, item.output_tokens, item.prompt_tokens,
                      status=200, output_tokens=item.output_tokens, usage_prompt_tokens=item.prompt_tokens)
        for number, item in enumerate(work.items)
    ]  # fmt: skip
    client = ClientReport(0, 0, 0, 0, 0, 0, 0, 0, True, [])
    run = Run(RunHeader(msgspec.to_builtins(load), "", {}), samples, RunFooter(client, 1.0))
    trace, ordered = trace_of_run(run, PROFILE.worker.block_size)
    simulation = Simulation(fleet_spec(arm, PROFILE)[0], trace)
    simulation.run()
    for number, sample in enumerate(ordered):
        record = simulation.records[f"r{number}"]
        assert record.ttft_s is not None
        first = sample.intended_s + slower * record.ttft_s
        gap = slower * (record.tpot_s or 0.0)
        sample.chunks = [(first + n * gap, int(ChunkKind.CONTENT), 1.0) for n in range(sample.output_tokens)]
    return run


@pytest.mark.parametrize("arm", [SINGLE, SPLIT], ids=["colocated", "split"])
@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_the_error_is_what_the_run_was_slower_by(arm: Arm, slower: float) -> None:
    found, notes = predict(arm, 3.0, [measured(arm, LOAD, slower)], PROFILE)
    assert [each.name for each in found] == [f"{how} {what}" for what in ("TTFT", "TPOT") for how in FIGURES]
    assert notes == []
    for each in found:
        assert each.error == pytest.approx(1 / slower - 1.0, abs=1e-6)
        assert each.predicted_ms > 1.0


def test_the_runs_of_an_arm_stand_beside_what_they_are_pooled_to() -> None:
    runs = [measured(SINGLE, LOAD, slower) for slower in (1.0, 1.5)]
    for each in predict(SINGLE, 3.0, runs, PROFILE)[0]:
        assert each.runs_ms[1] == pytest.approx(1.5 * each.runs_ms[0])
        assert each.runs_ms[0] <= each.measured_ms <= each.runs_ms[1]


def test_flags_and_topology_are_the_runs_own() -> None:
    spec, _ = fleet_spec(
        SPLIT.with_flags(("--max-running", "3", "--kv-blocks", "99", "--policy", "least_load")), PROFILE
    )
    assert [(pool.role, pool.count) for pool in spec.pools] == [("prefill", 1), ("decode", 1)]
    worker = spec.pools[0].worker
    assert (worker.max_batch_tokens, worker.max_running, worker.num_blocks) == (128, 3, 99)
    assert spec.policy.kind == "least_load"
    assert spec.admission_s == PROFILE.admission_s
    assert [pool.role for pool in fleet_spec(SINGLE, PROFILE)[0].pools] == ["both"]
    assert spec.shared_cores == PROFILE.shared_cores
    away = Arm("elsewhere", "b", Fleet(1, 1), url="http://127.0.0.1:1")
    spec, notes = fleet_spec(away, msgspec.structs.replace(PROFILE, link=None))
    assert len(notes) == 2
    assert spec.shared_cores is None
    _, notes = fleet_spec(SINGLE, msgspec.structs.replace(PROFILE, shared_cores=None))
    assert any("--fleet" in note for note in notes)


def test_shared_prefixes_are_shared_in_the_simulation_too() -> None:
    load = msgspec.structs.replace(LOAD, shared_prefix_tokens=64, shared_prefix_groups=1, input="200")
    trace, _ = trace_of_run(measured(SINGLE, load), 16)
    assert trace.block_tokens == 64
    assert len({each.block_ids[0] for each in trace.requests}) == 1
    assert len({each.block_ids[1] for each in trace.requests}) == len(trace.requests)
    bare = Trace("bare", tuple(TraceRequest(each.arrival_s, each.prompt_tokens, each.output_tokens)
                               for each in trace.requests))  # fmt: skip
    spec = fleet_spec(SINGLE, PROFILE)[0]
    hit, missed = Simulation(spec, trace).run(), Simulation(spec, bare).run()
    assert hit.cached_tokens > 0 == missed.cached_tokens


async def test_the_report_has_the_error(tmp_path: Path) -> None:
    async with ScriptedServer(lambda n, body: even_script(0.02, 0.010, 8)) as server:
        spec = CompareSpec(
            Arm("colocated", "a", Fleet(colocated_gpus=2), server.url),
            Arm("disaggregated", "b", Fleet(1, 1), server.url),
            LoadSpec("", tokenizer="none", rate_per_s=30, steady_s=0.7, input="4", max_lag_ms=1e6),
            None, (30.0,), directory=tmp_path, profile=PROFILE,
        )  # fmt: skip
        found = await compare(spec, lambda line: None, lambda progress: None)
    html, text, data = (path.read_text() for path in write_reports(found, tmp_path))
    rows = json.loads(data)["simulated"]["predictions"]
    assert len(rows) == 12
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1.0)
    for page in (html, text):
        assert "What the simulator says of these runs" in page
        assert "p95 TTFT" in page
        assert f"{rows[0]['error']:+.0%}" in page
