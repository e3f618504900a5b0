"""A TCP proxy that breaks the network on purpose: for drills and for the tests of failure semantics.

Each direction has a ``Path`` whose fields may be changed while connections are open: delay, bandwidth, a stall, and
three faults that strike once when a number of bytes has passed (cut, stall, corrupt). A stall of one direction only is
a one-way partition: what is sent that way is held, as unacknowledged TCP data would be, and arrives after ``heal``.

Invariants: bytes are never reordered, duplicated or, short of a cut, lost; a fault strikes at exactly its byte; every
byte and every strike is counted, so that a test can show that its fault happened; leaving the context ends everything.
Knows nothing about what the bytes mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field
from typing import Literal, Self

from kvbaton.types import LocalError

Direction = Literal["to_server", "to_client"]
_PIECE_BYTES = 64 * 1024
_CONNECT_TIMEOUT_S = 5.0
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero: closing sends RST, as the kernel of a dead process does


@dataclass(eq=False)
class Path:
    """One direction. ``*_after_bytes`` counts from when it was set (``strike``), and clears itself when it strikes."""

    delay_s: float = 0.0  # before each piece
    bytes_per_s: float | None = None
    cut_after_bytes: int | None = None
    stall_after_bytes: int | None = None
    corrupt_after_bytes: int | None = None  # this byte is inverted
    num_bytes: int = 0
    num_cut: int = 0
    num_stalled: int = 0
    num_corrupted: int = 0
    _flows: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._flows.set()

    @property
    def stalled(self) -> bool:
        return not self._flows.is_set()

    def stall(self) -> None:
        """Hold everything from now on. New connections are accepted and hear nothing."""
        if not self.stalled:
            self.num_stalled += 1
        self._flows.clear()

    def heal(self) -> None:
        """As at the beginning; what was held flows on. Counters stay."""
        self.delay_s, self.bytes_per_s = 0.0, None
        self.cut_after_bytes = self.stall_after_bytes = self.corrupt_after_bytes = None
        self._flows.set()

    async def pass_on(self, piece: bytes) -> tuple[bytes, bytes]:
        """Wait as long as this piece has to; then what may be sent now, and what comes after the next fault."""
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if self.bytes_per_s:
            await asyncio.sleep(len(piece) / self.bytes_per_s)
        await self._flows.wait()
        limits = [limit for limit in (self.cut_after_bytes, self.stall_after_bytes) if limit is not None]
        cut = min([len(piece), *limits])
        piece, rest = piece[:cut], piece[cut:]
        piece = self._corrupt(piece)
        self.num_bytes += len(piece)
        if self.cut_after_bytes is not None:
            self.cut_after_bytes -= len(piece)
        if self.stall_after_bytes is not None:
            self.stall_after_bytes -= len(piece)
        return piece, rest

    def _corrupt(self, piece: bytes) -> bytes:
        at = self.corrupt_after_bytes
        if at is None:
            return piece
        if at >= len(piece):
            self.corrupt_after_bytes = at - len(piece)
            return piece
        self.corrupt_after_bytes = None
        self.num_corrupted += 1
        return piece[:at] + bytes([piece[at] ^ 0xFF]) + piece[at + 1 :]

    def strikes(self) -> bool:
        """Called when the bytes before a fault are sent. True: cut now."""
        if self.stall_after_bytes == 0:
            self.stall_after_bytes = None
            self.stall()
        if self.cut_after_bytes == 0:
            self.cut_after_bytes = None
            self.num_cut += 1
            return True
        return False


class FaultProxy:
    """``async with FaultProxy(host, port) as proxy``: listens on ``proxy.port`` and passes on to ``host:port``."""

    def __init__(self, host: str, port: int, listen_host: str = "127.0.0.1", listen_port: int = 0) -> None:
        self.target = (host, port)
        self.to_server = Path()
        self.to_client = Path()
        self.host = listen_host
        self.port = listen_port
        self.num_connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def num_open(self) -> int:
        """Connections that are open now."""
        return len(self._tasks)

    def path(self, direction: Direction) -> Path:
        return self.to_server if direction == "to_server" else self.to_client

    def partition(self, direction: Direction) -> None:
        """Nothing passes that way until ``heal``; the other way still works."""
        self.path(direction).stall()

    def stall(self) -> None:
        self.to_server.stall()
        self.to_client.stall()

    def heal(self) -> None:
        self.to_server.heal()
        self.to_client.heal()

    def cut(self) -> int:
        """Reset every open connection, both sides; how many sockets that were."""
        writers = list(self._writers)
        for writer in writers:
            _reset(writer)
        self.to_client.num_cut += 1
        return len(writers)

    async def refuse(self) -> None:
        """Reset what is open and stop listening: connections are refused until ``listen``."""
        if self._server is not None:
            self._server.close()
            self.cut()
            await self._server.wait_closed()
            self._server = None

    async def listen(self) -> None:
        """Begin, or begin again on the same port."""
        if self._server is not None:
            return
        try:
            self._server = await asyncio.start_server(self._accepted, self.host, self.port)
        except OSError as error:
            raise LocalError(f"cannot listen on {self.host}:{self.port}: {error.strerror}", field="port") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aenter__(self) -> Self:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.refuse()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            await self._connect(reader, writer)
        except (TimeoutError, OSError):
            _reset(writer)
        except asyncio.CancelledError:  # the proxy ends; asyncio would log it as an error of the handler
            _reset(writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            far_reader, far_writer = await asyncio.open_connection(*self.target)
        self._writers.add(far_writer)
        both = (writer, far_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, far_writer, self.to_server, both))
                group.create_task(self._pump(far_reader, writer, self.to_client, both))
        finally:
            self._writers.discard(far_writer)
            far_writer.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        path: Path,
        both: tuple[asyncio.StreamWriter, asyncio.StreamWriter],
    ) -> None:
        """Until the end of one direction, which is passed on too. A reset of one side resets the other."""
        try:
            while rest := await reader.read(_PIECE_BYTES):
                while rest:
                    piece, rest = await path.pass_on(rest)
                    writer.write(piece)
                    await writer.drain()
                    if path.strikes():
                        for side in both:
                            _reset(side)
                        return
            await path.pass_on(b"")  # a stalled direction does not deliver the end either
            with contextlib.suppress(OSError):
                writer.write_eof()
        except OSError:
            for side in both:
                _reset(side)


def _reset(writer: asyncio.StreamWriter) -> None:
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None and raw.fileno() >= 0:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
