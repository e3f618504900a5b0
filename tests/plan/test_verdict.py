"""Scenarios to answers: refusals by name, both arms alike, the whole answer, the commands that print it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from plan.small_scenario import profile_scenario

from kvbaton.cli.plan_commands import advise_command, kv_command, plan_command
from kvbaton.plan import report_html, report_text
from kvbaton.plan.answer import Answer, Uncertain
from kvbaton.plan.scenario import Engine, Scenario, load, parse, trace_of
from kvbaton.plan.sizing import Sizer, headroom
from kvbaton.plan.verdict import Decision, _decide, decide, plan
from kvbaton.types import LocalError

SCENARIOS = Path(__file__).resolve().parents[2] / "examples" / "scenarios"


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    return plan(load(profile_scenario(tmp_path_factory.mktemp("plan"))))


def test_the_answer_is_whole(answer: Answer) -> None:
    assert answer.verdict in ("split", "stay", "not enough evidence")
    assert len(answer.matrix) == 9
    assert answer.cheaper
    assert answer.split is not None
    assert len(answer.uncertainty) == 8
    assert answer.advantage_band is not None
    assert answer.advantage is not None
    assert answer.advantage_band.low <= answer.advantage <= answer.advantage_band.high
    for arm in (answer.colocated, answer.split):
        assert arm.goodput_per_s > 0
        for seen, band in ((arm.ttft, arm.ttft_band), (arm.tpot, arm.tpot_band)):
            for name in ("mean", "p50", "p90", "p99"):
                assert 0 < getattr(band.low, name) <= getattr(seen, name) <= getattr(band.high, name)
            assert band.low.p90 < band.high.p90
        assert arm.cost.usd_per_hour == pytest.approx(2.0 * arm.layout.prefill + 2.0 * arm.layout.decode)
        assert all(0 <= pool.prefill_share + pool.decode_share <= 1.001 for pool in arm.pools)
    assert answer.drift is not None
    assert answer.drift.low <= answer.drift.now <= answer.drift.high
    assert any("engine_version '1'" in text for text in answer.warnings)  # PL-21: another version than planned for
    assert any("pool of one worker" in text for text in answer.warnings)


def test_equal_scenarios_are_equal_bytes(answer: Answer, tmp_path: Path) -> None:
    assert plan(load(profile_scenario(tmp_path))).encode() == answer.encode()


def test_reports_are_whole_and_offline(answer: Answer) -> None:
    page = report_html.render(msgspec.structs.replace(answer, name="<script>alert(1)</script>"))
    assert "<script>" not in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    for text in (answer.verdict, "Nine conditions", "Cheaper things", "Drift band", "<svg"):
        assert text in page
    assert answer.reason in report_text.render(answer)


def test_a_constant_that_decides_is_to_be_measured() -> None:
    scenario = load(SCENARIOS / "split_long_prompts.toml")
    engine = Engine(scenario)
    firm = (Uncertain("link", 1.15, 1.4), Uncertain("compute", 1.15, 1.3))
    verdict, reason, measure = _decide(scenario, engine, 1.5, firm)
    assert (verdict, measure) == ("split", ())
    assert "1.50" in reason
    assert _decide(scenario, engine, 0.9, (Uncertain("link", 1.15, 1.0),))[0] == "stay"
    verdict, reason, measure = _decide(scenario, engine, 1.2, (*firm, Uncertain("memory", 1.15, 1.0)))
    assert (verdict, measure) == ("not enough evidence", ("memory",))
    assert "assumed" in reason
    assert _decide(scenario, engine, None, ())[0] == "stay"


def test_both_arms_get_the_same_worker() -> None:
    scenario = load(SCENARIOS / "split_long_prompts.toml")
    sizer = Sizer(scenario, trace_of(scenario).head(10), Engine(scenario, "compute", 1.3), lambda line: None)
    from kvbaton.plan.kv_math import Sharding
    from kvbaton.plan.sizing import Layout

    single = sizer.fleet(Layout(0, 2, Sharding(tp=2), Sharding(tp=2), 2048, 2048))
    pair = sizer.fleet(Layout(1, 1, Sharding(tp=2), Sharding(tp=2), 2048, 2048))
    assert {pool.worker for pool in (*single.pools, *pair.pools)} == {single.pools[0].worker}
    assert single.admission_s == pair.admission_s


def test_headroom_follows_burstiness() -> None:
    scenario = parse({"workload": {"prompt_tokens": 10, "output_tokens": 10}, "model": {"preset": "Llama-3.1-8B"}})
    trace = trace_of(scenario).head(500)
    assert 0 < headroom(trace, 10.0) < headroom(trace, 1.0) <= 0.5


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"workload": {"prompt_tokens": 10}}, "workload.trace"),
        ({"workload": {"prompt_tokens": 10, "output_tokens": 10, "rat": 1}}, "rat"),
        ({"slo": {"attainment": 1.5}}, "slo.attainment"),
        ({"model": {}}, "model.preset"),
        ({"hardware": {"max_gpus": "many"}}, "max_gpus"),
        ({"workload": {"prompt_tokens": 10, "output_tokens": 10, "rate": -1.0}}, "workload.rate"),
        ({"workload": {"prompt_tokens": 0, "output_tokens": 10}}, "workload.prompt_tokens"),
        ({"workload": {"prompt_tokens": 10, "output_tokens": 10, "requests": 0}}, "workload.requests"),
        ({"workload": {"trace": "t.jsonl", "shared_prefix": 0.5}}, "workload.shared_prefix"),
        ({"hardware": {"usd_per_gpu_hour": 0}}, "hardware.usd_per_gpu_hour"),
        ({"hardware": {"gpu": {"bf16_tflops": 100.0}}}, "memory_gb"),
        ({"engine": {"mfu": 1.5}}, "engine.mfu"),
        ({"engine": {"rows": "r.csv", "tables": "vllm"}}, "engine"),
        ({"engine": {"rows": "r.csv", "mfu": 0.5}}, "engine.rows"),
        ({"search": {"chunk_budgets": []}}, "search.chunk_budgets"),
        ({"search": {"tp": [0]}}, "search.tp"),
        ({"search": {"precision": 0}}, "search.precision"),
        ({"search": {"verify": 0}}, "search.verify"),
    ],
)
def test_bad_scenarios_are_refused_by_name(change: dict, field: str) -> None:
    good = {"workload": {"prompt_tokens": 10, "output_tokens": 10}, "model": {"preset": "Llama-3.1-8B"}}
    with pytest.raises(LocalError) as caught:
        parse({**good, **change})
    assert field in str(caught.value.field)


@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_scenarios_parse(path: Path) -> None:
    scenario = load(path)
    assert trace_of(scenario).requests
    assert Engine(scenario).handoff().token_bytes > 0


def test_commands(tmp_path: Path) -> None:
    runner = CliRunner()
    kv = runner.invoke(kv_command, ["Llama-3.1-70B", "-t", "8192", "--fabric", "100G", "--json"])
    assert kv.exit_code == 0
    data = json.loads(kv.stdout)
    assert data["token_bytes"] == 327_680
    assert data["prompts"][0]["fabrics"][0]["floor_s"] == pytest.approx(0.2147, abs=1e-4)
    shown = runner.invoke(kv_command, ["gpt-oss-120b"]).stdout
    assert "18 sliding layers x 8 KV heads x 2 x 64 x 2 B" in shown
    unknown = runner.invoke(kv_command, ["no-such-model"])
    assert (unknown.exit_code, unknown.stderr.count("\n")) == (2, 1)
    done = runner.invoke(plan_command, [str(profile_scenario(tmp_path)), "--json", "--html", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "small"
    assert "requests/s" in done.stderr
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    missing = runner.invoke(plan_command, [str(tmp_path / "none.toml")])
    assert missing.exit_code == 2
    assert runner.invoke(advise_command, []).exit_code == 2


def test_the_planner_never_loads_torch() -> None:
    code = (
        "import pkgutil, importlib, sys, kvbaton.plan as p\n"
        "[importlib.import_module(f'kvbaton.plan.{m.name}') for m in pkgutil.iter_modules(p.__path__)]\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def reduced(path: Path) -> Scenario:
    """Enough of it for the verdict: two fleets of each arm simulated, shorter runs, no sensitivity."""
    scenario = load(path)
    search = msgspec.structs.replace(scenario.search, verify=2, sensitivity=False, precision=0.08)
    workload = msgspec.structs.replace(scenario.workload, requests=150)
    return msgspec.structs.replace(scenario, search=search, workload=workload)


def decided(scenario: Scenario) -> Decision:
    return decide(Sizer(scenario, trace_of(scenario), Engine(scenario), lambda line: None))


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(SCENARIOS.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_scenarios_get_the_verdict_their_name_says(path: Path) -> None:
    found = decided(reduced(path))
    expected = {"split": "split", "stay": "stay", "unsure": "not enough evidence"}[path.stem.split("_")[0]]
    assert found.verdict == expected, found.reason
    assert bool(found.measure_next) == (expected == "not enough evidence")


@pytest.mark.slow
def test_it_is_the_cache_hits_that_make_the_scenario_of_that_name_stay() -> None:
    scenario = reduced(SCENARIOS / "stay_high_cache_hit.toml")
    without = msgspec.structs.replace(scenario.workload, shared_prefix=0.0)
    found = decided(msgspec.structs.replace(scenario, workload=without))
    assert found.verdict == "split", found.reason
