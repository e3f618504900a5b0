"""The decode side of hand-offs: pulls KV of a prompt into our own blocks while the peer computes it.

    client = HandoffClient(identity, pool, options)
    async with contextlib.aclosing(client.pull(address, request, have_tokens, block_ids, deadline_s)) as events:
        async for event in events: ...      # FirstToken, then Completed

Invariants: when the iterator has ended, however it ended, nothing writes into the destination blocks any more; it
yields ``Completed`` only if all KV is in place and verified (or the request ended with its first token), else it
raises; leaving it early aborts on the prefill side too.

Knows nothing about engines; the caller reserves the blocks and owns them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from kvbaton.clock import Clock, MonotonicClock
from kvbaton.kv.rank_pools import AnyPool
from kvbaton.kv.shared_pool import SharedPool
from kvbaton.transfer import pulling
from kvbaton.transfer.errors import HandoffError, PeerUnreachable
from kvbaton.transfer.identity import Transport
from kvbaton.transfer.nixl_source import NixlPool
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.peer import PeerConnection
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.pulling import DecodeSession, Pulling, PullLimits, Source
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.sharding import ShardedPlacement, place, start_copy, stop_copies
from kvbaton.transfer.wire import Failed, First, Identity, Offer, Progress, RenewReply
from kvbaton.types import GenerateRequest, KvbatonError, TokenOutput

_POLL_S = 0.001  # one turn of the loop that polls its sockets

Address = tuple[str, int]


@dataclass(frozen=True)
class FirstToken:
    """Comes as soon as it is sampled, usually before the transfer is complete."""

    output: TokenOutput
    cached_tokens: int  # of the prompt, found in the prefill side's prefix cache
    queue_s: float  # on the prefill side, until scheduled
    prefill_s: float  # from scheduled to sampled


@dataclass(frozen=True)
class Completed:
    """All KV is here and the prefill side has been told."""

    num_bytes: int  # whole blocks of the peer's layout, all layers, the heads of each of our ranks
    num_remote_tokens: int  # tokens whose KV came from the peer
    transfer_s: float  # Start sent to last byte in place
    exposed_s: float  # of that, after the first token was here
    transport: Transport


@dataclass
class Moved:
    """What a pull moved, for callers who ask; final when its iterator has ended, however it ended."""

    num_bytes: int = 0
    transfer_s: float = 0.0
    exposed_s: float = 0.0
    copying_s: float = 0.0  # of the transfer, while any copy was under way


@dataclass(frozen=True)
class ClientStats:
    num_connections: int = 0
    num_pulls: int = 0  # in progress
    num_done: int = 0
    num_failed: int = 0
    num_aborted: int = 0
    num_bytes_shm: int = 0
    num_bytes_tcp: int = 0
    num_bytes_nixl: int = 0

    @property
    def num_bytes(self) -> int:
        return self.num_bytes_shm + self.num_bytes_tcp + self.num_bytes_nixl


class HandoffClient:
    """One for a decode worker. ``pool`` is the destination of every pull."""

    def __init__(
        self,
        identity: Identity,
        pool: AnyPool,
        options: HandoffOptions,
        clock: Clock | None = None,
        nixl: NixlPool | None = None,
    ) -> None:
        """``nixl``: ``pool`` where it is registered already; transport nixl registers it otherwise."""
        assert identity.layout == pool.layout
        self._own_nixl: NixlPool | None = None
        if options.transport == "nixl" and nixl is None:
            assert isinstance(pool, SharedPool), "NIXL is for workers of one rank"
            nixl = self._own_nixl = NixlPool(pool, f"{identity.incarnation}-reader")
        self._identity = identity
        self._pool = pool
        self._options = options
        self._clock = clock or MonotonicClock()
        self._nixl = nixl
        self._executor = ThreadPoolExecutor(2, thread_name_prefix="kvbaton-copy")
        self._peers: dict[Address, asyncio.Task[PeerConnection]] = {}
        self._num_pulls = 0
        self._past = ClientStats()
        self._closed = False

    async def pull(
        self,
        address: Address,
        request: GenerateRequest,
        have_tokens: int,
        block_ids: Sequence[int],
        deadline_s: float = 600.0,
        moved: Moved | None = None,
    ) -> AsyncGenerator[FirstToken | Completed, None]:
        """``block_ids`` hold the prompt from its first token on; of them, the first ``have_tokens`` are filled already.

        ``deadline_s``: from now until everything is here. Raises HandoffError, CapacityError (the peer has no room),
        LocalError with a field (the peer finds the request invalid).
        """
        deadline_at_s = self._clock.now_s() + deadline_s
        peer = await self._connection(address)
        tokens = (have_tokens, len(request.prompt_token_ids))
        placement = place(self._pool, block_ids, peer.identity, tokens, mapped=peer.transport == "shm")
        pull = _Pull(peer, placement, self._session(peer, request, have_tokens, deadline_at_s), self._clock)
        self._num_pulls += 1
        try:
            pull.begin()
            while True:
                event = await pull.next_event()
                yield event
                if isinstance(event, Completed):
                    return
        finally:
            try:
                await pull.stop()
            finally:
                self._num_pulls -= 1
                self._count(pull)
                if moved is not None:
                    moved.num_bytes = pull.num_bytes
                    moved.transfer_s, moved.exposed_s = pull.seconds if pull.num_bytes else (0.0, 0.0)
                    moved.copying_s = min(pull.copying_s, moved.transfer_s)

    async def connect(self, address: Address) -> Identity:
        """Shake hands now (doctor, warm-up); pulls do it by themselves."""
        return (await self._connection(address)).identity

    async def close(self) -> None:
        """Drop all connections; pulls in progress fail."""
        self._closed = True
        tasks = list(self._peers.values())
        for task in tasks:
            if not task.done():
                task.cancel()
        loop = asyncio.get_running_loop()
        for found in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(found, PeerConnection):
                found.close()
                await asyncio.sleep(0)  # lets the pulls on it hear of it
                await loop.run_in_executor(None, found.source.join)
        await loop.run_in_executor(None, self._executor.shutdown)
        if self._own_nixl is not None:
            self._own_nixl.close()

    def stats(self) -> ClientStats:
        connected = sum(
            1 for task in self._peers.values() if task.done() and not task.cancelled() and task.exception() is None
        )
        return replace(self._past, num_connections=connected, num_pulls=self._num_pulls)

    async def _connection(self, address: Address) -> PeerConnection:
        """The open connection to a peer, or a new one; pulls that come at once share the attempt.

        A failed attempt is forgotten, so the next pull tries again: no peer is shut out for what is past.
        """
        if self._closed:
            raise PeerUnreachable("the hand-off client is closed")
        task = self._peers.get(address)
        if task is not None and task.done() and (task.cancelled() or task.exception() or task.result().closed):
            task = None
        if task is None:
            task = asyncio.ensure_future(
                PeerConnection.connect(address, self._identity, self._options, self._executor, self._forget, self._nixl)
            )
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its waiters may all be gone
            self._peers[address] = task
        return await asyncio.shield(task)

    def _forget(self, peer: PeerConnection) -> None:
        for address, task in list(self._peers.items()):
            if task.done() and not task.cancelled() and task.exception() is None and task.result() is peer:
                del self._peers[address]

    def _session(
        self, peer: PeerConnection, request: GenerateRequest, have_tokens: int, deadline_s: float
    ) -> DecodeSession:
        layout = peer.identity.layout
        options = self._options
        # NIXL's copies share one agent: two at once are no faster, and each costs milliseconds before its first byte.
        large = peer.transport == "nixl"
        limits = PullLimits(
            max(1, (options.nixl_copy_bytes if large else options.max_copy_bytes) // layout.layer_block_bytes),
            1 if large else options.max_copies,
            options.streaming,
        )
        source = Source(layout.num_layers, layout.block_size, peer.identity.num_blocks)
        return DecodeSession(peer.new_pull_id(), request, have_tokens, source, limits, deadline_s)

    def _count(self, pull: _Pull) -> None:
        past, outcome = self._past, pull.outcome
        self._past = replace(
            past,
            num_done=past.num_done + (outcome is Pulling.DONE),
            num_failed=past.num_failed + (outcome is Pulling.FAILED),
            num_aborted=past.num_aborted + (outcome is Pulling.ABORTED),
            num_bytes_shm=past.num_bytes_shm + (pull.num_bytes if pull.peer.transport == "shm" else 0),
            num_bytes_tcp=past.num_bytes_tcp + (pull.num_bytes if pull.peer.transport == "tcp" else 0),
            num_bytes_nixl=past.num_bytes_nixl + (pull.num_bytes if pull.peer.transport == "nixl" else 0),
        )


class _Pull:
    """Carries out what one DecodeSession decides."""

    def __init__(
        self,
        peer: PeerConnection,
        placement: Placement | ShardedPlacement,
        session: DecodeSession,
        clock: Clock,
    ) -> None:
        self.peer = peer
        self.num_bytes = 0
        self._num_layer_blocks = 0
        self._placement = placement
        self._session = session
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[FirstToken | Completed | KvbatonError] = asyncio.Queue()  # at most two ever
        self._finished = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._offer: Offer | None = None
        self._started_s = clock.now_s()
        self._first_s = self._started_s
        self._last_byte_s = self._started_s
        self.copying_s = 0.0
        self._num_copying = 0
        self._copying_since_s = self._started_s

    @property
    def request_id(self) -> str:
        return self._session.request.request_id

    @property
    def outcome(self) -> Pulling:
        return self._session.state

    @property
    def seconds(self) -> tuple[float, float]:
        """From the beginning to the last byte so far, and how much of it came after the first token."""
        return self._last_byte_s - self._started_s, max(0.0, self._last_byte_s - self._first_s)

    def begin(self) -> None:
        self.peer.add(self._session.pull_id, self)
        if self.peer.closed:
            self._feed(pulling.PeerLost(PeerUnreachable("the connection to the prefill side is closed")))
        else:
            self._feed(pulling.Begin())

    async def next_event(self) -> FirstToken | Completed:
        """Bounded by the session's deadline."""
        event = await self._events.get()
        if isinstance(event, KvbatonError):
            raise event
        return event

    async def stop(self) -> None:
        """Give up unless it is over, and wait until nothing lands in our blocks any more, also when cancelled."""
        self._feed(pulling.AbortAsked())
        cancelled = None
        while not self._finished.is_set():
            try:
                await self._finished.wait()  # bounded: a copy in shared memory is short, one over tcp is cut off
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled

    # -- what comes

    def on_message(self, message: Offer | Progress | First | RenewReply | Failed) -> None:
        match message:
            case Offer():
                self._offer = self._offer or message
                self._feed(pulling.Offered(message, self._clock.now_s()))
            case Progress():
                self._feed(pulling.Progressed(message.ticket, message.tokens_ready, message.layers_ready))
            case First():
                self._feed(pulling.FirstArrived(message))
            case RenewReply():
                self._feed(pulling.LeaseAnswered(message.ticket, message.renewed))
            case Failed():
                self._feed(pulling.PeerFailed(message))

    def on_lost(self, error: HandoffError) -> None:
        self._feed(pulling.PeerLost(error))

    def _copied(self, region: Region, error: KvbatonError | None) -> None:
        now_s = self._clock.now_s()
        self._num_copying -= 1
        if not self._num_copying:
            self.copying_s += now_s - self._copying_since_s
        if error is None:
            self._last_byte_s = now_s
            self._feed(pulling.CopyFinished(region))
        else:
            self._feed(pulling.CopyBroke(region, error))

    # -- what is to be done

    def _feed(self, event: object) -> None:
        for action in self._session.step(event):
            self._perform(action)
        self._set_timer()

    def _perform(self, action: pulling.Action) -> None:
        match action:
            case pulling.Send():
                self.peer.send(action.message)
            case pulling.StartCopy():
                region = action.region
                if not self._num_copying:
                    self._copying_since_s = self._clock.now_s()
                self._num_copying += 1
                start_copy(
                    self.peer.source,
                    action.offer,
                    region,
                    self._placement,
                    lambda error: self._copied(region, error),
                )
            case pulling.StopCopies():
                stop_copies(self.peer.source, self._placement)
            case pulling.DeliverFirst():
                self._first_s = self._clock.now_s()
                first = action.first
                cached_tokens = 0 if self._offer is None else self._offer.cached_tokens
                self._events.put_nowait(FirstToken(first.output, cached_tokens, first.queue_s, first.prefill_s))
            case pulling.Finish():
                self._finish(action)

    def _finish(self, action: pulling.Finish) -> None:
        self.peer.remove(self._session.pull_id, None if self._offer is None else self._offer.ticket)
        self._num_layer_blocks = action.num_layer_blocks
        self.num_bytes = action.num_layer_blocks * self._placement.source_block_bytes
        self._finished.set()
        if action.error is not None:
            self._events.put_nowait(action.error)
        elif action.state is Pulling.DONE:
            self._events.put_nowait(self._completed())

    def _completed(self) -> Completed:
        layout = self.peer.identity.layout
        num_tokens = len(self._session.request.prompt_token_ids)
        whole = self._num_layer_blocks // layout.num_layers * layout.block_size
        return Completed(
            num_bytes=self.num_bytes,
            num_remote_tokens=min(whole, num_tokens - self._session.have_tokens),
            transfer_s=self.seconds[0],
            exposed_s=self.seconds[1],
            transport=self.peer.transport,
        )

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at_s = self._session.next_tick_s
        if at_s != float("inf"):
            self._timer = self._loop.call_later(max(0.0, at_s - self._clock.now_s()), self._judge)

    def _judge(self) -> None:
        # The loop may have been away: what has arrived meanwhile is taken in first, and the deadline judged after that.
        self._timer = self._loop.call_later(_POLL_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._feed(pulling.Tick(self._clock.now_s()))


async def pull_all(events: AsyncGenerator[FirstToken | Completed, None]) -> tuple[FirstToken, Completed]:
    """Both events of a pull, for callers that have no use for the first token before the rest."""
    first: FirstToken | None = None
    async with contextlib.aclosing(events) as stream:
        async for event in stream:
            if isinstance(event, Completed):
                assert first is not None
                return first, event
            first = event
    raise PeerUnreachable("the pull ended without an outcome")
