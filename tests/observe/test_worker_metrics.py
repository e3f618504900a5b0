"""The phases of a request as a worker tells them: a histogram moves for requests that have the phase, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from router.test_real_fleet import real_fleet
from workers.scripted import ScriptedWorker

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.workers.protocol import RequestReport
from kvbaton.workers.server import ServerOptions, WorkerServer

HAND_OFF = ("transfer", "exposed_transfer", "decode_queue")


def counts(server: WorkerServer) -> dict[tuple[str, str], tuple[float, float]]:
    """(samples, sum) of each histogram by (name, path)."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for family in text_string_to_metric_families(server.metrics.exposition().decode()):
        if family.type == "histogram":
            sums = {s.labels.get("path", ""): s.value for s in family.samples if s.name.endswith("_sum")}
            for sample in family.samples:
                if sample.name.endswith("_count"):
                    path = sample.labels.get("path", "")
                    found[family.name.removeprefix("kvbaton_worker_"), path] = (sample.value, sums[path])
    return found


def server_of(tiny_model_dir: Path) -> WorkerServer:
    worker = ScriptedWorker(Tokenizer.load(tiny_model_dir), "decode")
    return WorkerServer(worker, ServerOptions(block_size=16, internal_key="k" * 20))


def report(path: str, **more: Any) -> RequestReport:
    return RequestReport(path, 40, 0, 40, 5, **{"queue_s": 0.1, "prefill_s": 0.2, **more})


def test_a_hand_off_has_every_phase_and_its_bandwidth(tiny_model_dir: Path) -> None:
    server = server_of(tiny_model_dir)
    server.observe(report("remote", transfer_bytes=6_000_000, transfer_s=0.3, exposed_s=0.04, decode_queue_s=0.05,
                          first_step_s=0.06))  # fmt: skip
    found = counts(server)
    assert found["queue_seconds", "remote"] == (1, 0.1) and found["prefill_seconds", "remote"] == (1, 0.2)
    assert found["transfer_seconds", ""] == (1, 0.3) and found["exposed_transfer_seconds", ""] == (1, 0.04)
    assert found["decode_queue_seconds", ""] == (1, 0.05) and found["first_step_seconds", "remote"] == (1, 0.06)
    assert found["transfer_bytes_per_second", ""] == (1, 6_000_000 / 0.3)


def test_what_did_not_happen_is_no_sample_of_zero(tiny_model_dir: Path) -> None:
    """A prompt computed here was not transferred; one that ended at its first token had no decode step."""
    server = server_of(tiny_model_dir)
    server.observe(report("local", first_step_s=0.06))
    server.observe(report("remote"))
    found = counts(server)
    assert not any(name.startswith(("transfer", "exposed", "decode_queue")) for name, _ in found)
    assert [path for name, path in found if name == "first_step_seconds"] == ["local"]


async def test_a_real_hand_off_is_told_phase_by_phase(tiny_model_dir: Path) -> None:
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as fleet:
        await fleet.ask(prompt="the quick brown fox " * 5, temperature=0, max_tokens=4, ignore_eos=True)
        text = {}
        for member in fleet.fleet.registry.members:
            async with fleet.fleet.http.get(member.settings.url + "/metrics") as answer:
                text[member.settings.role] = await answer.text()
    for name in (*(f"{phase}_seconds" for phase in HAND_OFF), "transfer_bytes_per_second"):
        assert f'kvbaton_worker_{name}_count{{role="decode"}} 1.0' in text["decode"], name
    assert 'kvbaton_worker_first_step_seconds_count{path="remote",role="decode"} 1.0' in text["decode"]
    for gauge in ("receiving_requests", "reservations_refused_total"):
        assert f'kvbaton_worker_{gauge}{{role="decode"}} 0.0' in text["decode"]
    assert 'kvbaton_worker_held_requests{role="prefill"}' in text["prefill"]
