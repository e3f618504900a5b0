"""One trace for each request, through router, decode and prefill worker, as a real OTLP receiver gets it."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from router.processes import KEY, ProcessFleet

from kvbaton.cli.main import main

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
LONG = "a long prompt " * 8


class Receiver:
    """A collector's HTTP port: takes protobuf, keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.url = ""
        self._arrived = asyncio.Event()

    async def take(self, request: web.Request) -> web.Response:
        assert request.headers["content-type"] == "application/x-protobuf"
        raw = await request.read()
        if request.headers.get("content-encoding") == "gzip" and raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
        for group in ExportTraceServiceRequest.FromString(raw).resource_spans:
            service = next(each.value.string_value for each in group.resource.attributes if each.key == "service.name")
            for scope in group.scope_spans:
                self.spans += [_plain(service, span) for span in scope.spans]
        self._arrived.set()
        self._arrived.clear()
        return web.Response(content_type="application/x-protobuf")

    async def trace(self, trace_id: str, num: int) -> list[dict[str, Any]]:
        """Its spans, as soon as there are so many."""
        async with asyncio.timeout(60):
            while len(found := [span for span in self.spans if span["trace"] == trace_id]) < num:
                await self._arrived.wait()
        return found


def _plain(service: str, span: Any) -> dict[str, Any]:
    values = {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in span.attributes}
    return {
        "service": service, "name": span.name, "trace": span.trace_id.hex(), "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(), "start": span.start_time_unix_nano, "end": span.end_time_unix_nano,
        **values,
    }  # fmt: skip


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    found = Receiver()
    app = web.Application()
    app.router.add_post("/v1/traces", found.take)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


def started(fleet: ProcessFleet, environ: dict[str, str]) -> Iterator[ProcessFleet]:
    for process in (fleet.router, *fleet.workers.values()):
        process.environ = {**process.environ, **environ}
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.end()


async def ask(fleet: ProcessFleet, headers: dict[str, str] | None = None, **body: Any) -> str:
    """The request's id. A router that has just started has not heard of its workers yet, or of one only."""
    wanted = {"prompt": LONG, "max_tokens": 6, "ignore_eos": True, "stream": True, **body}
    async with aiohttp.ClientSession() as http:
        async with asyncio.timeout(60):
            while True:
                async with http.get(f"{fleet.router.url}/fleet") as page:
                    members = (await page.json())["members"]
                if members and {member["state"] for member in members} == {"up"}:
                    break
        async with http.post(f"{fleet.router.url}/v1/completions", json=wanted, headers=headers) as answer:
            await answer.read()
            assert answer.status == 200
            return answer.headers["x-kvbaton-request-id"]


async def test_a_request_is_one_trace_through_all_that_serve_it(
    tiny_model_dir: Path, tmp_path: Path, receiver: Receiver
) -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    starting = started(ProcessFleet(tiny_model_dir, tmp_path), environ)
    fleet = await asyncio.to_thread(next, starting)
    try:
        await ask(fleet, {"traceparent": f"00-{TRACE}-{CALLER}-00"})
        request_id = await ask(fleet, {"traceparent": f"00-{TRACE}-{CALLER}-01"}, prompt="Z" + LONG)
        spans = await receiver.trace(TRACE, 10)
        by_name = {(span["service"].removeprefix("kvbaton-"), span["name"]): span for span in spans}
        assert len(by_name) == len(spans), "one of each: the request that was not to be sampled left none"
        assert set(by_name) == {
            ("router", "request"), ("router", "admit"), ("router", "call"),
            ("decode", "generate"), ("decode", "hand-off"), ("decode", "decode queue"), ("decode", "decode"),
            ("prefill", "prefill for a peer"), ("prefill", "queue"), ("prefill", "prefill"),
        }  # fmt: skip
        ids = {span["id"]: span for span in spans}
        parents = {
            "request": CALLER, "generate": by_name["router", "call"]["id"],
            "prefill for a peer": by_name["decode", "hand-off"]["id"],
        }  # fmt: skip
        for span in spans:
            assert span["start"] <= span["end"], span
            assert span["parent"] == parents.get(span["name"], span["parent"])
            assert span["parent"] == CALLER or span["parent"] in ids
        root = by_name["router", "request"]
        assert root["kvbaton.request_id"] == request_id and root["kvbaton.outcome"] == "ok"
        assert root["gen_ai.usage.output_tokens"] == 6
        assert by_name["decode", "hand-off"]["kvbaton.transfer_bytes"] == root["kvbaton.transfer_bytes"] > 0
        for name in ("call", "admit"):
            assert root["start"] <= by_name["router", name]["start"] <= by_name["router", name]["end"] <= root["end"]
        assert await exemplars(fleet.router.url) == {TRACE}
    finally:
        await asyncio.to_thread(list, starting)


async def exemplars(url: str) -> set[str]:
    wanted = {"accept": "application/openmetrics-text"}
    async with aiohttp.ClientSession(headers=wanted) as http, http.get(f"{url}/metrics") as answer:
        text = await answer.text()
    families = text_string_to_metric_families(text)
    return {s.exemplar.labels["trace_id"] for family in families for s in family.samples if s.exemplar is not None}


async def test_a_timeline_shows_every_process_and_leaves_nothing_on(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starting = started(ProcessFleet(tiny_model_dir, tmp_path), {})
    fleet = await asyncio.to_thread(next, starting)
    out, over = tmp_path / "timeline.json", asyncio.Event()

    async def traffic() -> None:
        number = 0
        while not over.is_set():
            number += 1
            await ask(fleet, prompt=f"{number} {LONG}")

    sending = asyncio.create_task(traffic())
    monkeypatch.setenv("KVBATON_INTERNAL_KEY", KEY)
    urls = [process.url for process in (fleet.router, *fleet.workers.values())]
    try:
        code = await asyncio.to_thread(main, ["timeline", *urls, "--seconds", "2", "-o", str(out)])
        over.set()
        await sending
        assert code == 0
        events = json.loads(out.read_text())["traceEvents"]
        names = {event["name"] for event in events if event["ph"] == "X"}
        assert {"request", "call", "generate", "hand-off", "decode", "prefill for a peer", "prefill"} <= names
        assert {event["ph"] for event in events} == {"M", "X", "s", "f"}
        monkeypatch.setenv("KVBATON_INTERNAL_KEY", "another")
        assert await asyncio.to_thread(main, ["timeline", urls[0], "--seconds", "1", "-o", str(out)]) == 2
    finally:
        over.set()
        await asyncio.gather(sending, return_exceptions=True)
        await asyncio.to_thread(list, starting)
