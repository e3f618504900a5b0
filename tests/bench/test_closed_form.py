"""Timing, for real: a scripted server in its own process, one stream and five hundred, against the closed form.

Slow and alone on a core, because it is about milliseconds (`make test-slow`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import uvloop

from kvbaton.bench.http_stream import HttpPool
from kvbaton.bench.runner import run_load
from kvbaton.bench.samples import Run
from kvbaton.bench.scripted import Played
from kvbaton.bench.summary import RunSummary, summarize_run
from kvbaton.bench.workload import LoadSpec

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def ahead_of_the_neighbours() -> Iterator[None]:
    """Real-time priority for client and server where that is allowed: what is tested is not who else is busy here."""
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    yield
    os.sched_setscheduler(0, *before)


@contextmanager
def scripted(first_ms: float, gap_ms: float, tokens: int) -> Iterator[str]:
    command = [sys.executable, "-m", "kvbaton.bench.scripted"]
    command += ["--first-ms", str(first_ms), "--gap-ms", str(gap_ms), "--tokens", str(tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()
            server.wait(10)


def measure(url: str, rate: float, num: int) -> tuple[Run, list[Played]]:
    spec = LoadSpec(
        url,
        arrivals="constant",
        rate_per_s=rate,
        steady_s=num / rate,
        input="8",
        tokenizer="none",
        warmup_requests=0,
    )

    async def both() -> tuple[Run, list[Played]]:
        run = await run_load(spec)
        pool = HttpPool(url, time.monotonic)
        _, body = await pool.get("/played")
        pool.close()
        return run, [Played(**row) for row in json.loads(body)]

    return uvloop.run(both())


def near(value: float | None, expected_s: float) -> bool:
    return value is not None and abs(value - expected_s) <= max(0.001, 0.01 * expected_s)


@pytest.mark.parametrize(
    ("rate", "num", "first_ms", "gap_ms", "tokens"), [(1, 1, 200, 50, 40), (200, 500, 1000, 250, 12)]
)
def test_every_statistic_equals_the_closed_form(
    rate: float, num: int, first_ms: float, gap_ms: float, tokens: int
) -> None:
    with scripted(first_ms, gap_ms, tokens) as url:
        run, played = measure(url, rate, num)
    assert run.footer.client.max_in_flight == num
    found = summarize_run(run)
    wrong = differences(found, first_ms / 1e3, gap_ms / 1e3, tokens)
    assert not wrong, f"{wrong}; client {run.footer.client}; server late by {server_lateness(played, first_ms, gap_ms)}"


def differences(found: RunSummary, first_s: float, gap_s: float, tokens: int) -> list[str]:
    expected = {"ttft": first_s, "tpot": gap_s, "itl": gap_s, "icl": gap_s, "e2e": first_s + gap_s * (tokens - 1)}
    points = ("mean", "p50", "p90", "p95", "p99")
    return [
        f"{metric} {point} {found.p(metric, point)} is not {value}"
        for metric, value in expected.items()
        for point in points
        if not near(found.p(metric, point), value)
    ]


def server_lateness(played: list[Played], first_ms: float, gap_ms: float) -> str:
    late = sorted(
        (wrote - one.read_s) * 1e3 - (first_ms + gap_ms * number)
        for one in played
        for number, wrote in enumerate(one.writes_s[1:-1])
    )
    return f"p50 {late[len(late) // 2]:.2f} ms, p99 {late[int(len(late) * 0.99)]:.2f} ms"
