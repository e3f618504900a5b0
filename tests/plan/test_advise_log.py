"""``advise --log``: the router's own log, a benchmark's samples and plain records give the same window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvbaton.bench.samples import ClientReport, RequestSample, Run, RunFooter, RunHeader, write_run
from kvbaton.bench.sse import ChunkKind
from kvbaton.cli.plan_commands import advise_command
from kvbaton.observe.log import JsonFormatter
from kvbaton.plan.advise import advise
from kvbaton.plan.advise_log import from_lines
from kvbaton.router.flight import Flight
from kvbaton.router.gateway import record_of
from kvbaton.router.lifecycle import Event
from kvbaton.router.policy import MemberView, PolicyConfig, RequestView, decide
from kvbaton.types import LocalError
from kvbaton.workers.protocol import RequestReport


def router_line(number: int) -> str:
    """As the router writes it: its own record through its own formatter."""
    report = RequestReport("remote", 2_000, 500, 1_500, 101, queue_s=0.05, decode_queue_s=0.01, prefill_s=0.3)
    flight = Flight(None, f"r{number}", 10.0, [])  # type: ignore[arg-type]  # its connection is not looked at
    for event in (Event.ACCEPT, Event.DISPATCH, Event.FIRST_BYTES, Event.COMPLETE):
        flight.lifecycle.on(event)
    members = [
        MemberView("p0", "prefill", 0, 0, 8_192, 0, 0, 8_192),
        MemberView(f"d{number % 2}", "decode", 0, 0, 8_192, 0, 0, 8_192),
    ]
    flight.decisions.append(decide(RequestView(2_000, 1, 2_000, 2_101), members, PolicyConfig(0), 0, True))
    flight.report, flight.queued_s, flight.first_byte_s = report, 0.04, 10.4
    fields = record_of(flight, "chat", None, 12.4)
    return JsonFormatter("router").line(100.0 + number, "info", "kvbaton.router.gateway", "request", fields)


def test_the_routers_log() -> None:
    other = json.dumps({"time_s": 1.0, "message": "draining"})
    seen = from_lines([other, *(router_line(number) for number in range(11))], None)
    assert (seen.requests, seen.workers, seen.seconds) == (11, 3, 10.0)
    assert (seen.prompt_tokens, seen.output_tokens) == (22_000, 1_111)
    assert seen.cached_share == pytest.approx(0.25)
    assert seen.ttft_mean_s == pytest.approx(0.4)
    assert seen.queue_mean_s == pytest.approx(0.1)
    assert seen.gap_mean_s == pytest.approx(0.02)
    assert seen.gap_p99_s is None  # the router keeps no single gaps, and none are made up
    found = advise(seen)
    assert found.prefill_share == pytest.approx(11 * 0.3 / (10.0 * 3))
    assert "gaps are unknown" in found.why


def test_a_log_without_requests_says_so() -> None:
    with pytest.raises(LocalError, match="no request that ended well"):
        from_lines([json.dumps({"message": "draining"})], None)


def sample(number: int) -> RequestSample:
    chunks = [(1.0 + 0.02 * n + (0.3 if n > 50 else 0.0), int(ChunkKind.CONTENT), 1.0) for n in range(101)]
    return RequestSample(
        number, "steady", 0.6, 0.6, 101, 2_000, closed_s=4.0 + number, status=200, output_tokens=101,
        usage_prompt_tokens=2_000, cached_tokens=500, chunks=chunks,
    )  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_samples_of_a_benchmark_have_every_gap(tmp_path: Path, suffix: str) -> None:
    client = ClientReport(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0, True, [])
    path = tmp_path / f"samples{suffix}"
    run = Run(RunHeader({}, "", {}), [sample(number) for number in range(6)], RunFooter(client, 10.0))
    write_run(path, run)
    done = CliRunner().invoke(advise_command, ["--log", str(path), "--workers", "2", "--json"])
    assert done.exit_code in (0, 1), done.stderr
    seen = json.loads(done.stdout)["window"]
    assert (seen["requests"], seen["workers"], seen["seconds"]) == (6, 2, 5.0)
    assert seen["ttft_mean_s"] == pytest.approx(0.4)
    assert seen["gap_p50_s"] == pytest.approx(0.02)
    assert seen["gap_p99_s"] == pytest.approx(0.02, rel=1e-6)  # one in a hundred is the largest that does not exceed
    assert seen["cached_share"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is no JSON object"),
        ('{"prompt_tokens": 5}', "output_tokens"),
        ('{"prompt_tokens": "5", "output_tokens": 1}', "$.prompt_tokens"),
        ('{"prompt_tokens": 5, "output_tokens": 1, "ttft_s": "soon"}', "$.ttft_s"),
        ('{"message": "request", "outcome": "ok", "report": {"num_output_tokens": 2}}', "line 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, says: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"prompt_tokens": 5, "output_tokens": 2}\n' + line + "\n")
    done = CliRunner().invoke(advise_command, ["--log", str(path)])
    assert done.exit_code == 2
    assert says in done.stderr
    assert "--log" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\xff\xfe\x00")
    for arguments in (["--log", str(path)], ["--before", str(path), "--after", str(path)]):
        done = CliRunner().invoke(advise_command, arguments)
        assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
