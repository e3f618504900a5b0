"""The client against a real server that plays scripts: failures, limits, due instants, warm-up."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from kvbaton.bench import stats
from kvbaton.bench.arrivals import Phases
from kvbaton.bench.client import ClientConfig, LoadClient, PlannedRequest
from kvbaton.bench.samples import RequestSample
from kvbaton.bench.scripted import Script, ScriptedServer, chat_delta, even_script, sse, usage_chunk

BODY = json.dumps({"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True}).encode()


def plan(times: list[float], phase: Any = "steady") -> list[PlannedRequest]:
    return [PlannedRequest(number, phase, time, BODY, 1, 32) for number, time in enumerate(times)]


def choose(script: Script) -> Callable[[int, dict[str, Any]], Script]:
    return lambda number, body: script


async def run(server: ScriptedServer, times: list[float], **config: Any) -> tuple[list[RequestSample], LoadClient]:
    client = LoadClient(ClientConfig(server.url, **config))
    samples, client_report = await client.run_open(plan(times))
    client.pool.close()
    assert client_report.chunks_per_s >= 0
    return sorted(samples, key=lambda sample: sample.index), client


async def test_a_whole_stream_is_measured_against_what_the_server_did() -> None:
    async with ScriptedServer(choose(even_script(0.05, 0.01, 10))) as server:
        samples, client = await run(server, [0.0, 0.02, 0.04])
    for sample, played in zip(samples, server.played, strict=True):
        assert sample.ok and sample.output_tokens == 10 and sample.counted_by == "usage"
        # The read instants come after the writes of the same chunks, in the same order (both are monotonic time).
        reads = [time + client.zero_s for time, _ in sample.visible()]
        assert all(read >= wrote - 1e-4 for read, wrote in zip(reads, played.writes_s[1:11], strict=True))
        assert reads == sorted(reads)
    assert len({sample.closed_s for sample in samples}) == 3


async def test_requests_leave_when_they_are_due_not_when_the_server_is_ready() -> None:
    async with ScriptedServer(choose(even_script(0.2, 0.0, 1))) as server:
        samples, client = await run(server, [0.0, 0.01, 0.02, 0.03])
    first_answer_s = min(played.writes_s[1] for played in server.played) - client.zero_s
    assert all(sample.sent_s is not None and sample.sent_s < first_answer_s for sample in samples)
    assert len(server.played) == 4


async def test_bm_14_waiting_for_a_permit_is_latency_and_service_is_shown_apart() -> None:
    async with ScriptedServer(choose(even_script(0.02, 0.0, 1)), slots=1) as server:
        samples, _ = await run(server, [0.002 * n for n in range(40)], max_concurrency=1)
    last = samples[-1]
    latency, service = stats.e2e_s(last), stats.service_s(last)
    assert latency is not None and service is not None
    # 40 requests of at least 20 ms through one slot: the last one, due at 78 ms, ends at 800 ms at the earliest.
    assert latency >= 0.72 and service < latency / 2
    found = stats.rates(samples)
    assert found.offered_per_s == pytest.approx(500) and found.achieved_per_s <= 50


async def test_bm_09_bm_10_every_way_to_fail_is_listed_and_none_gives_latency() -> None:
    ten = [(0.001 * n, chat_delta(content="x")) for n in range(10)]
    scripts = [
        Script([*ten, (0.01, sse({"error": {"message": "kv lost"}}) + sse(b"[DONE]"))]),
        Script(ten),
        Script(ten, drop_at_end=True),
        Script([(0.001, b'{"error": {"message": "busy"}}')], status=503),
        Script([(0.0, chat_delta(role="assistant"))], hang=True),
        Script([(0.0, sse(b"{broken"))]),
        even_script(0.01, 0.001, 3),
    ]
    async with ScriptedServer(lambda number, body: scripts[number]) as server:
        samples, client = await run(server, [0.01 * n for n in range(7)], timeout_s=0.5)
    assert [sample.ok for sample in samples] == [False] * 6 + [True]
    reasons = " | ".join(stats.failures(samples))
    for word in ("kv lost", "early end", "connection lost", "HTTP 503", "no complete answer within 0.5 s", "malformed"):
        assert word in reasons
    assert "busy" in str(samples[3].error)
    assert client.progress.failed == 6
    assert stats.rates(samples).output_tokens == 3


async def test_a_server_that_is_not_there_is_a_failure_of_each_request() -> None:
    async with ScriptedServer(choose(even_script(0, 0, 1))) as server:
        url = server.url
    client = LoadClient(ClientConfig(url))
    samples, _ = await client.run_open(plan([0.0, 0.0]))
    assert all("cannot connect" in str(sample.error) for sample in samples)


async def test_bm_15_warm_up_is_sent_first_and_kept_apart() -> None:
    def cold_then_warm(number: int, body: dict[str, Any]) -> Script:
        return even_script(0.3 if number < 3 else 0.005, 0.0, 1)

    async with ScriptedServer(cold_then_warm) as server:
        client = LoadClient(ClientConfig(server.url))
        warm = await client.warm_up(plan([0.0] * 3, "warmup"), concurrency=3)
        samples, _ = await client.run_open(plan([0.0, 0.01, 0.02]))
        client.pool.close()
    slowest = max(stats.ttft_s(sample) or 0 for sample in samples)
    fastest_cold = min(stats.ttft_s(sample) or 0 for sample in warm)
    assert slowest < fastest_cold and {sample.phase for sample in warm} == {"warmup"}


async def test_closed_loop_keeps_the_number_of_users() -> None:
    async with ScriptedServer(choose(even_script(0.01, 0.005, 3))) as server:
        client = LoadClient(ClientConfig(server.url))
        requests = [PlannedRequest(n, "steady", None, BODY, 1, 32) for n in range(12)]
        samples, report = await client.run_closed(requests, concurrency=3, stop_after_s=60)
        client.pool.close()
    assert len(samples) == 12 and report.max_in_flight == 3
    assert all(sample.ok for sample in samples)


async def test_connections_are_reused_and_a_closed_idle_one_is_not_a_failure() -> None:
    async with ScriptedServer(choose(even_script(0.0, 0.0, 1))) as server:
        client = LoadClient(ClientConfig(server.url))
        await client.warm_up(plan([0.0], "warmup"), 1)
        assert len(server.transports) == 1
        for transport in list(server.transports):
            transport.abort()
        samples, _ = await client.run_open(plan([0.0]))
        client.pool.close()
    assert samples[0].ok


async def test_a_slow_client_makes_its_own_run_invalid() -> None:
    async with ScriptedServer(choose(even_script(0.01, 0.01, 5))) as server:
        client = LoadClient(ClientConfig(server.url, max_lag_ms=0.0, max_cpu_share=0.0))
        _, report = await client.run_open(plan([0.0, 0.01]))
        client.pool.close()
    assert not report.valid and any("core" in reason for reason in report.reasons)


async def test_an_answer_without_length_ends_with_its_connection() -> None:
    import asyncio

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(BODY))
        writer.write(b"HTTP/1.1 201 Created\r\ncontent-type: text/event-stream\r\n\r\n" + chat_delta(content="a"))
        writer.write(usage_chunk(1) + sse(b"[DONE]"))
        writer.close()

    async with await asyncio.start_server(plain, "127.0.0.1", 0) as server:
        client = LoadClient(ClientConfig(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"))
        samples, _ = await client.run_open(plan([0.0]))
        client.pool.close()
    assert samples[0].ok and samples[0].status == 201


def test_phases_follow_the_due_instant() -> None:
    phases = Phases(ramp_s=1, steady_s=2, cooldown_s=1)
    assert [phases.phase_at(time) for time in (0.5, 1.0, 2.9, 3.0)] == ["ramp", "steady", "steady", "cooldown"]
