"""The measuring verbs as people call them: exit codes, JSON, and one line for what is wrong."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvbaton.bench.samples import read_run
from kvbaton.bench.scripted import Chooser, Script, ScriptedServer, even_script
from kvbaton.cli.bench_commands import bench_command, compare_command, verify_command


class Served:
    """A scripted server on a loop of its own, because the commands run a loop themselves."""

    def __init__(self, choose: Chooser) -> None:
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._choose = choose
        self.url = ""
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        async with ScriptedServer(self._choose) as server:
            self.url = server.url
            self._ready.set()
            await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        self._loop.close()


@pytest.fixture
def good() -> Iterator[str]:
    served = Served(lambda number, body: even_script(0.01, 0.005, 6))
    yield served.url
    served.close()


@pytest.fixture
def half_broken() -> Iterator[str]:
    refuse = Script([(0.0, b'{"error": {"message": "busy"}}')], status=503)
    served = Served(lambda number, body: refuse if number % 2 else even_script(0.01, 0.005, 6))
    yield served.url
    served.close()


LOAD = ("--tokenizer", "none", "--rate", "30", "--duration", "0.4", "--input", "4", "--quiet", "--max-lag-ms", "1e6")


def bench(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(bench_command, [url, *LOAD, *arguments])


def test_table_and_samples(good: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl.gz"
    done = bench(good, "--samples", str(path), "--gpus", "2", "--gpu-price", "3")
    assert done.exit_code == 0, done.output
    for word in ("TTFT", "TPOT", "ITL", "95% interval", "counted by usage", "GPU-hours", "client     lag"):
        assert word in done.output
    run = read_run(path)
    assert run.header.config["seed"] == 0 and run.header.versions["kvbaton"]
    assert all(sample.chunks for sample in run.samples)


def test_json_says_everything(good: str) -> None:
    done = bench(good, "--json", "--ttft-slo", "5000", "--tpot-slo", "5000")
    found = json.loads(done.stdout)
    assert done.exit_code == 0
    assert found["attainment"]["share"] == 1.0 and found["config"]["arrivals"] == "poisson"
    assert found["metrics"]["ttft"]["intervals"]["p95"]["low"] <= found["metrics"]["ttft"]["p95"]
    assert found["client"]["valid"] and found["counts"]["counted_by"] == {"usage": found["counts"]["ok"]}


def test_a_missed_gate_is_a_no(good: str) -> None:
    assert bench(good, "--ttft-slo", "0.001").exit_code == 1


def test_failures_over_the_limit_are_a_no_and_are_listed(half_broken: str) -> None:
    done = bench(half_broken, "--warmup", "0")
    assert done.exit_code == 1 and "HTTP 503" in done.output
    assert bench(half_broken, "--warmup", "0", "--max-errors", "0.9").exit_code == 0


def test_secrets_stay_out_of_the_file(good: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    bench(good, "--samples", str(path), "--api-key", "sk-secret", "--header", "x-team: blue")
    assert "sk-secret" not in path.read_text() and "blue" in path.read_text()


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--input", "zipf:3"), "input"),
        (("--rate", "-1"), "rate"),
        (("--extra-body", "[1]"), "extra_body"),
        (("--header", "nocolon"), "header"),
        (("--goodput",), "ttft_slo"),
        (("--arrivals", "trace"), "trace"),
        (("--classes", "32:64"), "classes"),
        (("--prefill-gpus", "1"), "gpus"),
        (("--prompt-format", "ids"), "prompt_format"),
    ],
)
def test_bad_input_is_one_line_with_the_field(good: str, arguments: tuple[str, ...], word: str) -> None:
    done = bench(good, *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("kvbaton: ") and word in done.stderr and done.stderr.count("\n") == 1


def test_nobody_there_is_the_endpoints_fault() -> None:
    done = CliRunner().invoke(bench_command, ["http://127.0.0.1:9", *LOAD])
    assert done.exit_code == 1 and "cannot connect" in done.stderr


def test_goodput_search(good: str) -> None:
    done = bench(good, "--goodput", "--trials", "3", "--ttft-slo", "5000", "--tpot-slo", "5000", "--json")
    found = json.loads(done.stdout)
    assert found["target"] == 0.9 and len(found["trials"]) >= 1


def test_verify_of_an_endpoint_with_itself(good: str) -> None:
    done = CliRunner().invoke(verify_command, [good, good, "--prompts", "4"])
    assert done.exit_code == 0 and done.stdout.startswith("Same answers")


SLO_MS = 2000.0  # what answers at once meets on the most loaded machine, and what waits longer on purpose never


@pytest.fixture
def slow() -> Iterator[str]:
    served = Served(lambda number, body: even_script(SLO_MS / 1e3 + 0.1, 0.005, 6))
    yield served.url
    served.close()


@pytest.mark.parametrize(
    ("one_pool", "split_fleet", "decision", "exit_code"),
    [
        ("slow", "good", "split", 0),
        ("good", "slow", "do not split", 1),
        ("good", "half_broken", "not proven", 1),
    ],
)
def test_compare_says_it_by_exit_code_and_writes_its_reports(
    one_pool: str, split_fleet: str, decision: str, exit_code: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    urls = [request.getfixturevalue(name) for name in (one_pool, split_fleet)]
    arguments = ["--url-a", urls[0], "--url-b", urls[1], *LOAD, "--warmup", "0", "--out", str(tmp_path)]
    arguments += ["--gpus", "2", "--prefill-gpus", "1", "--decode-gpus", "1", "--max-drift", "1e9"]
    done = CliRunner().invoke(compare_command, [*arguments, "--ttft-slo", str(SLO_MS), "--tpot-slo", "1e9"])
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["verdict"]["decision"], done.exit_code) == (decision, exit_code), report["verdict"]
    assert f"\n{decision.capitalize()}: " in done.stdout
    assert {path.name for path in tmp_path.iterdir()} >= {"report.html", "report.md", "report.json", "samples"}


def test_compare_needs_two_arms(tmp_path: Path) -> None:
    done = CliRunner().invoke(compare_command, ["--colocated", "2", "--out", str(tmp_path)])
    assert done.exit_code == 2 and "arm B" in done.stderr
