"""What strangers cannot make a fleet do by what they send: name peers, pose as a router, have addresses called."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest
from router.fleet import KEY, LONG, SHORT, Fleet, running_fleet
from router.test_auth import ALICE, bearer, keys
from workers.scripted import ScriptedWorker, serving

from kvbaton.cli.fleet_control import FleetControl
from kvbaton.config import MemberSettings, WorkerSettings
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.router import control
from kvbaton.router.door import Door
from kvbaton.types import LocalError
from kvbaton.workers.process import is_closed
from kvbaton.workers.server import ServerOptions, WorkerServer

PEER = {"host": "127.0.0.1", "port": 1}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": LONG}]}
COMPLETION: dict[str, Any] = {"prompt": LONG}
BODIES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


@pytest.fixture
async def fleet(tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    async with running_fleet(tokenizer, {"p0": "prefill", "d0": "decode"}) as found:
        yield found


def posing() -> Iterator[tuple[str, dict[str, Any] | bytes]]:
    """Bodies that say what only a router or an engine may."""
    internal = {"request_id": "r", "prompt_token_ids": [[1, 2, 3]], "prefill": PEER}
    for value in ({"do_remote_prefill": True, "remote_host": "127.0.0.1", "remote_port": 1}, {}, [], "x", 1, True):
        yield "kv_transfer_params", {"kv_transfer_params": value}
    for value in (internal, {}, [], "x", 0, False, {"prefill": PEER}):
        yield "kvbaton", {"kvbaton": value}
    yield "kvbaton", b'"kvbaton":{"prefill":{"host":"127.0.0.1","port":1}},"kvbaton":null,"kvbaton":{}'
    yield "kvbaton", b'"kv\\u0062aton":{"request_id":"r","prompt_token_ids":[[1]]}'
    yield "kv_transfer_params", b'"kv\\u005ftransfer_params":{"remote_port":1}'


@pytest.mark.parametrize("path", BODIES)
async def test_no_endpoint_takes_a_routers_or_an_engines_word_from_a_client(fleet: Fleet, path: str) -> None:
    """On the router, with and without API keys, and on every worker's own port: 400 that names the field."""

    for keyed in (False, True):
        fleet.gateway.door = Door(keys() if keyed else None, KEY.encode())
        headers = {**(bearer(ALICE) if keyed else {}), "x-kvbaton-key": "guess", "x-kvbaton-prefill": "127.0.0.1:1"}
        for field, extra in posing():
            begin = json.dumps(BODIES[path]).encode()[:-1]
            more = extra if isinstance(extra, bytes) else json.dumps(extra).encode()[1:-1]
            for url in (fleet.url, *fleet.urls.values()):
                async with fleet.http.post(url + path, data=begin + b"," + more + b"}", headers=headers) as response:
                    answer = await response.json()
                assert (response.status, answer["error"]["param"]) == (400, field), (url, extra, answer)
    assert not fleet.workers["p0"].requests and not fleet.workers["d0"].requests


async def test_what_decides_is_the_routers_whatever_stands_before_it(fleet: Fleet) -> None:
    """A body that names the object as null, and headers that name peers: the hand-off goes where the router says."""
    raw = (
        b'{"kvbaton":{"prefill":{"host":"127.0.0.1","port":1}},"kvbaton":null,"kv_transfer_params":{"remote_port":1},'
        b'"kv_transfer_params":null,"prompt":"%b"}  \n' % LONG.encode()
    )
    headers = {"x-kvbaton-decode": "d7", "x-kvbaton-request-id": "mine", "x-kvbaton-report": "{}"}
    status, _, told = await fleet.post(raw, **headers)
    assert status == 200 and told["x-kvbaton-prefill"] == "p0" and told["x-kvbaton-decode"] == "d0"
    (request, peer), *others = fleet.workers["d0"].requests
    assert not others and peer is not None and not request.request_id.startswith("mine")


class Trap:
    """An address inside the network that nobody is to call for a client."""

    def __init__(self) -> None:
        self.called: list[bytes] = []

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.called.append(await reader.read(1000))
        writer.close()

    async def __aenter__(self) -> Trap:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/latest/meta-data"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await self._server.wait_closed()


async def test_no_field_makes_anybody_call_an_address(fleet: Fleet) -> None:
    """SE-01: wherever a client can write an address. Parts that name one are refused, the rest says nothing to us."""
    async with Trap() as trap:
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": trap.url}},
            {"type": "input_image", "image_url": trap.url},
            {"type": "video_url", "video_url": {"url": trap.url}},
            {"type": "audio_url", "audio_url": {"url": trap.url}},
            {"type": "input_audio", "input_audio": {"data": trap.url}},
            {"type": "file", "file": {"file_url": trap.url, "file_id": trap.url}},
            {"type": "refusal", "refusal": trap.url},
        ]
        for url in (fleet.url, *fleet.urls.values()):
            for part in parts:
                body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]}
                async with fleet.http.post(url + "/v1/chat/completions", json=body) as response:
                    answer = await response.json()
                assert response.status == 400 and answer["error"]["param"].startswith("messages[0].content[1]")
        for field in ("user", "metadata", "safety_identifier", "prompt_cache_key", "cache_salt", "stop"):
            extra: Any = {"url": trap.url} if field == "metadata" else trap.url
            assert (await fleet.post({"prompt": SHORT, field: extra}))[0] == 200, field
        for field in ("tools", "response_format", "web_search_options", "audio", "suffix", "model"):
            assert (await fleet.post({"prompt": SHORT, field: [trap.url]}))[0] == 400, field
        where = f"127.0.0.1:{trap.port}"
        names = ("host", "x-forwarded-host", "x-forwarded-server", "x-real-ip", "x-original-url", "x-rewrite-url",
                 "forwarded", "referer", "origin", "via", "x-http-destinationurl", "x-prefiller-url",
                 "x-data-parallel-host-port", "proxy", "x-kvbaton-decode")  # fmt: skip
        for name in names:
            assert (await fleet.post({"prompt": LONG}, **{name: where}))[0] == 200, name
        host, port = fleet.url.removeprefix("http://").split(":")
        for target in (trap.url, f"//{where}/v1/models", f"http://{where}@{host}:{port}/v1/models"):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"GET {target} HTTP/1.1\r\nhost: {where}\r\nconnection: close\r\n\r\n".encode())
            async with asyncio.timeout(20):
                assert await reader.readline()
            writer.close()
        assert trap.called == []


class Redirecting:
    """A worker that sends whoever asks it elsewhere."""

    def __init__(self, to: str, status: int) -> None:
        self.to, self.status, self.num_asked = to, status, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_asked += 1
        headers = [(b"location", self.to.encode()), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize("status", [301, 307, 308])
async def test_the_fleets_key_follows_no_redirect(tokenizer: Tokenizer, status: int) -> None:
    async with (
        Trap() as trap,
        running_fleet(tokenizer, {}) as fleet,
        serving(app := Redirecting(trap.url, status)) as url,
    ):
        fleet.registry.set_members([MemberSettings(url, "both", "b0")])
        (member,) = fleet.registry.members
        await fleet.poll()
        assert app.num_asked == 1 and member.state != "up"
        body = {"name": "b0", "deadline_s": 0.0, "force": True}
        async with fleet.http.post(
            fleet.url + "/internal/members/drain", json=body, headers={"x-kvbaton-key": KEY}
        ) as response:
            assert response.status in (409, 502)
        assert app.num_asked == 2 and trap.called == []


# -- workers


async def test_a_closed_worker_generates_for_its_router_alone(tokenizer: Tokenizer) -> None:
    """Nobody gets past the router's API keys by asking a worker; probes and scrapes go on."""
    worker = ScriptedWorker(tokenizer)
    app = WorkerServer(worker, ServerOptions(block_size=16, internal_key=KEY, closed=True))
    async with serving(app) as url, aiohttp.ClientSession() as http:
        for path, body in BODIES.items():
            for headers in ({}, bearer(ALICE), {"x-kvbaton-key": "guess"}):
                async with http.post(url + path, json=body, headers=headers) as response:
                    assert (response.status, (await response.json())["error"]["code"]) == (403, "forbidden")
            async with http.post(url + path, json=body, headers={"x-kvbaton-key": KEY}) as response:
                assert response.status == 200
        assert len(worker.requests) == 2
        for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/version", 200),
                             ("/v1/models", 403), ("/internal/info", 403)):  # fmt: skip
            async with http.get(url + path) as response:
                assert response.status == status, path


def test_a_worker_is_closed_wherever_others_reach_it() -> None:
    assert not is_closed(WorkerSettings()) and is_closed(WorkerSettings(host="10.0.0.7"))
    assert is_closed(WorkerSettings(host="0.0.0.0")) and is_closed(WorkerSettings(clients="refuse"))
    assert not is_closed(WorkerSettings(host="0.0.0.0", clients="allow")), "if somebody says so"


# -- the socket of `kvbaton up`


async def test_the_fleets_own_socket_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever may write to it may change the fleet, and is told its key."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    fleet = FleetControl(cast(Any, None), cast(Any, None), {})
    async with fleet.listening() as path:
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700 and path.parent.stat().st_uid == os.getuid()
    control.directory().chmod(0o755)
    with pytest.raises(LocalError, match="not a directory of this user alone"):
        control.directory()
    control_dir = tmp_path / f"kvbaton-{os.getuid()}"
    with contextlib.suppress(OSError):
        control_dir.rmdir()
    control_dir.symlink_to(tmp_path)
    with pytest.raises((LocalError, FileExistsError)):
        control.directory()
