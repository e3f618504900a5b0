"""Raw KV over a data connection of its own, so that bulk never holds up control.

The reader asks for regions, the lender answers in order, one frame a layer, straight out of its pool; the reader
receives straight into its own pool where layouts and block runs allow, else through a buffer of one frame.

Invariants: a frame whose checksum fails, that is cut short or that was not asked for is an error, never KV; the lender
computes the checksum and then verifies that the blocks are still what was offered, so bytes that change under the
sender fail the checksum and bytes that changed before it are not sent; a stopped read writes nothing into the pool from
the moment ``stop_copies`` returns; what is in flight is bounded by what the reader asked for.

Each side has one thread per connection: system calls, checksums and copies run without the interpreter lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvbaton.kv.rank_pools import AnyPool
from kvbaton.kv.reshard import HeadRange
from kvbaton.transfer.copying import OnCopied
from kvbaton.transfer.errors import HandoffError, LeaseLost, PeerUnreachable, ProtocolViolation, TransferCorrupt
from kvbaton.transfer.lent import lent_pieces
from kvbaton.transfer.placement import Placement, Shard
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.tickets import TicketBook
from kvbaton.transfer.wire import (
    DATA_HEADER_BYTES,
    DATA_OK,
    DATA_REFUSED,
    FRAME_HEADER_BYTES,
    DataHeader,
    MessageDecoder,
    Offer,
    Read,
    check_payload,
    encode_frame,
    parse_frame_header,
)

log = logging.getLogger(__name__)

MAX_READ_FRAME_BYTES = 4096
_MAX_PIECES = 512  # of one system call; the kernel's limit is 1024
_SCRATCH_BYTES = 1 << 20
_LANDING_BYTES = 1 << 20
_JOIN_S = 5.0


# -- the lending side


class DataSender:
    """Answers the reads of one data connection until it ends. ``on_ended`` is called from its thread."""

    def __init__(
        self,
        sock: socket.socket,
        connection_id: int,
        pool: AnyPool,
        book: TicketBook,
        stall_s: float,
        on_ended: Callable[[], None],
    ) -> None:
        self._sock = sock
        self._connection_id = connection_id
        self._pool = pool
        self._book = book
        self._stall_s = stall_s
        self._on_ended = on_ended
        self._decoder = MessageDecoder(Read)
        self.num_bytes_sent = 0
        self.num_reads_refused = 0
        self._thread = threading.Thread(target=self._run, name="kvbaton-lend", daemon=True)
        sock.setblocking(True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread; whatever it waits for on the socket returns at once."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            while (read := self._next_read()) is not None:
                self._answer(read)
        except (OSError, HandoffError) as error:
            log.info("data connection ended: %s", error)
        except Exception:
            log.exception("data connection ended by a bug")
        finally:
            self._sock.close()
            self._on_ended()

    def _next_read(self) -> Read | None:
        """None at the end of the stream. Between frames it waits without limit: control has the heartbeat."""
        self._sock.settimeout(None)
        first = self._sock.recv(1)
        if not first:
            return None
        deadline_s = time.monotonic() + self._stall_s
        header = first + self._receive(FRAME_HEADER_BYTES - 1, deadline_s)
        length, checksum = parse_frame_header(header, MAX_READ_FRAME_BYTES)
        payload = self._receive(length, deadline_s)
        check_payload(payload, checksum)
        read = self._decoder.decode(payload)
        assert isinstance(read, Read)
        return read

    def _receive(self, num_bytes: int, deadline_s: float) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            self._sock.settimeout(max(0.001, deadline_s - time.monotonic()))
            part = self._sock.recv(num_bytes - len(received))
            if not part:
                raise PeerUnreachable("the stream ends within a frame")
            received += part
        return bytes(received)

    def _answer(self, read: Read) -> None:
        for layer in range(read.layer_start, max(read.layer_stop, read.layer_start + 1)):
            header, pieces = self._prepare(read, layer)
            self._send([memoryview(header.pack()), *pieces])
            self.num_bytes_sent += header.payload_bytes
            if header.status == DATA_REFUSED:
                self.num_reads_refused += 1
                return

    def _prepare(self, read: Read, layer: int) -> tuple[DataHeader, list[memoryview]]:
        """One layer's frame. Asked of the book for each layer: the lease may end between two."""
        grant = self._book.take(read, layer, self._connection_id)
        if grant is None:
            return DataHeader(DATA_REFUSED, read.read_id, layer, read.block_start, read.block_stop, 0), []
        blocks = grant.offer.block_ids[read.block_start : read.block_stop]
        pieces = lent_pieces(self._pool, read, layer, blocks)
        if pieces is None:
            return DataHeader(DATA_REFUSED, read.read_id, layer, read.block_start, read.block_stop, 0), []
        num_bytes = sum(piece.nbytes for piece in pieces)
        header = DataHeader(DATA_OK, read.read_id, layer, read.block_start, read.block_stop, num_bytes)
        checksum = header.checksum_of(pieces)
        if not self._unchanged(blocks, grant.offer.generations[read.block_start : read.block_stop]):
            return DataHeader(DATA_REFUSED, read.read_id, layer, read.block_start, read.block_stop, 0), []
        return DataHeader(DATA_OK, read.read_id, layer, read.block_start, read.block_stop, num_bytes, checksum), pieces

    def _unchanged(self, blocks: tuple[int, ...], offered: tuple[int, ...]) -> bool:
        current = self._pool.generations[np.array(blocks, dtype=np.int64)]
        return bool((current == np.array(offered, dtype=np.uint64)).all())

    def _send(self, pieces: list[memoryview]) -> None:
        self._sock.settimeout(self._stall_s)
        for first in range(0, len(pieces), _MAX_PIECES):
            batch = pieces[first : first + _MAX_PIECES]
            while batch:
                batch = _without(batch, self._sock.sendmsg(batch))


# -- the reading side


@dataclass
class _Asked:
    """A read that was asked for and is not answered in full."""

    read_id: int
    region: Region
    placement: Placement
    on_copied: OnCopied
    next_layer: int = field(init=False)
    revoked: bool = False  # nothing lands once it is set

    def __post_init__(self) -> None:
        self.next_layer = self.region.layer_start


class TcpSource:
    """One peer's pool, read over one data connection. Made on the loop; callbacks come on the loop.

    ``on_lost`` tells that the connection broke; every read in flight has failed before.
    """

    def __init__(self, sock: socket.socket, stall_s: float, on_lost: Callable[[HandoffError], None]) -> None:
        self._sock = sock
        self._stall_s = stall_s
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # of what was asked and of ``_closed``; held for moments only
        self._landing = threading.Lock()  # held while bytes land in the pool; taken before ``_lock`` where both are
        self._asked: deque[_Asked] = deque()
        self._next_read_id = 0
        self._unsent = bytearray()
        self._closed = False
        self._broke: HandoffError | None = None  # why it is closed, where it was not asked for
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._wake_receiver, self._waked = socket.socketpair()
        self._waked.setblocking(False)
        sock.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kvbaton-pull", daemon=True)
        self._thread.start()

    # -- on the loop

    def start_copy(self, offer: Offer, region: Region, placement: Placement, on_copied: OnCopied) -> None:
        """Ask for a region. ``on_copied`` is called on the loop, when no byte of it lands any more."""
        with self._lock:
            if self._closed:
                error = self._broke or PeerUnreachable("the data connection is closed")
                self._loop.call_soon(on_copied, error)
                return
            self._asked.append(_Asked(self._next_read_id, region, placement, on_copied))
            self._unsent += encode_frame(_read_of(self._next_read_id, offer, region, placement.shard))
            self._next_read_id += 1
        self._wake()

    def stop_copies(self, placement: Placement) -> None:
        """When this returns nothing lands through ``placement`` any more; what still arrives for it is thrown away."""
        with self._landing, self._lock:
            stopped = [asked for asked in self._asked if asked.placement is placement and not asked.revoked]
            for asked in stopped:
                asked.revoked = True
        for asked in stopped:
            self._loop.call_soon(asked.on_copied, PeerUnreachable("the read was given up"))

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._wake()

    def join(self) -> None:
        self._thread.join(_JOIN_S)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full: it is awake; closed: it is gone
            self._waked.send(b"\0")

    # -- on the receiver's thread

    def _run(self) -> None:
        error: HandoffError = PeerUnreachable("the data connection was closed")
        try:
            self._receive_frames()
        except HandoffError as found:
            error = found
        except OSError as found:
            error = PeerUnreachable(f"the data connection broke: {found}")
        except Exception as found:
            log.exception("the data connection's receiver failed")
            error = PeerUnreachable(f"the receiver failed: {found!r}")
        with self._lock:
            self._closed = True
            self._broke = error  # a read asked for from now on hears it too: the cause must not depend on who is first
            failed = [asked for asked in self._asked if not asked.revoked]
            self._asked.clear()
        for asked in failed:
            self._post(asked.on_copied, error)
        self._post(self._on_lost, error)
        # Only now may the peer learn of it: what it does then must not be heard of before the cause.
        self._sock.close()
        self._wake_receiver.close()
        self._waked.close()

    def _post(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to hear it
            self._loop.call_soon_threadsafe(callback, *args)

    def _receive_frames(self) -> None:
        header = memoryview(bytearray(DATA_HEADER_BYTES))
        bounce = bytearray()
        while True:
            self._fill([header], None)
            frame = DataHeader.unpack(header)
            asked = self._expect(frame)
            if frame.status == DATA_REFUSED:
                self._answered(asked, LeaseLost("the prefill side refused a read: the ticket is not good any more"))
                continue
            views = asked.placement.direct_views(frame.layer, frame.block_start, frame.block_stop)
            if views is None:
                if len(bounce) < frame.payload_bytes:
                    bounce = bytearray(frame.payload_bytes)
                self._fill([memoryview(bounce)[: frame.payload_bytes]], None)
                received = [memoryview(bounce)[: frame.payload_bytes]]
            else:
                self._fill(views, asked)
                received = views
            self._take(asked, frame, received, placed=views is not None)

    def _expect(self, frame: DataHeader) -> _Asked:
        with self._lock:
            asked = self._asked[0] if self._asked else None
        if asked is None or frame.read_id != asked.read_id or frame.layer != asked.next_layer:
            raise ProtocolViolation("data that was not asked for, or out of order")
        region = asked.region
        if (frame.block_start, frame.block_stop) != (region.block_start, region.block_stop):
            raise ProtocolViolation("data of other blocks than were asked for")
        num_bytes = (frame.block_stop - frame.block_start) * asked.placement.source_block_bytes
        if frame.status == DATA_REFUSED:
            num_bytes = 0
        if frame.payload_bytes != num_bytes:
            raise ProtocolViolation(f"{frame.payload_bytes} bytes of data where the layout makes {num_bytes}")
        return asked

    def _take(self, asked: _Asked, frame: DataHeader, received: list[memoryview], placed: bool) -> None:
        """Verify one layer, put it in place if it is not there yet, and finish the read with its last layer."""
        if not asked.revoked and frame.checksum_of(received) != frame.checksum and not asked.revoked:
            raise TransferCorrupt(f"layer {frame.layer} arrived with a wrong checksum")
        if not placed:
            with self._landing:
                if not asked.revoked:
                    asked.placement.place(frame.layer, frame.block_start, frame.block_stop, received[0])
        asked.next_layer += 1
        if asked.next_layer == asked.region.layer_stop:
            self._answered(asked, None)

    def _answered(self, asked: _Asked, error: HandoffError | None) -> None:
        with self._lock:
            self._asked.popleft()
            revoked = asked.revoked
        if not revoked:
            self._post(asked.on_copied, error)

    def _fill(self, views: list[memoryview], asked: _Asked | None) -> None:
        """Receive exactly the size of ``views``; into scratch once ``asked`` is revoked."""
        left = sum(view.nbytes for view in views)
        polled = False
        while left:
            poll_first = not polled and (self._closed or self._unsent)
            # Without waiting: once ``stop_copies`` has had this lock, nothing lands.
            with self._landing:
                revoked = asked is not None and asked.revoked
                target = [self._scratch[: min(left, _SCRATCH_BYTES)]] if revoked else _at_most(views)
                try:
                    received = None if poll_first else self._sock.recvmsg_into(target)[0]
                except BlockingIOError:
                    received = None
            if received is None:
                self._await_readable()
                polled = True
                continue
            polled = False
            if received == 0:
                raise PeerUnreachable("the peer closed the data connection")
            left -= received
            if not revoked:
                views = _without(views, received)

    def _await_readable(self) -> None:
        """Wait for bytes, sending what is to be sent. Raises when closed, or when the peer owes bytes and stalls."""
        poller = select.poll()
        poller.register(self._wake_receiver, select.POLLIN)
        while True:
            with self._lock:
                if self._closed:
                    raise PeerUnreachable("the data connection was closed")
                owed = bool(self._asked)
                if self._unsent:
                    with contextlib.suppress(BlockingIOError):
                        del self._unsent[: self._sock.send(self._unsent)]
                wanted = select.POLLIN | (select.POLLOUT if self._unsent else 0)
            poller.register(self._sock, wanted)
            ready = dict(poller.poll(self._stall_s * 1000))
            if self._wake_receiver.fileno() in ready:
                self._wake_receiver.recv(4096)
            if ready.get(self._sock.fileno(), 0) & ~select.POLLOUT:
                return
            if not ready and owed:
                raise PeerUnreachable(f"no data for {self._stall_s:.0f} s though some was asked for")


def _read_of(read_id: int, offer: Offer, region: Region, shard: Shard) -> Read:
    heads = shard.asked or HeadRange(0, 0)
    return Read(
        read_id,
        offer.ticket,
        region.layer_start,
        region.layer_stop,
        region.block_start,
        region.block_stop,
        shard.rank,
        heads.start,
        heads.stop,
        shard.part,
    )


def _at_most(pieces: list[memoryview]) -> list[memoryview]:
    """The beginning of ``pieces``: what one system call may land before somebody else has a turn at the lock."""
    taken: list[memoryview] = []
    room = _LANDING_BYTES
    for piece in pieces[:_MAX_PIECES]:
        taken.append(piece[:room])
        room -= piece.nbytes
        if room <= 0:
            break
    return taken


def _without(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of ``pieces`` after the first ``num_bytes``."""
    index = 0
    while index < len(pieces) and num_bytes >= pieces[index].nbytes:
        num_bytes -= pieces[index].nbytes
        index += 1
    rest = pieces[index:]
    if num_bytes:
        rest[0] = rest[0][num_bytes:]
    return rest
