"""Real processes are signalled, and pods are deleted through a real HTTP server that speaks that part of the API."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
from aiohttp import web

from kvbaton.drill.killer import ROUTERS, Kubernetes, LocalProcesses
from kvbaton.types import LocalError, RemoteError


@asynccontextmanager
async def sleeper(*words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; print('here', flush=True); sys.stdin.read()", *words,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    await process.stdout.readline()
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def status_becomes(pid: int, *wanted: str) -> None:
    async with asyncio.timeout(60):
        while psutil.Process(pid).status() not in wanted:  # noqa: ASYNC110 (the kernel tells nobody)
            await asyncio.sleep(0.005)


async def test_signals_freeze_thaw_and_kill_the_process_of_that_name() -> None:
    async with sleeper("kvbaton") as process:
        frozen = False

        async def pid_of(name: str) -> int | None:
            return process.pid if name == "decode-0" and not frozen else None  # one that is frozen tells nothing

        killer = LocalProcesses(pid_of)
        assert str(process.pid) in await killer.freeze("decode-0")
        await status_becomes(process.pid, "stopped")
        frozen = True
        await killer.thaw("decode-0")
        frozen = False
        await status_becomes(process.pid, "sleeping", "running")
        assert "SIGKILL" in await killer.kill("decode-0")
        assert await process.wait() == -9
        with pytest.raises(RemoteError, match="no process now"):
            await killer.kill("decode-1")


async def test_what_a_worker_started_is_frozen_and_thawed_with_it() -> None:
    """The ranks of a worker, or the server of another engine: else that would serve on."""
    script = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read()'],"
        " stdin=subprocess.PIPE); print(child.pid, flush=True); sys.stdin.read()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, "kvbaton", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        child = int(await process.stdout.readline())

        async def pid_of(name: str) -> int | None:
            return process.pid

        killer = LocalProcesses(pid_of)
        assert "1 of its own" in await killer.freeze("prefill-0")
        await status_becomes(process.pid, "stopped")
        await status_becomes(child, "stopped")
        await killer.thaw("prefill-0")
        await status_becomes(process.pid, "sleeping", "running")
        await status_becomes(child, "sleeping", "running")
    finally:
        process.kill()
        await process.wait()


async def test_a_process_that_is_something_else_is_left_alone() -> None:
    """Process ids are used again; a late signal must not hit a stranger."""
    async with sleeper("stranger") as process:

        async def pid_of(name: str) -> int | None:
            return process.pid

        with pytest.raises(RemoteError, match="something else now"):
            await LocalProcesses(pid_of).kill("decode-0")
        assert process.returncode is None and psutil.pid_exists(process.pid)


class Cluster:
    """Pods of one namespace, as ``/api/v1/namespaces/NS/pods`` shows and deletes them."""

    def __init__(self, pods: dict[str, str]) -> None:
        self.pods = pods  # name to role
        self.asked: list[tuple[str, str, dict, str]] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._list)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods/{name}", self._one)
        app.router.add_delete("/api/v1/namespaces/{namespace}/pods/{name}", self._one)
        return app

    def _pod(self, name: str) -> dict:
        labels = {"kvbaton.dev/role": self.pods[name]}
        metadata = {"name": name, "namespace": "serving", "uid": f"uid-of-{name}", "labels": labels}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "status": {"phase": "Running"}}

    async def _list(self, request: web.Request) -> web.Response:
        role = request.query["labelSelector"].removeprefix("kvbaton.dev/role=")
        items = [self._pod(name) for name, its in self.pods.items() if its == role]
        return web.json_response({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": items})

    async def _one(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        authorization = request.headers.get("authorization", "")
        body = await request.json() if request.can_read_body else {}
        self.asked.append((request.method, request.path, {**body, **request.query}, authorization))
        if authorization != "Bearer secret":
            return _failure(401, "Unauthorized")
        if name not in self.pods:
            return _failure(404, "NotFound")
        pod = self._pod(name)
        if request.method == "DELETE":
            del self.pods[name]
        return web.json_response(pod)


def _failure(code: int, reason: str) -> web.Response:
    body = {"apiVersion": "v1", "kind": "Status", "status": "Failure", "reason": reason, "code": code}
    return web.json_response(body, status=code, reason=reason)


@asynccontextmanager
async def api_server(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str = "secret"
) -> AsyncIterator[None]:
    """Reached as any cluster from outside is: by a kubeconfig."""
    runner = web.AppRunner(cluster.app())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps(config))
    monkeypatch.setattr("kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    try:
        yield
    finally:
        await runner.cleanup()


@pytest.fixture
def cluster() -> Cluster:
    pytest.importorskip("kubernetes_asyncio")
    return Cluster({"serving-decode-x1": "decode", "serving-prefill-y2": "prefill", "serving-router-z3": "router"})


async def test_pods_are_deleted_without_grace(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api_server(cluster, tmp_path, monkeypatch):
        killer = Kubernetes("serving", ROUTERS)
        await killer.check(["serving-decode-x1", "serving-prefill-y2"])
        assert await killer.kill("serving-decode-x1") == "deleted pod serving-decode-x1, uid uid-of-serving-decode-x1"
        assert await killer.kill("router") == "deleted pod serving-router-z3, uid uid-of-serving-router-z3"
    assert list(cluster.pods) == ["serving-prefill-y2"]
    method, path, options, authorization = cluster.asked[2]
    assert (method, path) == ("DELETE", "/api/v1/namespaces/serving/pods/serving-decode-x1")
    assert str(options["gracePeriodSeconds"]) == "0" and authorization == "Bearer secret"


async def test_what_the_api_server_refuses_is_told(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with api_server(cluster, tmp_path, monkeypatch):
        killer = Kubernetes("serving", ROUTERS)
        with pytest.raises(RemoteError, match="404"):
            await killer.kill("nobody")
        with pytest.raises(LocalError, match="nobody is no pod"):
            await killer.check(["nobody"])
        with pytest.raises(LocalError, match="cannot be frozen"):
            await killer.freeze("serving-decode-x1")
        del cluster.pods["serving-router-z3"]
        with pytest.raises(RemoteError, match="no pod of"):
            await killer.kill("router")
    async with api_server(cluster, tmp_path, monkeypatch, token="stolen"):
        with pytest.raises(RemoteError, match="401"):
            await killer.kill("serving-decode-x1")
    with pytest.raises(RemoteError, match="no answer"):
        await killer.kill("serving-decode-x1")
    assert "serving-decode-x1" in cluster.pods
