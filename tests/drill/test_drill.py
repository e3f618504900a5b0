"""Whole drills on real fleets of a tiny model: what passes, what must not, and the command line around it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import IO

import msgspec
import psutil
import pytest

from kvbaton.cli.drill_commands import up_flags
from kvbaton.cli.main import main
from kvbaton.drill import fleet
from kvbaton.drill.killer import LocalProcesses
from kvbaton.drill.report import sentence, summary_text, write_reports
from kvbaton.drill.run import DrillRecord, Settings, _lacking, _schedule, drill
from kvbaton.drill.scenarios import BY_NAME, NEEDS, SCENARIOS, Scenario
from kvbaton.drill.stage import Stage
from kvbaton.drill.tiny_model import write_tiny_model
from kvbaton.drill.verdict import Promise
from kvbaton.router import control

# On a machine that is busy with other things requests pile up: that must not decide.
PATIENT = ("--max-inflight=100000",)
OWN = {"prefill": 1, "decode": 2, "transport": "tcp", "model": "tiny", "up_flag": PATIENT, "report": None}


@pytest.fixture
def runtime_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path_factory.mktemp("run")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(path))
    return path


async def _nothing(stage: Stage) -> None:
    stage.note("looks away")


async def _tampered(stage: Stage) -> None:
    """The drill itself must notice: one recorded answer is changed, as if the fleet answered wrongly from now on."""
    stage.strikes("an answer is wrong from now on")
    canary = stage.traffic.prompts[0]
    stage.traffic.prompts[0] = msgspec.structs.replace(canary, answer="?" + canary.answer)

    async def asked() -> bool:
        return any(sample.outcome == "wrong" for sample in stage.traffic.samples)

    await stage.until(asked, "a wrong answer to be seen")
    stage.traffic.prompts[0] = canary


NEVER = Scenario("never", "nothing happens", _nothing, Promise("nothing"))
TAMPERED = Scenario("tampered", "wrong answers", _tampered, Promise("never"))


async def test_a_drill_passes_what_is_right_and_nothing_else(tmp_path: Path, runtime_directory: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    scenarios = [BY_NAME[name] for name in ("decode-killed-streaming", "kv-corrupted", "role-switched")]
    told: list[str] = []
    kept: list[DrillRecord] = []
    settings = Settings(seed=3, rate_per_s=1.0, deadline_s=600.0)
    async with fleet.started(up_flags(OWN, tmp_path), logs) as target:
        record = await drill(target, [*scenarios, NEVER, TAMPERED], settings, told.append, kept.append)
        pids = [process.pid for process in (await target.command(control.Command("status"))).processes]
    assert record.doubtful == [] and record.stopped == "" and not record.passed
    assert [len(each.results) for each in kept] == [1, 2, 3, 4, 5]
    assert not any(each.passed for each in kept) and "cut" in kept[0].stopped, "what was cut has not passed"
    by_name = {result.name: result for result in record.results}
    assert set(by_name) == {scenario.name for scenario in (*scenarios, NEVER, TAMPERED)} and len(told) == 5
    for scenario in scenarios:
        result = by_name[scenario.name]
        assert result.passed and result.wrong == result.lost == 0, (result.reasons, result.evidence)
        assert result.recover_s is not None and result.evidence
        assert result.moved_bytes > 0, "what broke was a fleet that hands over"
    assert by_name["decode-killed-streaming"].whole_s, "it was away for a while"
    assert "the fault did not strike" in by_name["never"].reasons
    assert by_name["tampered"].wrong and "wrong answer" in by_name["tampered"].reasons[0]
    assert not any(pid and psutil.pid_exists(pid) for pid in pids), "the fleet of the drill is gone"

    record = msgspec.structs.replace(record, results=[by_name[scenario.name] for scenario in scenarios])
    assert record.passed
    idle = [msgspec.structs.replace(result, moved_bytes=0) for result in record.results]
    still = msgspec.structs.replace(record, results=idle)
    assert not still.passed and "No KV went from one worker to another" in sentence(still)
    assert msgspec.structs.replace(still, fleet={"both": 3}).passed, "where there is nothing to hand over"
    paths = write_reports(record, tmp_path / "report")
    page = paths[2].read_text()
    saved = json.loads(paths[0].read_text())
    assert saved["passed"] and saved["fleet"] == {"decode": 2, "prefill": 1}
    assert [line["verdict"] for line in saved["lines"]] == ["pass 1/1"] * 3
    for scenario in scenarios:
        assert scenario.name in page and scenario.name in paths[1].read_text() and scenario.name in summary_text(record)
    assert "<script" not in page and "http" not in page.replace("http-equiv", ""), "it opens offline"


def test_the_command_starts_a_fleet_drills_it_and_reports(
    tmp_path: Path, runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["drill", "--prefill", "1", "--decode", "1", "--model", "tiny", "--transport", "shm", "--rate", "1"]
    arguments += [f"--up-flag={flag}" for flag in PATIENT]
    code = main([*arguments, "--only", "prefill-killed-idle", "--seed", "5", "--json", "--report", str(tmp_path)])
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert code == 0 and found["passed"], (shown.err, found["results"])
    assert found["results"][0]["seed"] == "5-0-prefill-killed-idle" and "pass" in shown.err
    assert {path.name for path in tmp_path.glob("report.*")} == {"report.html", "report.json", "report.md"}


def start(words: list[str], environ: dict[str, str], log: IO[bytes]) -> tuple[subprocess.Popen[bytes], str]:
    """One process of a fleet, as an operator starts it; its address once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbaton.cli.main", *words, "--json"], stdout=subprocess.PIPE, stderr=log, env=environ
    )
    assert process.stdout is not None
    ready = json.loads(process.stdout.readline())
    return process, f"http://{ready['host']}:{ready['port']}"


def test_a_fleet_of_a_fleet_file_is_drilled_as_far_as_signals_reach(
    tmp_path: Path, runtime_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVBATON_INTERNAL_KEY", "a secret of this fleet")
    model = ["--model", str(write_tiny_model(tmp_path / "tiny")), "--name", "tiny"]
    engine = ["--dtype", "float32", "--kv-blocks", "512", "--transport", "tcp"]
    processes = []
    with (tmp_path / "processes.log").open("wb") as log:
        try:
            toml = f'[model]\ndir = "{tmp_path / "tiny"}"\n[router]\nport = 0\n'
            for role in ("prefill", "decode"):
                process, url = start(["worker", "--role", role, *model, *engine], dict(os.environ), log)
                processes.append(process)
                toml += f'[[workers]]\nurl = "{url}"\nrole = "{role}"\n'
            path = tmp_path / "fleet.toml"
            path.write_text(toml)
            process, url = start(["router", "--config", str(path)], dict(os.environ), log)
            processes.append(process)
            names = ("prefill-frozen", "router-killed", "kv-cut")
            only = [word for name in names for word in ("--only", name)]
            code = main(["drill", url, "--fleet", str(path), *only, "--json"])
            shown = capsys.readouterr()
            assert code == 0, shown.err
            assert all(process.poll() is None for process in processes), "a frozen one was thawed, none was killed"
        finally:
            for process in processes:
                process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
    found = {result["name"]: result for result in json.loads(shown.out)["results"]}
    assert code == 0, (found, shown.err)
    assert found["prefill-frozen"]["passed"] and not found["prefill-frozen"]["skipped"]
    assert found["router-killed"]["skipped"] == "the router's process is not known"
    assert "not a fleet of `kvbaton up`" in found["kv-cut"]["skipped"]


def test_list_names_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drill", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in listed] == [scenario.name for scenario in SCENARIOS]
    assert main(["drill", "--list", "--only", "kv-"]) == 0
    assert capsys.readouterr().out.count("\nkv-") == 2, "cut, corrupted and stalled"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--only", "nonsense", "--prefill", "1"], "only"),
        (["http://127.0.0.1:9", "--prefill", "1"], "url"),
        (["http://127.0.0.1:9"], "nothing is known of the processes"),
        ([], "no fleet of yours runs"),
        (["--runs", "0"], "--runs"),
        (["--prefill", "1", "--model", "/nowhere"], "no config.json"),
    ],
)
def test_bad_input_is_exit_code_2_with_a_reason(
    arguments: list[str], told: str, runtime_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drill", *arguments]) == 2
    shown = capsys.readouterr()
    assert told in shown.err and shown.out == ""


def test_over_all_runs_every_scenario_has_its_turn_and_the_seed_decides() -> None:
    settings = Settings(seed=4, num_runs=9, per_run=4)
    planned = list(_schedule(SCENARIOS, settings))
    assert planned == list(_schedule(SCENARIOS, settings))
    assert planned != list(_schedule(SCENARIOS, Settings(seed=5, num_runs=9, per_run=4)))
    for run in range(9):
        assert len({scenario.name for number, scenario in planned if number == run}) == 4
    assert set(Counter(scenario.name for _, scenario in planned).values()) == {2}
    assert len(list(_schedule(SCENARIOS, Settings(num_runs=2)))) == 2 * len(SCENARIOS)


async def test_a_scenario_that_needs_what_the_fleet_lacks_is_skipped_with_the_reason(
    tmp_path: Path, runtime_directory: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    flags = [flag for flag in up_flags(OWN, tmp_path) if flag not in ("--prefill", "--decode", "1", "2")]
    async with fleet.started(["--colocated", "1", *flags], logs) as target:
        record = await drill(target, [BY_NAME["kv-cut"], BY_NAME["drain-under-load"]], Settings(), lambda line: None)
    assert {result.name: result.skipped for result in record.results} == {
        "kv-cut": "it has no prefill pool and decode pool",
        "drain-under-load": "it has only one worker",
    }
    assert not record.passed, "nothing was rehearsed"


async def test_a_frozen_process_is_thawed_whatever_becomes_of_the_scenario() -> None:
    thawed: list[str] = []

    class Notes:
        can_freeze = True

        async def kill(self, name: str) -> str:
            raise AssertionError

        async def freeze(self, name: str) -> str:
            return f"froze {name}"

        async def thaw(self, name: str) -> str:
            thawed.append(name)
            return f"thawed {name}"

    target = fleet.of_router("http://127.0.0.1:9", Notes(), {}, "")
    stage = Stage(target, None, random.Random(0), Counter())  # type: ignore[arg-type]
    await stage.freeze("decode-0")
    await stage.put_right()
    assert thawed == ["decode-0"] and [mark.what for mark in stage.marks] == ["froze decode-0", "thawed decode-0"]


async def _no_process(name: str) -> int | None:
    return None


@pytest.mark.parametrize(("engine", "skipped"), [("embedded", []), ("vllm", ["kv-corrupted"])])
def test_of_another_engines_kv_only_what_can_be_reached_is_broken(engine: str, skipped: list[str]) -> None:
    target = fleet.Target("http://router", LocalProcesses(_no_process), Path("control"), engine=engine)
    lacking = _lacking(target, Counter({"prefill": 1, "decode": 1}))
    assert [scenario.name for scenario in SCENARIOS if scenario.needs & lacking] == skipped
    assert all("own way" in NEEDS[need] for need in lacking)
