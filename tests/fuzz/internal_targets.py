"""The calls between processes of a fleet, with the fleet's key: router and worker answer any of them as they should.

Who has the key is trusted to mean well, and may still be of another version, or broken. An input is a line with a
method, a path and a query, and a body behind it.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from .http_targets import Wire, _Answers, gateway
from .model_targets import byte_tokenizer
from .target import Run, Target

KEY = b"k" * 20
MEMBER = {"url": "http://127.0.0.1:1", "role": "decode", "name": "d0"}


def _seeds() -> list[bytes]:
    calls: list[tuple[str, Any]] = [
        ("PUT /internal/members", [MEMBER, {**MEMBER, "role": "prefill", "name": "p0"}]),
        ("POST /internal/members/add", MEMBER),
        ("POST /internal/members/remove", {"name": "d0"}),
        ("POST /internal/members/drain", {"name": "d0", "deadline_s": 0.5, "force": True}),
        ("POST /internal/members/role", {"name": "d0", "role": "both", "deadline_s": 0.5, "force": True}),
        ("PUT /internal/rollout", {"disagg_percent": 50.0}),
        ("POST /internal/drain", {"deadline_s": 1.0}),
        ("POST /internal/role", {"role": "prefill", "deadline_s": 1.0}),
        ("GET /internal/info", None),
        ("GET /internal/trace?seconds=0.5", None),
        ("GET /internal/kv-events?from=0&wait_s=0.5", None),
        ("GET /internal/kv-snapshot", None),
        ("POST /v1/completions", {"prompt": [1, 2], "max_tokens": 2,
                                  "kvbaton": {"request_id": "r", "prompt_token_ids": [[1, 2]], "prefill": None}}),
        ("POST /v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True,
                                       "kvbaton": {"request_id": "r", "prompt_token_ids": [[1]], "deadline_s": 1.0,
                                                   "resume": [{"token_ids": [1]}]}}),
    ]  # fmt: skip
    return [call.encode() + b"\n" + (b"" if body is None else json.dumps(body).encode()) for call, body in calls]


def _worker(folder: Path) -> Any:
    from workers.scripted import ScriptedWorker

    from kvbaton.clock import MonotonicClock
    from kvbaton.workers.kv_events import KVEventLog
    from kvbaton.workers.server import ServerOptions, WorkerServer

    async def snapshot() -> tuple[int, list[bytes]]:
        return 0, [b"x" * 16]

    worker = ScriptedWorker(byte_tokenizer(folder), text="ab")
    worker.kv_events = KVEventLog("a", 16, snapshot, MonotonicClock())
    return WorkerServer(worker, ServerOptions(16, internal_key=KEY.decode()))


def _internal(folder: Path) -> Run:
    import uvicorn
    from simulation.loop import VirtualLoop
    from uvicorn.server import ServerState

    from kvbaton.workers.http import HttpServer

    def answers(app: Any, request: bytes) -> list[tuple[int, bytes]]:
        config: uvicorn.Config = HttpServer(app, half_closes=True).config
        config.load()
        loop, wire = VirtualLoop(), Wire()

        async def talk() -> None:
            protocol: Any = config.http_protocol_class(config, ServerState(), {}, _loop=loop)  # type: ignore[operator]
            wire.on_close = lambda: loop.call_soon(protocol.connection_lost, None)
            protocol.connection_made(wire)
            protocol.data_received(request)
            await asyncio.sleep(2000.0)  # virtual
            if not wire.closing:
                wire.close()
            await asyncio.sleep(5.0)

        asyncio.set_event_loop(loop)
        try:
            loop.run(talk())
        finally:
            loop.ending = True
            asyncio.set_event_loop(None)
            loop.close()
        return _Answers().read(bytes(wire.written))

    def run(data: bytes) -> None:
        line, _, body = data.partition(b"\n")
        if any(byte <= 0x20 or byte >= 0x7F for byte in line.replace(b" ", b"", 1)) or line.startswith(b"HEAD"):
            return  # what is no request line is another target's
        head = line + b" HTTP/1.1\r\nhost: a\r\nx-kvbaton-key: " + KEY + b"\r\nconnection: close\r\n"
        request = head + b"content-length: %d\r\n\r\n" % len(body) + body
        for app in (gateway(folder), _worker(folder)):
            for status, answer in answers(app, request):
                if b"generation ended early" in answer:
                    continue  # the scripted worker has no more to say than the client has already
                assert status in (200, 202, 503) or 400 <= status < 500, (status, answer[:300])
                if status >= 400:
                    error = json.loads(answer)["error"]
                    assert error["message"] and error["type"]

    return run


TARGETS = (
    Target("internal calls", _internal, _seeds, "call", 0.5,
           (b"1e999", b"-1", b"null", b"[" * 60, b"\\ud800", b"from=", b"wait_s=nan", b"seconds=inf", b"/internal/")),
)  # fmt: skip
