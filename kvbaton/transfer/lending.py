"""One decode worker's control connection as the prefill side sees it: its sessions, its tickets, its lending threads.

Invariants: sessions are touched on the loop's thread only; a pull is started once, however often that is said; a ticket
is signed for one request of this connection's reader; when the connection ends, every session on it has ended, its
tickets are revoked and its lending threads are closed.

Knows nothing about other connections, except by asking the server whether a request id is free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from kvbaton.transfer import offering
from kvbaton.transfer.auth import Session, same
from kvbaton.transfer.channel import ControlChannel
from kvbaton.transfer.errors import HandoffError, PeerUnreachable
from kvbaton.transfer.offering import Offering, PrefillSession
from kvbaton.transfer.tcp import DataSender
from kvbaton.transfer.wire import (
    Abort,
    Ack,
    DataHello,
    Failed,
    First,
    Ping,
    Pong,
    Progress,
    Renew,
    RenewReply,
    Start,
    ToPrefill,
)
from kvbaton.types import KvbatonError, TokenOutput

if TYPE_CHECKING:
    from kvbaton.transfer.server import HandoffServer

log = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass
class LendingCounters:
    num_released: int = 0
    num_failed: int = 0
    num_aborted: int = 0


class PrefillSink:
    """What the engine reports to, from its own thread: each call is cheap, never raises, and hops to the loop.

    Progress that the loop has not seen yet is overwritten by later progress of the same chunk.
    """

    def __init__(self, connection: LendingConnection, session: PrefillSession) -> None:
        self._connection = connection
        self._session = session
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._pending: list[object] = []

    def on_offer(self, block_ids: tuple[int, ...] | list[int], num_tokens: int, cached_tokens: int) -> None:
        """The blocks are pinned. Generations are read here, while the engine thread can not hand the blocks out."""
        pool = self._connection.server.pool
        assert num_tokens == len(self._session.start.request.prompt_token_ids)
        blocks = tuple(block_ids[: pool.layout.blocks_for(num_tokens)])  # a last one for output is not offered
        generations = pool.generations[np.array(blocks, dtype=np.int64)].tolist()
        server = self._connection.server
        now_s = server.clock.now_s()
        request_id = self._session.start.request.request_id
        ticket = self._connection.session.sign_ticket(request_id, now_s + server.options.ticket_s)
        self._post(offering.Scheduled(ticket, blocks, tuple(generations), cached_tokens, now_s))

    def on_progress(self, tokens_ready: int, layers_ready: int) -> None:
        self._post(offering.Computed(tokens_ready, layers_ready))

    def on_first(self, output: TokenOutput) -> None:
        self._post(offering.Sampled(output, self._connection.server.clock.now_s()))

    def on_error(self, error: Exception) -> None:
        self._post(offering.EngineFailed(error))

    def _post(self, event: object) -> None:
        with self._lock:
            last = self._pending[-1] if self._pending else None
            if (
                isinstance(event, offering.Computed)
                and isinstance(last, offering.Computed)
                and last.tokens_ready == event.tokens_ready
            ):
                self._pending[-1] = event
                return
            self._pending.append(event)
            if len(self._pending) > 1:
                return  # the loop is on its way
        with contextlib.suppress(RuntimeError):  # the loop is closed, and every session with it
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        with self._lock:
            events, self._pending = self._pending, []
        for event in events:
            self._connection.feed(self._session, event)


class _PastPulls:
    """Pull ids of one connection that are used up. Readers count them up, so old ones need not be listed."""

    LISTED = 8192

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._below = 0  # all of these are

    def __contains__(self, pull_id: int) -> bool:
        return pull_id < self._below or pull_id in self._ids

    def add(self, pull_id: int) -> None:
        self._ids.add(pull_id)
        if len(self._ids) > self.LISTED:
            kept = sorted(self._ids)[self.LISTED // 2 :]
            self._below, self._ids = kept[0], set(kept)


class LendingConnection:
    def __init__(self, server: HandoffServer, connection_id: int, session: Session) -> None:
        self.server = server
        self.connection_id = connection_id
        self.session = session  # what its reader has proved
        self.counters = LendingCounters()
        self._loop = asyncio.get_running_loop()
        self._sessions: dict[int, PrefillSession] = {}  # by pull id
        self._tickets: dict[bytes, PrefillSession] = {}
        self._past = _PastPulls()
        self._data_nonces: set[bytes] = set()  # as many as there may be data connections
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._renewals: set[asyncio.Task[None]] = set()
        self._senders: list[DataSender] = []
        self._num_blocks: dict[int, int] = {}  # that the reader needs, by pull id
        self._num_bytes_read = 0  # through shared memory
        self._channel: ControlChannel | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()

    @property
    def num_senders(self) -> int:
        return len(self._senders)

    @property
    def num_bytes_sent(self) -> int:
        """Over tcp what was sent; through shared memory what readers acknowledged."""
        return self._num_bytes_read + sum(sender.num_bytes_sent for sender in self._senders)

    @property
    def num_reads_refused(self) -> int:
        return sum(sender.num_reads_refused for sender in self._senders)

    async def run(self, sock: socket.socket) -> None:
        """Until the connection ends; then everything on it has ended."""
        try:
            channel = ControlChannel(ToPrefill, self._message, self._lost, self.server.options)
            self._channel = channel
            await self._loop.connect_accepted_socket(lambda: channel, sock)
            await asyncio.shield(self._closed)
        finally:
            self._end_sessions()
            if self._channel is not None:
                self._channel.close(PeerUnreachable("closed by us"))
            for task in list(self._renewals):
                task.cancel()
            for sender in self._senders:
                sender.close()
            for sender in self._senders:
                await self._loop.run_in_executor(None, sender.join, _JOIN_S)

    def close(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.close(PeerUnreachable(reason))

    def takes_data(self, hello: DataHello) -> bool:
        """Whether our reader sent this, and for the first time."""
        good = same(hello.tag, self.session.of_data_reader(hello.data_token, hello.nonce))
        if not good or hello.nonce in self._data_nonces:
            return False
        self._data_nonces.add(hello.nonce)
        return True

    def lend(self, sock: socket.socket) -> bool:
        """Give a data connection its thread. False if there is nothing to lend from any more."""
        if self._closed.done() or self._channel is None or self._channel.closed:
            return False
        server = self.server
        sender = DataSender(
            sock, self.connection_id, server.pool, server.book, server.options.stall_s, self._sender_ended
        )
        self._senders.append(sender)
        sender.start()
        return True

    def _sender_ended(self) -> None:
        """From the lending thread. A reader whose data connection broke starts afresh, so end control with it."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.close, "its data connection ended")

    def _lost(self, error: HandoffError) -> None:
        log.info("decode peer %d gone: %s", self.connection_id, error)
        self._end_sessions()
        if not self._closed.done():
            self._closed.set_result(None)

    def _end_sessions(self) -> None:
        for session in list(self._sessions.values()):
            self.feed(session, offering.ReaderLost())

    # -- messages

    def _message(self, message: msgspec.Struct) -> None:
        match message:
            case Ping():
                self._send(Pong())
            case Start():
                self._start(message)
            case Abort():
                session = self._sessions.get(message.pull_id)
                if session is not None:
                    self.feed(session, offering.AbortArrived())
            case Ack():
                session = self._tickets.get(message.ticket)
                if session is not None:
                    self.feed(session, offering.AckArrived(message.ticket))
            case Renew():
                session = self._tickets.get(message.ticket)
                if session is None or self.server.book.expired(message.ticket):
                    self._send(RenewReply(message.ticket, False))
                else:
                    self.feed(session, offering.RenewArrived(message.ticket))

    def _start(self, start: Start) -> None:
        session = self._sessions.get(start.pull_id)
        if session is None:
            if start.pull_id in self._past:
                return  # said again: it was started, and has ended
            refusal = self._refusal(start)
            if refusal is not None:
                self._send(refusal)
                return
            session = PrefillSession(start, self.server.options.lease_s)
            self._sessions[start.pull_id] = session
        self.feed(session, offering.StartArrived(self.server.clock.now_s()))

    def _refusal(self, start: Start) -> Failed | None:
        if self.server.draining:
            return Failed(start.pull_id, "capacity", "the prefill worker is draining")
        if len(self._sessions) >= self.server.options.max_sessions:
            return Failed(start.pull_id, "capacity", "too many requests in progress on this connection")
        if not self.server.claim(start.request.request_id, self):
            return Failed(start.pull_id, "internal", "this request id is in use already", "request_id", False)
        return None

    # -- sessions

    def feed(self, session: PrefillSession, event: object) -> None:
        for action in session.step(event):
            self._perform(session, action)
        self._set_timer(session)

    def _perform(self, session: PrefillSession, action: offering.Action) -> None:
        request_id = session.start.request.request_id
        backend = self.server.backend
        match action:
            case offering.Send():
                self._send_for(action.message)
            case offering.StartPrefill():
                self._start_backend(session, action.start)
            case offering.Grant():
                self._tickets[action.offer.ticket] = session
                num_had = session.start.have_tokens // self.server.pool.layout.block_size
                self._num_blocks[session.start.pull_id] = len(action.offer.block_ids) - num_had
                self.server.book.grant(action.offer, self.connection_id)
            case offering.Revoke():
                self._tickets.pop(action.ticket, None)
                self.server.book.revoke(action.ticket)
            case offering.RenewLease():
                task = self._loop.create_task(self._renew(session, action.lease_s))
                self._renewals.add(task)
                task.add_done_callback(self._renewals.discard)
            case offering.ReleasePrefill():
                backend.release(request_id)
            case offering.AbortPrefill():
                backend.abort(request_id)
            case offering.Close():
                self._sessions.pop(session.start.pull_id, None)
                self._past.add(session.start.pull_id)
                self.server.unclaim(request_id)
                num_blocks = self._num_blocks.pop(session.start.pull_id, 0)
                if action.state is Offering.RELEASED and not self._senders:
                    self._num_bytes_read += num_blocks * self.server.pool.layout.block_bytes
                self._count(action.state)

    def _start_backend(self, session: PrefillSession, start: Start) -> None:
        try:
            self.server.backend.start(start.request, start.have_tokens, PrefillSink(self, session))
        except KvbatonError as error:
            self.feed(session, offering.EngineFailed(error))

    async def _renew(self, session: PrefillSession, lease_s: float) -> None:
        """Ask the engine. No answer within the lease is no renewal."""
        asked_s = self.server.clock.now_s()
        renewed = False
        try:
            async with asyncio.timeout(lease_s):
                renewed = await self.server.backend.renew(session.start.request.request_id, lease_s)
        except Exception as error:  # whatever it is: a lease that is not confirmed is lost
            log.warning("the engine did not renew a lease of %.1f s: %r", lease_s, error)
        self.feed(session, offering.EngineRenewed(renewed, asked_s))

    def _send(self, message: msgspec.Struct) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _send_for(self, message: msgspec.Struct) -> None:
        book, layout = self.server.book, self.server.pool.layout
        if isinstance(message, Progress):
            book.advance(message.ticket, message.tokens_ready, message.layers_ready)
            if self._channel is not None and self._channel.congested:
                return  # a later report, or First, promises the same and more
        elif isinstance(message, First):
            session = self._tickets[message.ticket]
            book.advance(message.ticket, len(session.start.request.prompt_token_ids), layout.num_layers)
        self._send(message)

    def _set_timer(self, session: PrefillSession) -> None:
        pull_id = session.start.pull_id
        timer = self._timers.pop(pull_id, None)
        if timer is not None:
            timer.cancel()
        if session.next_tick_s != float("inf") and self._sessions.get(pull_id) is session:
            delay_s = max(0.0, session.next_tick_s - self.server.clock.now_s())
            self._timers[pull_id] = self._loop.call_later(delay_s, self._tick, session)

    def _tick(self, session: PrefillSession) -> None:
        self.feed(session, offering.Tick(self.server.clock.now_s()))

    def _count(self, state: Offering) -> None:
        match state:
            case Offering.RELEASED:
                self.counters.num_released += 1
            case Offering.FAILED:
                self.counters.num_failed += 1
            case Offering.ABORTED:
                self.counters.num_aborted += 1
