"""The alerts: what they name exists, Prometheus takes them, they fire on trouble and are silent without."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvbaton.deploy.dashboard import render_dashboard, rows
from kvbaton.deploy.queries import metric, series, share
from kvbaton.deploy.rules import Gates, alerts, render_rules, render_runbooks
from kvbaton.deploy.scaling import render_scalers
from kvbaton.deploy.spec import DeploySpec, Pool
from kvbaton.observe.metrics import METRICS
from kvbaton.types import LocalError

ROOT = Path(__file__).resolve().parents[2]
GATES = Gates(ttft_s=1.0, tpot_s=0.05, ratio_low=4.0, ratio_high=16.0)


def test_the_runbooks_are_those_of_the_table() -> None:
    assert (ROOT / "docs" / "runbooks.md").read_text() == render_runbooks()


def test_every_alert_is_named_once_and_can_be_acted_on() -> None:
    found = alerts(GATES)
    assert len({alert.name for alert in found}) == len(found)
    for alert in found:
        assert len(alert.runbook.split()) >= 20, f"{alert.name} tells nobody what to do"
        assert f"## {alert.name}" in (ROOT / "docs" / "runbooks.md").read_text()


def test_a_query_about_nothing_is_refused() -> None:
    with pytest.raises(KeyError):
        metric("kvbaton_no_such_thing")
    with pytest.raises(KeyError, match="no label"):
        series("kvbaton_router_requests_total", colour="red")
    with pytest.raises(KeyError, match="histogram"):
        series("kvbaton_router_ttft_seconds")
    with pytest.raises(KeyError, match="counter"):
        series("kvbaton_router_requests_total", "_bucket")
    assert share("a", "b") == "(a) / ((b) > 0)"


def test_no_band_no_drift_alert() -> None:
    assert "KvbatonRatioDrift" not in {alert.name for alert in alerts(Gates())}


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"ttft_s": 0}, "ttft_s"),
        ({"tpot_s": -1}, "tpot_s"),
        ({"ratio_low": 1.0}, "ratio_low"),
        ({"ratio_low": 3.0, "ratio_high": 2.0}, "ratio_low"),
    ],
)
def test_gates_that_make_no_sense_are_refused(wrong: dict[str, float], field: str) -> None:
    with pytest.raises(LocalError) as caught:
        Gates(**wrong)
    assert caught.value.field == field


def test_the_dashboard_shows_both_pools_and_every_panel_says_how_to_read_it() -> None:
    board: dict[str, Any] = render_dashboard(GATES)
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"]
    boxes = [panel["gridPos"] for panel in panels]
    for i, a in enumerate(boxes):
        for b in boxes[i + 1 :]:
            apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
            assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], "two panels overlap"
    shown = " ".join(query for row in rows(GATES) for panel in row.panels for query in panel.queries.values())
    unseen = {m.name for m in METRICS if m.where == "worker" and "transfer" in m.name and m.name not in shown}
    assert unseen <= {"kvbaton_worker_transfers_total"}


# -- with Prometheus' own programs: what fires, and what does not

HEALTHY: dict[str, str] = {
    'kvbaton_router_requests_total{endpoint="chat",decision="remote",outcome="ok"}': "0+60x120",
    'kvbaton_router_decisions_total{decision="remote"}': "0+60x120",
    "kvbaton_router_prompt_tokens_total": "0+60000x120",
    "kvbaton_router_cached_tokens_total": "0+20000x120",
    "kvbaton_router_output_tokens_total": "0+5000x120",
    'kvbaton_router_ttft_seconds_bucket{decision="remote",le="0.5"}': "0+60x120",
    'kvbaton_router_ttft_seconds_bucket{decision="remote",le="+Inf"}': "0+60x120",
    'kvbaton_router_tpot_seconds_bucket{decision="remote",le="0.025"}': "0+60x120",
    'kvbaton_router_tpot_seconds_bucket{decision="remote",le="+Inf"}': "0+60x120",
    'kvbaton_worker_exposed_transfer_seconds_bucket{role="decode",le="0.01"}': "0+60x120",
    'kvbaton_worker_exposed_transfer_seconds_bucket{role="decode",le="+Inf"}': "0+60x120",
    'kvbaton_worker_queue_seconds_bucket{role="decode",path="remote",le="0.1"}': "0+60x120",
    'kvbaton_worker_queue_seconds_bucket{role="decode",path="remote",le="+Inf"}': "0+60x120",
    "kvbaton_router_queued_requests": "0x120",
    "kvbaton_router_broken_streams_total": "0x120",
    'kvbaton_router_canary_total{result="right"}': "0+4x120",
    'kvbaton_router_canary_total{result="wrong"}': "0x120",
    'kvbaton_router_member_up{member="p-0",role="prefill"}': "1x120",
    'kvbaton_router_member_up{member="d-0",role="decode"}': "1x120",
    'kvbaton_router_member_restarts_total{member="d-0"}': "0x120",
    'kvbaton_worker_blocks{role="decode"}': "1000x120",
    'kvbaton_worker_blocks_free{role="decode"}': "700x120",
    'kvbaton_worker_waiting_prompt_tokens{role="prefill"}': "0x120",
    'kvbaton_worker_transfers_total{role="decode"}': "0+60x120",
    'kvbaton_worker_transfer_failures_total{role="decode"}': "0x120",
    'kvbaton_worker_lease_expiries_total{role="prefill"}': "0x120",
    'kvbaton_worker_failed_steps_total{role="decode"}': "0x120",
    'kvbaton_worker_preemptions_total{role="decode"}': "0x120",
}
TROUBLE: dict[str, dict[str, str]] = {
    "KvbatonWrongTokens": {'kvbaton_router_canary_total{result="wrong"}': "0x60 1x60"},
    "KvbatonTTFTAboveGate": {
        'kvbaton_router_ttft_seconds_bucket{decision="remote",le="0.5"}': "0+30x120",
        'kvbaton_router_ttft_seconds_bucket{decision="remote",le="2.5"}': "0+60x120",
    },
    "KvbatonTPOTAboveGate": {
        'kvbaton_router_tpot_seconds_bucket{decision="remote",le="0.025"}': "0+30x120",
        'kvbaton_router_tpot_seconds_bucket{decision="remote",le="0.1"}': "0+60x120",
    },
    "KvbatonBrokenStreams": {"kvbaton_router_broken_streams_total": "0+1x120"},
    "KvbatonRequestsRefused": {
        'kvbaton_router_requests_total{endpoint="chat",decision="none",outcome="rejected"}': "0+20x120"
    },
    "KvbatonTransferEatsTTFT": {
        'kvbaton_worker_exposed_transfer_seconds_bucket{role="decode",le="0.01"}': "0+30x120",
        'kvbaton_worker_exposed_transfer_seconds_bucket{role="decode",le="0.5"}': "0+60x120",
    },
    "KvbatonLeasesExpire": {'kvbaton_worker_lease_expiries_total{role="prefill"}': "0x100 0+1x20"},
    "KvbatonTransfersFail": {'kvbaton_worker_transfer_failures_total{role="decode"}': "0+2x120"},
    "KvbatonFallbackRate": {'kvbaton_router_decisions_total{decision="fallback_no_prefill"}': "0+6x120"},
    "KvbatonPrefillStarvesDecode": {
        'kvbaton_worker_queue_seconds_bucket{role="decode",path="remote",le="0.1"}': "0+30x120",
        'kvbaton_worker_queue_seconds_bucket{role="decode",path="remote",le="1.0"}': "0+60x120",
    },
    "KvbatonDecodeStarvesPrefill": {
        "kvbaton_router_queued_requests": "0x60 3x60",
        'kvbaton_worker_blocks_free{role="decode"}': "20x120",
    },
    "KvbatonQueueStands": {"kvbaton_router_queued_requests": "0x60 3x60"},
    "KvbatonRatioDrift": {"kvbaton_router_output_tokens_total": "0+1000x120"},
    "KvbatonPoolGone": {'kvbaton_router_member_up{member="p-0",role="prefill"}': "1x60 0x60"},
    "KvbatonWorkerRestarts": {'kvbaton_router_member_restarts_total{member="d-0"}': "0x100 1 2 3 4x20"},
    "KvbatonEngineStepsFail": {'kvbaton_worker_failed_steps_total{role="decode"}': "0+1x120"},
    "KvbatonPreemptions": {'kvbaton_worker_preemptions_total{role="decode"}': "0+60x120"},
}


def test_there_is_a_trouble_for_every_alert() -> None:
    assert set(TROUBLE) == {alert.name for alert in alerts(GATES)}


def fires(name: str, values: dict[str, str], firing: bool) -> dict[str, Any]:
    """A promtool test of one alert, after an hour and three quarters of one sample a minute."""
    query = f'count(ALERTS{{alertname="{name}",alertstate="firing"}}) or vector(0)'
    expected = [{"value": 1.0 if firing else 0.0, "labels": "{}"}]
    return {
        "interval": "1m",
        "input_series": [{"series": series_name, "values": text} for series_name, text in values.items()],
        "promql_expr_test": [{"expr": query, "eval_time": "118m", "exp_samples": expected}],
    }


needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="Prometheus is not installed")


def run_promtool(tmp_path: Path, tests: list[dict[str, Any]]) -> None:
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(render_rules(GATES)))
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": tests})
    )
    for arguments in (["check", "rules", "rules.yaml"], ["test", "rules", "test.yaml"]):
        done = subprocess.run(["promtool", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.peer
@needs_promtool
def test_a_healthy_fleet_raises_nothing_and_a_silent_one_neither(tmp_path: Path) -> None:
    tests = []
    for values in (HEALTHY, {name: text.split("+")[0].split("x")[0] + "x120" for name, text in HEALTHY.items()}):
        tests += [fires(alert.name, values, firing=False) for alert in alerts(GATES)]
    run_promtool(tmp_path, tests)


@pytest.mark.peer
@needs_promtool
def test_each_trouble_raises_its_alert(tmp_path: Path) -> None:
    run_promtool(tmp_path, [fires(name, {**HEALTHY, **bad}, firing=True) for name, bad in TROUBLE.items()])


# -- what KEDA asks: a number always while somebody is scraped, nothing when nobody is

SCALED = DeploySpec("m", "k:1", prefill=Pool(1, 4), decode=Pool(1, 4))
QUERIES = {
    f"{scaler['metadata']['name'].removeprefix('kvbaton-')} {trigger['name']}": trigger["metadata"]["query"]
    for scaler in render_scalers(SCALED)
    for trigger in scaler["spec"]["triggers"]
}
IDLE: dict[str, str] = {
    'kvbaton_worker_blocks{role="decode"}': "1000x10",
    'kvbaton_worker_blocks_free{role="decode"}': "1000x10",
    'kvbaton_worker_waiting_prompt_tokens{role="prefill"}': "0x10",
    'kvbaton_worker_running_requests{role="decode"}': "0x10",
    'kvbaton_worker_waiting_requests{role="decode"}': "0x10",
    "kvbaton_router_queued_requests": "0x10",
}
BUSY: dict[str, str] = {
    **IDLE,
    'kvbaton_worker_blocks_free{role="decode"}': "575x10",
    'kvbaton_worker_waiting_prompt_tokens{role="prefill"}': "5000x10",
    'kvbaton_worker_running_requests{role="decode"}': "20x10",
    'kvbaton_worker_waiting_requests{role="decode"}': "3x10",
    "kvbaton_router_queued_requests": "4x10",
    'kvbaton_worker_queue_seconds_bucket{role="decode",path="remote",le="1"}': "0+60x10",
    'kvbaton_worker_queue_seconds_bucket{role="decode",path="remote",le="+Inf"}': "0+60x10",
}
# A histogram that exists and does not grow: its quantile is no number.
STILL = {name: "60x10" if "queue_seconds" in name else text for name, text in {**BUSY, **IDLE}.items()}


def answers(values: dict[str, str], expected: dict[str, float | None]) -> dict[str, Any]:
    """None: no answer at all."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": text} for name, text in values.items()],
        "promql_expr_test": [
            {"expr": QUERIES[name], "eval_time": "8m",
             "exp_samples": [] if value is None else [{"value": value, "labels": "{}"}]}
            for name, value in expected.items()
        ],
    }  # fmt: skip


@pytest.mark.peer
@needs_promtool
def test_scalers_get_zero_from_an_idle_fleet_and_nothing_from_one_that_is_not_scraped(tmp_path: Path) -> None:
    zero = dict.fromkeys(QUERIES, 0.0)
    full = {**BUSY, 'kvbaton_worker_blocks_free{role="decode"}': "100x10"}
    unseen = {name: text for name, text in BUSY.items() if "decode" not in name}
    run_promtool(tmp_path, [
        answers(IDLE, zero),
        answers(STILL, zero),
        answers(BUSY, {"prefill waiting-tokens": 5000, "prefill queue-delay": 0.95, "decode sequences": 27,
                       "decode blocks": (1 - 575 / 1000) / 0.85}),
        # Prompts that wait because decode is full are no reason for more prefill.
        answers(full, {"prefill waiting-tokens": 0, "prefill queue-delay": 0,
                       "decode blocks": (1 - 100 / 1000) / 0.85}),
        answers({}, dict.fromkeys(QUERIES)),
        answers(unseen, dict.fromkeys(QUERIES)),
    ])  # fmt: skip


def test_a_query_without_an_answer_is_an_error_for_keda() -> None:
    for scaler in render_scalers(SCALED):
        for trigger in scaler["spec"]["triggers"]:
            assert trigger["metadata"]["ignoreNullValues"] == "false"
        assert scaler["spec"]["fallback"]["behavior"] == "currentReplicasIfHigher"
