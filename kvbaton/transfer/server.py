"""The prefill side of hand-offs: listens, shakes hands, and carries out what the sessions decide.

Invariants: nothing but a handshake is read from a stranger, with a deadline and a small bound, and many of them keep
nobody else out; only who has proved to know the fleet's secret is told who we are, and beyond this host there is no
listening without one; a connection that ends aborts everything on it; the engine is told of every session's end, once;
engine callbacks come on the engine's thread and hop to the loop, where alone sessions are touched.

Knows nothing about the engine behind the backend, or how KV is computed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Protocol

from kvbaton.clock import Clock, MonotonicClock
from kvbaton.kv.compat import digest
from kvbaton.kv.rank_pools import AnyPool
from kvbaton.transfer.auth import NONCE_BYTES, Handshake, Session, fresh_nonce, same
from kvbaton.transfer.channel import receive_frame, tune_socket
from kvbaton.transfer.errors import HandoffError, ProtocolViolation
from kvbaton.transfer.identity import refusals
from kvbaton.transfer.lending import LendingConnection, PrefillSink
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.reach import require_secret
from kvbaton.transfer.tickets import TicketBook
from kvbaton.transfer.wire import (
    DATA_TOKEN_BYTES,
    HANDSHAKE_FRAME_BYTES,
    Challenge,
    DataHello,
    DataWelcome,
    Hello,
    HelloReply,
    Identity,
    MessageDecoder,
    Opening,
    Proof,
    Refused,
    decode_identity,
    encode_frame,
    encode_identity,
)
from kvbaton.types import PROTOCOL_VERSION, GenerateRequest, LocalError

log = logging.getLogger(__name__)

_MAX_DATA_CONNECTIONS = 4  # of one peer
NOT_OF_THE_FLEET = ("KVBATON_INTERNAL_KEY: not the same on both sides",)


class PrefillBackend(Protocol):
    """What the hand-off needs of an engine. All but ``renew`` return at once; all are called on the loop's thread."""

    def start(self, request: GenerateRequest, have_tokens: int, sink: PrefillSink) -> None:
        """Schedule the prefill; the sink hears the rest. May raise at once what ``sink.on_error`` would carry."""
        ...

    def release(self, request_id: str) -> None:
        """The reader has everything."""
        ...

    def abort(self, request_id: str) -> None:
        """Nobody wants it; harmless if it is gone."""
        ...

    def renew(self, request_id: str, lease_s: float) -> Awaitable[bool]:
        """Keep the blocks for that long from now. False: they are gone."""
        ...


@dataclass(frozen=True)
class ServerStats:
    num_connections: int = 0
    num_sessions: int = 0
    num_tickets: int = 0
    num_refused: int = 0  # handshakes
    num_released: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_reads_refused: int = 0
    num_bytes_sent: int = 0  # over tcp; through shared memory what readers acknowledged


class HandoffServer:
    """``await start()``, then ``await stop()``. ``identity.host`` and ``shm_name`` say how the pool can be reached."""

    def __init__(
        self,
        identity: Identity,
        pool: AnyPool,
        backend: PrefillBackend,
        options: HandoffOptions,
        clock: Clock | None = None,
    ) -> None:
        assert identity.layout == pool.layout and identity.num_blocks == pool.num_blocks
        self.identity = identity
        self.pool = pool
        self.backend = backend
        self.options = options
        self.clock = clock or MonotonicClock()
        self.book = TicketBook(pool.layout.num_layers, pool.layout.block_size, self.clock)
        self._digest = digest(identity.fingerprint)
        self._opening, self._proof = MessageDecoder(Opening), MessageDecoder(Proof)
        self._connections: dict[bytes, LendingConnection] = {}  # by data token
        self._request_ids: dict[str, LendingConnection] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._strangers: dict[asyncio.Task[None], socket.socket] = {}  # not proved yet; the oldest first
        self._listeners: list[socket.socket] = []
        self._past = ServerStats()
        self._next_connection_id = 0
        self._num_refused = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    # -- life

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen; returns the port. The default is loopback: to be reached from elsewhere takes an interface and the
        fleet's secret."""
        require_secret("hand-offs", host, self.options.secret)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128, reuse_port=False)
        except OSError as error:
            raise LocalError(
                f"cannot listen for hand-offs on {host}:{port}: {error.strerror or error}",
                field="kv_port",
                fix="choose another port, or an address of this machine",
            ) from error
        listener.setblocking(False)
        self._listeners.append(listener)
        self._spawn(self._accept(listener))
        return listener.getsockname()[1]

    async def stop(self, drain_s: float = 0.0) -> bool:
        """Stop accepting, let sessions finish for ``drain_s``, drop the rest. True if nothing had to be dropped."""
        self._draining = True
        if drain_s > 0 and self._request_ids:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain_s):
                    await self._idle.wait()
        drained = not self._request_ids
        for connection in list(self._connections.values()):
            connection.close("the prefill worker stops")
        for stranger in list(self._strangers):
            self._turn_away(stranger)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._listeners:
            listener.close()
        return drained

    async def quiet(self, deadline_s: float) -> bool:
        """Take no more requests and let sessions finish. False when some had not by then: ``resume`` or ``stop``."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                await self._idle.wait()
        return not self._request_ids

    def resume(self) -> None:
        """Take requests again after ``quiet``."""
        self._draining = False

    def stats(self) -> ServerStats:
        connections = list(self._connections.values())
        live = [connection.counters for connection in connections]
        past = self._past
        return replace(
            past,
            num_connections=len(self._connections),
            num_sessions=len(self._request_ids),
            num_tickets=len(self.book),
            num_refused=self._num_refused,
            num_released=past.num_released + sum(counters.num_released for counters in live),
            num_failed=past.num_failed + sum(counters.num_failed for counters in live),
            num_aborted=past.num_aborted + sum(counters.num_aborted for counters in live),
            num_reads_refused=past.num_reads_refused + sum(connection.num_reads_refused for connection in connections),
            num_bytes_sent=past.num_bytes_sent + sum(connection.num_bytes_sent for connection in connections),
        )

    # -- called by connections

    def claim(self, request_id: str, connection: LendingConnection) -> bool:
        """Request ids are fresh and ours; one in use elsewhere is refused, never overwritten."""
        if self._draining or request_id in self._request_ids:
            return False
        self._request_ids[request_id] = connection
        self._idle.clear()
        return True

    def unclaim(self, request_id: str) -> None:
        self._request_ids.pop(request_id, None)
        if not self._request_ids:
            self._idle.set()

    @property
    def draining(self) -> bool:
        return self._draining

    # -- connections

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._strangers.pop(task, None)
        if not task.cancelled() and task.exception() is not None:
            log.error("hand-off task failed", exc_info=task.exception())

    def _turn_away(self, task: asyncio.Task[None]) -> None:
        sock = self._strangers.pop(task)
        task.cancel()
        task.add_done_callback(lambda _: sock.close())  # it may have been cancelled before it began

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of file descriptors, or the peer gave up: neither is a reason to stop
                log.warning("accept failed: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._strangers) >= self.options.max_strangers:
                self._turn_away(next(iter(self._strangers)))  # one that is of the fleet has done in moments
            self._strangers[self._spawn(self._serve(sock))] = sock

    async def _serve(self, sock: socket.socket) -> None:
        """Shake hands; then run the control connection, or give the socket to a lending thread."""
        handed_on = False
        try:
            tune_socket(sock)
            async with asyncio.timeout(self.options.connect_s):
                opening = self._opening.decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
                if isinstance(opening, DataHello):
                    handed_on = await self._serve_data(sock, opening)
                    return
                assert isinstance(opening, Hello)
                known = await self._shake_hands(sock, opening)
            if known is not None:
                handed_on = True
                self._strangers.pop(_this_task(), None)
                await self._serve_control(sock, *known)
        except (OSError, HandoffError, TimeoutError) as error:
            log.info("connection dropped: %s", error or "no handshake in time")
        finally:
            if not handed_on:
                sock.close()

    async def _shake_hands(self, sock: socket.socket, hello: Hello) -> tuple[bytes, Session] | None:
        """The reader's data token and session, or None when it was refused and told so."""
        loop = asyncio.get_running_loop()
        if hello.protocol_version != PROTOCOL_VERSION:
            difference = f"protocol_version: prefill {PROTOCOL_VERSION}, decode {hello.protocol_version}"
            await self._refuse(sock, Refused("another version of the protocol", (difference,)))
            return None
        if len(hello.nonce) != NONCE_BYTES:
            raise ProtocolViolation("a hello without a nonce")
        handshake = Handshake(self.options.secret, hello.nonce, fresh_nonce())
        await loop.sock_sendall(sock, encode_frame(Challenge(handshake.lender_nonce)))
        proof = self._proof.decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
        assert isinstance(proof, Proof)
        if not same(proof.tag, handshake.of_reader(bytes(proof.identity))):
            await self._refuse(sock, Refused("the peer is not of this fleet", NOT_OF_THE_FLEET))
            return None
        reader = self._judge(proof)
        if isinstance(reader, Refused):
            await self._refuse(sock, reader)
            return None
        data_token = secrets.token_bytes(DATA_TOKEN_BYTES)
        tag = handshake.of_lender(encode_identity(self.identity), data_token)
        await loop.sock_sendall(sock, encode_frame(HelloReply(self.identity, data_token, tag)))
        return data_token, handshake.session(reader.incarnation, self.identity.incarnation)

    async def _refuse(self, sock: socket.socket, refused: Refused) -> None:
        self._num_refused += 1
        log.warning("peer refused: %s %s", refused.reason, "; ".join(refused.differences))
        await asyncio.get_running_loop().sock_sendall(sock, encode_frame(refused))

    def _judge(self, proof: Proof) -> Identity | Refused:
        """Of one of this fleet: whether KV may go there."""
        if self._draining or len(self._connections) >= self.options.max_connections:
            return Refused("the prefill worker takes no more connections")
        peer = decode_identity(proof.identity)
        found = refusals(self.identity, peer)
        if found:
            return Refused("KV of the two workers is not the same", found)
        if proof.fingerprint_digest != self._digest:
            raise ProtocolViolation("the fingerprint's digest is not that of the fingerprint")
        return peer

    async def _serve_control(self, sock: socket.socket, data_token: bytes, session: Session) -> None:
        self._next_connection_id += 1
        connection = LendingConnection(self, self._next_connection_id, session)
        self._connections[data_token] = connection
        try:
            await connection.run(sock)
        finally:
            del self._connections[data_token]
            past, counters = self._past, connection.counters
            self._past = replace(
                past,
                num_released=past.num_released + counters.num_released,
                num_failed=past.num_failed + counters.num_failed,
                num_aborted=past.num_aborted + counters.num_aborted,
                num_reads_refused=past.num_reads_refused + connection.num_reads_refused,
                num_bytes_sent=past.num_bytes_sent + connection.num_bytes_sent,
            )

    async def _serve_data(self, sock: socket.socket, hello: DataHello) -> bool:
        connection = self._connections.get(hello.data_token)
        if connection is None or connection.num_senders >= _MAX_DATA_CONNECTIONS:
            raise ProtocolViolation("a data connection that belongs to no control connection")
        if not connection.takes_data(hello):
            raise ProtocolViolation("a data connection that is not its control connection's peer's, or a replay")
        welcome = DataWelcome(connection.session.of_data_lender(hello.data_token, hello.nonce))
        await asyncio.get_running_loop().sock_sendall(sock, encode_frame(welcome))
        return connection.lend(sock)


def _this_task() -> asyncio.Task[None]:
    task = asyncio.current_task()
    assert task is not None
    return task
