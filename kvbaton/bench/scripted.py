"""A real HTTP server that sends given bytes at given instants, and remembers when it really did.

It is the truth that the client is checked against: an answer's script says what leaves the server and when, counted
from the instant the whole request was read, and ``writes`` holds the instants of the writes on the machine's monotonic
clock, which a client on the same machine shares.

Run as ``python -m kvbaton.bench.scripted`` it prints its port and plays one script to everyone: a first token after
``--first-ms``, then one chunk each ``--gap-ms``; with ``--vary``, some answers slower than others.

Knows nothing about models; it never reads more of a request than its length and its body.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

from kvbaton.bench.pacing import EARLY_S, Pacer

ENCODED_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    b"cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True)
class Script:
    """What one answer sends. ``steps`` are (seconds after the request was read, bytes of the body)."""

    steps: Sequence[tuple[float, bytes]]
    status: int = 200
    drop_at_end: bool = False  # close the socket without ending the body
    hang: bool = False  # never end the body


Chooser = Callable[[int, dict[str, Any]], Script]


def sse(body: Any) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else msgspec.json.encode(body)) + b"\n\n"


def chat_delta(finish_reason: str | None = None, usage: dict[str, Any] | None = None, **delta: Any) -> bytes:
    body: dict[str, Any] = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "scripted",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}],
    }
    if usage is not None:
        body["usage"] = usage
    return sse(body)


def usage_chunk(completion_tokens: int, prompt_tokens: int = 1, **details: Any) -> bytes:
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **details,
    }
    return sse(
        {
            "id": "chatcmpl-scripted",
            "object": "chat.completion.chunk",
            "created": 0,
            "model": "scripted",
            "choices": [],
            "usage": usage,
        }
    )


def even_script(first_s: float, gap_s: float, num_tokens: int, prompt_tokens: int = 1) -> Script:
    """Role, then tokens at even gaps, then finish, usage and [DONE] at once with the last."""
    steps = [(0.0, chat_delta(role="assistant", content=""))]
    steps += [(first_s + gap_s * number, chat_delta(content=f" w{number}")) for number in range(num_tokens)]
    end = first_s + gap_s * (num_tokens - 1)
    tail = chat_delta(finish_reason="stop") + usage_chunk(num_tokens, prompt_tokens) + sse(b"[DONE]")
    return Script([*steps, (end, tail)])


@dataclass
class Played:
    """One answer as it went out: when the request was read, and when each step was written."""

    number: int
    request_id: str
    read_s: float
    writes_s: list[float] = field(default_factory=list)


class _ServerConnection(asyncio.Protocol):
    def __init__(self, server: ScriptedServer) -> None:
        self._server = server
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._path = b""
        self._request_id = ""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class is no subclass of it
        self._server.transports.add(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._transport is not None:
            self._server.transports.discard(self._transport)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, []

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"x-request-id":
            self._request_id = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._transport is not None
        body = b"".join(self._body)
        self._server.answer(self._transport, self._path, body, self._request_id)


class ScriptedServer:
    """Plays the script that ``choose(request number, request body)`` names. ``slots`` makes requests queue."""

    def __init__(
        self,
        choose: Chooser,
        slots: int | None = None,
        now_s: Callable[[], float] = time.monotonic,
        early_s: float = EARLY_S,
    ) -> None:
        self._choose = choose
        self._now_s = now_s
        self._early_s = early_s
        self._free = slots
        self._queue: list[Callable[[], None]] = []
        self._count = 0
        self.played: list[Played] = []
        self.bodies: list[dict[str, Any]] = []
        self.transports: set[asyncio.Transport] = set()
        self.metrics_text = ""
        self.port = 0

    async def __aenter__(self) -> ScriptedServer:
        self._pacer = Pacer(self._now_s, self._early_s)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _ServerConnection(self), "127.0.0.1", self.port, backlog=2048)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pacer.clear()
        self._server.close()
        for transport in list(self.transports):
            transport.abort()
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def answer(self, transport: asyncio.Transport, path: bytes, body: bytes, request_id: str) -> None:
        read_s = self._now_s()
        if not body:
            self._plain(transport, path)
            return
        request = msgspec.json.decode(body)
        self.bodies.append(request)
        number, self._count = self._count, self._count + 1
        script = self._choose(number, request)
        played = Played(number, request_id, read_s)
        self.played.append(played)
        self._in_slot(lambda: self._play(transport, script, played))

    def _plain(self, transport: asyncio.Transport, path: bytes) -> None:
        match path:
            case b"/v1/models":
                text = msgspec.json.encode({"object": "list", "data": [{"id": "scripted", "object": "model"}]})
            case b"/played":
                text = msgspec.json.encode(self.played)
            case b"/metrics":
                text = self.metrics_text.encode()
            case _:
                text = b"{}"
        transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(text))
        transport.write(text)

    def _in_slot(self, start: Callable[[], None]) -> None:
        if self._free is None:
            start()
        elif self._free > 0:
            self._free -= 1
            start()
        else:
            self._queue.append(start)

    def _release_slot(self) -> None:
        if self._free is None:
            return
        if self._queue:
            self._queue.pop(0)()
        else:
            self._free += 1

    def _play(self, transport: asyncio.Transport, script: Script, played: Played) -> None:
        start_s = self._now_s() if self._free is not None else played.read_s
        if script.status != 200:
            self._pacer.at(start_s + (script.steps[0][0] if script.steps else 0), self._refuse, transport, script)
            return
        last = len(script.steps) - 1
        pieces = [ENCODED_HEAD if number == 0 else b"" for number in range(len(script.steps))]
        for number, (after_s, body) in enumerate(script.steps):
            piece = pieces[number] + b"%x\r\n%s\r\n" % (len(body), body)
            ends = number == last and not script.drop_at_end and not script.hang
            self._pacer.at(
                start_s + after_s,
                self._write,
                transport,
                piece + b"0\r\n\r\n" if ends else piece,
                played,
                number == last,
            )
        if script.drop_at_end:
            self._pacer.at(start_s + script.steps[last][0], transport.close)

    def _write(self, transport: asyncio.Transport, data: bytes, played: Played, last: bool) -> None:
        if not transport.is_closing():
            played.writes_s.append(self._now_s())
            transport.write(data)
        if last:
            self._release_slot()

    def _refuse(self, transport: asyncio.Transport, script: Script) -> None:
        body = script.steps[0][1] if script.steps else b"{}"
        head = b"HTTP/1.1 %d Refused\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        transport.write(head % (script.status, len(body)) + body)
        self._release_slot()


async def _serve(options: argparse.Namespace) -> None:
    def choose(number: int, body: dict[str, Any]) -> Script:
        # A hundred steps of slowness in mixed order: whoever sends a multiple of a hundred requests sees the same.
        slower = 1 + options.vary * (number * 37 % 100) / 100
        return even_script(options.first_ms / 1e3 * slower, options.gap_ms / 1e3 * slower, options.tokens)

    async with ScriptedServer(choose, early_s=0.0 if options.coarse else EARLY_S) as server:
        print(server.port, flush=True)
        await asyncio.get_running_loop().run_in_executor(None, options.until.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first-ms", type=float, default=100.0)
    parser.add_argument("--gap-ms", type=float, default=20.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--vary", type=float, default=0.0, help="the slowest answer takes 1 + this times as long")
    parser.add_argument("--coarse", action="store_true", help="up to a millisecond late, at a tenth of the CPU")
    # The end of standard input ends the server, so that it never outlives the test that started it.
    parser.add_argument("--until", type=argparse.FileType("r"), default="-", help=argparse.SUPPRESS)
    import uvloop

    uvloop.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
