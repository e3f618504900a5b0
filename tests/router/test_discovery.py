"""Pods as members, against a server that speaks the API's list and watch: real HTTP, the official client's code."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from kvbaton.config import MemberSettings
from kvbaton.router.discovery import PodFollower, selector_of
from kvbaton.types import LocalError

pytest.importorskip("kubernetes_asyncio")

SELECTOR = "app.kubernetes.io/instance=fleet"


def pod(name: str, role: str | None, address: str | None = "10.0.0.1", phase: str = "Running") -> dict[str, Any]:
    labels = {"app.kubernetes.io/instance": "fleet"} | ({"kvbaton.dev/role": role} if role else {})
    return {
        "metadata": {"name": name, "namespace": "ml", "labels": labels, "resourceVersion": "1"},
        "status": {"phase": phase, **({"podIP": address} if address else {})},
    }


class ApiServer:
    """The pods of a namespace: a list with a resource version, and a watch from one on."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.version = 10
        self.too_old_below = 0
        self.num_lists = 0
        self.refuse = 0  # answers of 500 to give first
        self.queries: list[dict[str, str]] = []
        self._watchers: set[asyncio.Queue[bytes | None]] = set()

    async def serve_pods(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if self.refuse:
            self.refuse -= 1
            return web.json_response({"kind": "Status", "code": 500, "reason": "InternalError"}, status=500)
        if request.query.get("watch") not in ("true", "True"):
            self.num_lists += 1
            meta = {"resourceVersion": str(self.version)}
            return web.json_response({"kind": "PodList", "metadata": meta, "items": list(self.pods.values())})
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        if int(request.query["resourceVersion"]) < self.too_old_below:
            status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watchers.add(queue)
        try:
            while (line := await queue.get()) is not None:
                await response.write(line)
        finally:
            self._watchers.discard(queue)
        return response

    async def watched(self) -> None:
        async with asyncio.timeout(20):
            while not self._watchers:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def send(self, kind: str, item: dict[str, Any]) -> None:
        self.version += 1
        item["metadata"]["resourceVersion"] = str(self.version)
        if kind == "DELETED":
            self.pods.pop(item["metadata"]["name"], None)
        elif kind != "BOOKMARK":
            self.pods[item["metadata"]["name"]] = item
        line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
        for queue in self._watchers:
            queue.put_nowait(line)

    def send_raw(self, line: bytes | None) -> None:
        for queue in self._watchers:
            queue.put_nowait(line)


class Told:
    def __init__(self) -> None:
        self.members: list[Sequence[MemberSettings]] = []
        self._changed = asyncio.Event()

    def __call__(self, members: Sequence[MemberSettings]) -> None:
        self.members.append(members)
        self._changed.set()

    async def until(self, *names: str) -> Sequence[MemberSettings]:
        async with asyncio.timeout(20):
            while not self.members or [m.name for m in self.members[-1]] != list(names):
                self._changed.clear()
                await self._changed.wait()
        return self.members[-1]


@asynccontextmanager
async def following(server: ApiServer) -> AsyncIterator[Told]:
    from kubernetes_asyncio import client

    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ml/pods", server.serve_pods)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    told = Told()
    configuration = client.Configuration(host=f"http://127.0.0.1:{port}")
    async with client.ApiClient(configuration) as api:
        task = asyncio.create_task(PodFollower(SELECTOR, "ml", 8101, told).run(client.CoreV1Api(api)))
        try:
            yield told
        finally:
            server.send_raw(None)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await runner.cleanup()


async def test_pods_come_change_and_go() -> None:
    server = ApiServer()
    server.pods["p-0"] = pod("p-0", "prefill", "10.0.0.5")
    async with following(server) as told:
        first = await told.until("p-0")
        assert first == [MemberSettings("http://10.0.0.5:8101", "prefill", "p-0")]
        assert server.queries[0]["labelSelector"] == SELECTOR
        await server.watched()
        server.send("ADDED", pod("d-0", "decode", None, "Pending"))  # not yet
        server.send("MODIFIED", pod("d-0", "decode", "fd00::7"))
        members = await told.until("d-0", "p-0")
        assert members[0].url == "http://[fd00::7]:8101"
        draining = pod("p-0", "prefill", "10.0.0.5")
        draining["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        server.send("MODIFIED", draining)  # told to end: still there, and seen draining by the polls
        server.send("MODIFIED", pod("x", None))  # labelled, but no worker
        server.send("MODIFIED", pod("d-0", "decode", "fd00::7", "Failed"))
        await told.until("p-0")
        server.send("DELETED", pod("p-0", "prefill"))
        await told.until()
    assert server.num_lists == 1


async def test_a_version_that_is_too_old_is_listed_anew() -> None:
    server = ApiServer()
    server.pods["a"] = pod("a", "both")
    server.too_old_below = 11
    async with following(server) as told:
        await told.until("a")
        server.pods["b"] = pod("b", "both", "10.0.0.2")
        server.version = 12
        await told.until("a", "b")
    assert server.num_lists >= 2


@pytest.mark.parametrize("line", [None, b"not json\n", b'{"type": "ADDED"}\n'])
async def test_a_broken_watch_loses_nothing(line: bytes | None) -> None:
    server = ApiServer()
    server.pods["a"] = pod("a", "both")
    async with following(server) as told:
        await told.until("a")
        await server.watched()
        server.pods["b"] = pod("b", "both", "10.0.0.2")  # its event was lost
        server.refuse = 1
        server.send_raw(line)
        await told.until("a", "b")
    assert [] not in told.members, "a server that is away must not empty the fleet"


async def test_a_bookmark_and_a_repeated_event_change_nothing() -> None:
    server = ApiServer()
    server.pods["a"] = pod("a", "both")
    async with following(server) as told:
        await told.until("a")
        await server.watched()
        server.send("BOOKMARK", {"kind": "Pod", "metadata": {}})
        server.send("MODIFIED", pod("a", "both"))
        server.send("ADDED", pod("b", "both", "10.0.0.2"))
        await told.until("a", "b")
    assert len(told.members) == 2


@pytest.mark.parametrize("text", ["", "kubernetes:", "dns:x=y", "kubernetes:app"])
def test_a_bad_way_to_find_workers_is_named(text: str) -> None:
    with pytest.raises(LocalError) as caught:
        selector_of(text)
    assert caught.value.field == "discover"
