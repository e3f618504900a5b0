"""The security cases at the router's and the workers' doors: what a stranger sends steers nothing and costs little."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from router.fleet import LONG, SHORT, Fleet, running_fleet
from router.test_real_fleet import real_fleet

from kvbaton.engine.tokenizer import Tokenizer


@pytest.fixture
async def fleet(tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    async with running_fleet(tokenizer, {"p0": "prefill", "d0": "decode"}, max_body_bytes=300_000) as found:
        yield found


async def test_se_01_no_connection_is_opened_to_where_a_client_points(fleet: Fleet) -> None:
    """Headers and body name a listener of ours; it must never be called, and the hand-off goes where it should."""
    called: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        called.append(await reader.read(100))
        writer.close()

    trap = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = trap.sockets[0].getsockname()
    where = f"{host}:{port}"
    headers = {"x-prefiller-host-port": where, "x-prefiller-url": f"http://{where}", "x-kvbaton-prefill": where,
               "x-forwarded-host": where, "forwarded": f"host={where}"}  # fmt: skip
    status, _, told = await fleet.post({"prompt": LONG}, **headers)
    assert (status, told["x-kvbaton-prefill"]) == (200, "p0")
    params = {"remote_host": host, "remote_port": port, "remote_block_ids": [1, 2], "do_remote_prefill": True}
    for extra in ({"kv_transfer_params": params}, {"kvbaton": {"prefill": {"host": host, "port": port}}}):
        status, refused, _ = await fleet.post({"prompt": LONG, **extra})
        assert status == 400 and refused["error"]["param"] in extra
    trap.close()
    await trap.wait_closed()
    assert called == []
    (_, peer), *others = fleet.workers["d0"].requests
    assert not others and peer is not None and peer.port != port


async def test_se_05_se_12_ids_of_clients_are_keys_of_nothing(fleet: Fleet) -> None:
    """A hundred overlapping requests under one id: a hundred answers, each under an id of ours."""
    worker = fleet.workers["d0"]
    worker.gate.clear()
    asking = [asyncio.ensure_future(fleet.post({"prompt": f"{i} {LONG}", "user": "abc"}, **{"x-request-id": "abc"}))
              for i in range(100)]  # fmt: skip
    async with asyncio.timeout(30):
        while worker.num_open < 100:  # noqa: ASYNC110 (the other side is the code under test; it has no event for us)
            await asyncio.sleep(0)
    worker.gate.set()
    answers = await asyncio.gather(*asking)
    assert {status for status, _, _ in answers} == {200}
    assert {headers["x-request-id"] for _, _, headers in answers} == {"abc"}
    assert len({answer["id"] for _, answer, _ in answers}) == 100
    assert len({request.request_id for request, _ in worker.requests}) == 100
    for value in ("a" * 10_000, 'a"b', "a\tb"):
        assert (await fleet.post({"prompt": SHORT}, **{"x-request-id": value}))[0] == 400


async def test_se_10_nobody_without_the_key_changes_the_fleet(fleet: Fleet) -> None:
    """On the router and on every worker, by whatever path and method; a user's key is no fleet key."""
    verbs = ("add", "remove", "drain", "role")
    paths = [f"/internal/members/{verb}" for verb in verbs] + [
        "/internal/members", "/internal/drain", "/internal/rollout", "/internal/role", "/internal/info",
        "/internal/kv-events?from=0", "/internal/kv-snapshot", "//internal/drain", "/v1/../internal/drain",
        "/internal//drain", "/INTERNAL/drain", "/%69nternal/drain", "/flush_cache", "//flush_cache",
        "/v1/../flush_cache", "/abort", "/profile", "/config",
    ]  # fmt: skip
    ports = [fleet.url, *fleet.urls.values()]
    for url in ports:
        host, port = url.removeprefix("http://").split(":")
        for path in paths:
            for method in ("GET", "HEAD", "POST", "PUT"):
                for key in (b"", b"authorization: Bearer user\r\n", b"x-kvbaton-key: guess\r\n"):
                    status = await _raw(host, int(port), method, path, key)
                    assert status in (403, 404, 405), (url, method, path, key, status)
    assert all(member.state == "up" for member in fleet.registry.members)
    assert fleet.gateway.state == "serving" and all(server.state == "serving" for server in fleet.servers.values())


async def _raw(host: str, port: int, method: str, path: str, header: bytes) -> int:
    """No client library between us and the path."""
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n".encode() + header
                 + b"content-length: 2\r\n\r\n{}")  # fmt: skip
    async with asyncio.timeout(20):
        line = await reader.readline()
    writer.close()
    return int(line.split()[1])


async def test_se_06_prefixes_under_different_salts_share_nothing(tiny_model_dir: Path) -> None:
    """One tenant's prompt is no hit for another, on no worker and not in the router's index; for itself it is."""
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as split:
        prompt = "the secret prompt of one tenant, " * 8

        async def ask(salt: str) -> tuple[int, float]:
            answer = await split.ask(prompt=prompt, max_tokens=2, temperature=0, cache_salt=salt)
            await split.fleet.settled()
            foretold = split.fleet.counter("kvbaton_router_foretold_cached_tokens_total")
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"], foretold

        assert await ask("tenant-a") == (0, 0)
        assert await ask("tenant-b") == (0, 0)
        assert await ask("") == (0, 0)
        cached, foretold = await ask("tenant-a")
        assert cached > 0 and foretold > 0


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": SHORT, "n": 10_000},
        {"prompt": ["x"] * 20_000},
        {"prompt": SHORT, "stop": ["x"] * 20_000},
        {"prompt": SHORT, "logprobs": 10**9},
        {"prompt": SHORT, "logit_bias": {str(i): 1 for i in range(20_000)}},
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":' + b'{"a":' * 40_000 + b"1" + b"}" * 40_000 + b"}",
    ],
    ids=["choices", "prompts", "stops", "logprobs", "bias", "nested lists", "nested objects"],
)
async def test_se_14_what_is_too_much_is_refused_early(fleet: Fleet, body: Any) -> None:
    status, answer, _ = await fleet.post(body)
    assert status == 400 and answer["error"]["message"]
    assert not fleet.workers["d0"].requests and not fleet.workers["p0"].requests
    assert (await fleet.post({"prompt": SHORT}))[0] == 200


async def test_se_14_a_body_that_is_too_large_compressed_or_slow_is_cut_off(tokenizer: Tokenizer) -> None:
    async with running_fleet(tokenizer, {"b0": "both"}, max_body_bytes=10_000, body_timeout_s=0.3) as fleet:
        assert (await fleet.post(json.dumps({"prompt": "x" * 20_000}).encode()))[0] == 413
        assert (await fleet.post(b"\x1f\x8b" + b"0" * 100, **{"content-encoding": "gzip"}))[0] == 415
        host, port = fleet.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        async with asyncio.timeout(20):
            assert b" 408 " in await reader.readline()
        writer.close()
        assert (await fleet.post({"prompt": SHORT}))[0] == 200
