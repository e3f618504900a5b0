"""The hand-off's shells on virtual wires: the real server, client, connections and sessions; the way of the bytes ours.

Replaced are the sockets of the handshake (objects cross instead of frames) and the threads that copy: a copy here takes
time, reads its source block by block while others may overwrite it, and is judged by generations or by tickets as the
product's two transports judge theirs. Checked on the way: nothing is written into blocks that were given back, and no
block is released on an acknowledgement while its reader still reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.kv.compat import digest
from kvbaton.transfer import peer as peer_module
from kvbaton.transfer.auth import Handshake, Session, fresh_nonce
from kvbaton.transfer.errors import LeaseLost, PeerRefused, PeerUnreachable, TransferCorrupt
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.server import HandoffServer
from kvbaton.transfer.wire import (
    DATA_TOKEN_BYTES,
    HelloReply,
    Identity,
    Offer,
    Proof,
    Read,
    Refused,
    encode_identity,
)
from kvbaton.types import KvbatonError

from .story import Violation

if TYPE_CHECKING:
    from .process import WorkerProcess
    from .world import World

LONGEST_COPY_S = 1.0
OnCopied = Callable[[KvbatonError | None], None]


def current_world() -> World:
    return asyncio.get_running_loop().world  # type: ignore[attr-defined, no-any-return]


class SimServer(HandoffServer):
    """Reached through the network instead of a listener."""

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        return 1

    def accept(self, end: Any, proof: Proof, handshake: Handshake) -> tuple[HelloReply, Session] | Refused:
        reader = self._judge(proof)
        if isinstance(reader, Refused):
            self._num_refused += 1
            return reader
        token = secrets.token_bytes(DATA_TOKEN_BYTES)
        session = handshake.session(reader.incarnation, self.identity.incarnation)
        self._spawn(self._serve_control(end, token, session))
        tag = handshake.of_lender(encode_identity(self.identity), token)
        return HelloReply(self.identity, token, tag), session


async def _handshake(address: tuple[str, int], ours: Identity, secret: bytes) -> tuple[Any, HelloReply, Session]:
    """As the product's, over a wire; the proofs are tested on sockets."""
    world = current_world()
    reader, lender = world.processes_by_life[ours.incarnation], world.process_at(address[0])
    options = reader.native.options.handoff
    wire = await world.network.connect(reader, lender, options.connect_s, hostile=True)
    server = lender.native._server
    if server is None:
        wire.break_off()
        raise PeerUnreachable("nobody listens there")
    handshake, identity = Handshake(secret, fresh_nonce(), fresh_nonce()), encode_identity(ours)
    proof = Proof(digest(ours.fingerprint), msgspec.Raw(identity), handshake.of_reader(identity))
    accepted = server.accept(wire.ends[1], proof, handshake)
    if isinstance(accepted, Refused):
        wire.break_off()
        raise PeerRefused(accepted.reason, accepted.differences)
    return wire.ends[0], *accepted


async def _open_source(connection: Any, address: Any, reply: HelloReply, *_: Any) -> SimSource:
    world = current_world()
    lender = world.processes_by_life[reply.identity.incarnation]
    return SimSource(world, lender, connection._channel._transport._end.process, connection, reply.data_token)


@contextlib.contextmanager
def on_wires() -> Iterator[None]:
    """The product's modules reach peers through the network of the loop they run on."""
    handshake, open_source = peer_module._handshake, peer_module.PeerConnection._open_source
    token_bytes, token_hex, numbers = secrets.token_bytes, secrets.token_hex, count()
    peer_module._handshake = _handshake
    peer_module.PeerConnection._open_source = _open_source  # type: ignore[method-assign, assignment]
    secrets.token_bytes = lambda length=16: next(numbers).to_bytes(length, "big")  # as fresh, but the same in a replay
    secrets.token_hex = lambda length=16: f"{next(numbers):0{2 * (length or 16)}x}"
    try:
        yield
    finally:
        secrets.token_bytes, secrets.token_hex = token_bytes, token_hex
        peer_module._handshake = handshake
        peer_module.PeerConnection._open_source = open_source  # type: ignore[method-assign]


class Copy:
    """One region on its way."""

    def __init__(self, offer: Offer, region: Region, placement: Placement, on_copied: OnCopied) -> None:
        self.offer, self.region, self.placement, self.on_copied = offer, region, placement, on_copied
        self.timer: asyncio.TimerHandle | None = None
        self.over = False


class SimSource:
    """How a decode worker reads the pool of one life of a prefill worker."""

    def __init__(
        self, world: World, lender: WorkerProcess, reader: WorkerProcess, connection: Any, data_token: bytes
    ) -> None:
        self._world, self._lender, self.reader = world, lender, reader
        self._connection, self._data_token = connection, data_token
        self._copies: dict[Copy, None] = {}
        self._closed = False
        self.shared = world.plan.shared_memory
        lender.sources.append(self)

    # -- what the product's connection asks for

    def start_copy(self, offer: Offer, region: Region, placement: Placement, on_copied: OnCopied) -> None:
        copy = Copy(offer, region, placement, on_copied)
        self._copies[copy] = None
        places = [
            (layer, index)
            for layer in range(region.layer_start, region.layer_stop)
            for index in range(region.block_start, region.block_stop)
        ]
        if not self.shared and self._closed:
            self._after(copy, 0.0, self._end, copy, PeerUnreachable("the data connection is closed"))
            return
        self._after(copy, self._delay_s(), self._begin, copy, places)

    def stop_copies(self, placement: Placement) -> None:
        for copy in [each for each in self._copies if each.placement is placement and not self.shared]:
            self._after(copy, 0.0005, self._end, copy, PeerUnreachable("the copy was stopped"))

    def close(self) -> None:
        self._closed = True
        if not self.shared:
            for copy in list(self._copies):
                self._after(copy, 0.0005, self._end, copy, PeerUnreachable("the data connection was closed"))

    def join(self) -> None: ...

    # -- a copy

    def _delay_s(self) -> float:
        world = self._world
        delay_s = world.network.delay_s(self._lender.name, self.reader.name)
        if world.calm:
            return delay_s
        stands_s = max(0.0, world.standing_until_s.get(self.reader.name, 0.0) - world.loop.time())
        return stands_s + min(LONGEST_COPY_S, delay_s * world.plan.copy_factor)

    def _after(self, copy: Copy, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        if copy.timer is not None:
            copy.timer.cancel()
        copy.timer = self._world.loop.call_later(delay_s, call, *args)

    def _cut_off(self) -> bool:
        network, names = self._world.network, (self._lender.name, self.reader.name)
        return not self._lender.alive or network.is_cut(*names) or network.is_cut(*reversed(names))

    def _begin(self, copy: Copy, places: list[tuple[int, int]]) -> None:
        """Judge before the first byte: by the mapped generations, or by asking the lender."""
        if self.shared:
            error = self._reused(copy)
            if error is not None:
                self._end(copy, error)
                return
        elif self._cut_off():
            self._after(copy, self.reader.native.options.handoff.stall_s, self._stalled, copy)
            return
        self._move(copy, places)

    def _stalled(self, copy: Copy) -> None:
        self._end(copy, PeerUnreachable("a read brought no byte for too long"))
        self._connection.close(PeerUnreachable("its data connection stalled"))

    def _move(self, copy: Copy, places: list[tuple[int, int]]) -> None:
        """One place now, the others later: what is read may change under it."""
        if not self.shared and self._cut_off():
            self._after(copy, self.reader.native.options.handoff.stall_s, self._stalled, copy)
            return
        layer, index = places[0]
        if not self.shared and not self._granted(copy, layer, index):
            self._end(copy, LeaseLost("the lender refuses the read"))
            return
        world, reader = self._world, self.reader
        if reader.alive:
            target = copy.placement._block_ids[index]
            if not reader.engine.receiving(target):
                raise Violation(f"{reader.name}: a copy lands in block {target}, which was given back")
            source = self._lender.engine.pool.memory[layer][copy.offer.block_ids[index]]  # type: ignore[attr-defined]
            reader.engine.pool.memory[layer][target][:] = source  # type: ignore[attr-defined]
        if len(places) > 1:
            self._after(copy, self._delay_s() / 4, self._move, copy, places[1:])
        elif self._damaged():
            world.story.tell("{}: a read from {} fails its checksum", reader.name, self._lender.name)
            self._end(copy, TransferCorrupt("the bytes are not the bytes sent"))
        else:
            self._end(copy, self._reused(copy))

    def _damaged(self) -> bool:
        world = self._world
        chance = 0.0 if self.shared or world.calm else world.plan.corrupt
        return world.network.rng_of("copies", self.reader.name).random() < chance

    def _granted(self, copy: Copy, layer: int, index: int) -> bool:
        server = self._lender.native._server
        connection = server._connections.get(self._data_token) if server is not None else None
        if server is None or connection is None:
            return False
        read = Read(1, copy.offer.ticket, layer, layer + 1, index, index + 1)
        return server.book.find(read, layer, connection.connection_id) is not None

    def _reused(self, copy: Copy) -> KvbatonError | None:
        """As both transports judge after the last byte."""
        region, offer = copy.region, copy.offer
        generations = self._lender.engine.pool.generations
        for index in range(region.block_start, region.block_stop):
            if generations[offer.block_ids[index]] != offer.generations[index]:
                return LeaseLost(f"block {offer.block_ids[index]} was reused while it was read")
        return None

    def _end(self, copy: Copy, error: KvbatonError | None) -> None:
        if copy.over:
            return
        copy.over = True
        if copy.timer is not None:
            copy.timer.cancel()
        del self._copies[copy]
        if error is not None:
            self._world.story.tell("{}: a copy from {} breaks: {}", self.reader.name, self._lender.name, error)
        copy.on_copied(error)

    @property
    def reading(self) -> list[Offer]:
        """The offers that a live reader reads from now."""
        return [copy.offer for copy in self._copies] if self.reader.alive else []

    @property
    def busy(self) -> bool:
        return bool(self._copies)
