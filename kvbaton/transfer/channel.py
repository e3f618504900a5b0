"""One control connection: frames in and out, with bounds on memory, on half a message, and on silence.

Invariants: messages are handed on in the order they came, on the loop's thread; ``on_closed`` is called exactly once,
after the last message; a peer that breaks the protocol, stops in the middle of a frame, says nothing for too long or
does not take what we send is dropped. What has already arrived is handed on before silence is judged.

Knows nothing about sessions or what the messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import cast

import msgspec

from kvbaton.transfer.errors import HandoffError, PeerUnreachable, ProtocolViolation
from kvbaton.transfer.machine import IllegalEvent
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.wire import (
    CONTROL_FRAME_BYTES,
    FRAME_HEADER_BYTES,
    FrameBuffer,
    MessageDecoder,
    check_payload,
    encode_frame,
    parse_frame_header,
)

log = logging.getLogger(__name__)

MAX_UNSENT_BYTES = 16 * 2**20  # a peer that lets this much pile up is not reading
_CONGESTED_BYTES = 256 * 1024
_POLL_S = 0.001  # one turn of the loop that polls its sockets, on asyncio and uvloop alike


class ControlChannel(asyncio.Protocol):
    """``on_message`` may raise a HandoffError or IllegalEvent to drop the connection."""

    def __init__(
        self,
        union: object,
        on_message: Callable[[msgspec.Struct], None],
        on_closed: Callable[[HandoffError], None],
        options: HandoffOptions,
    ) -> None:
        self._decoder = MessageDecoder(union)
        self._on_message = on_message
        self._on_closed = on_closed
        self._options = options
        self._frames = FrameBuffer(CONTROL_FRAME_BYTES)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._error: HandoffError | None = None
        self._frame_timer: asyncio.TimerHandle | None = None
        self._heard_s = self._loop.time()
        self._silence_timer = self._loop.call_later(options.silence_s, self._judge_silence)

    @property
    def closed(self) -> bool:
        return self._error is not None

    @property
    def congested(self) -> bool:
        """The peer takes what we send more slowly than we send it."""
        return self._transport is not None and self._transport.get_write_buffer_size() > _CONGESTED_BYTES

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; harmless on a closed channel, whose users hear of it by ``on_closed``."""
        if self._error is not None or self._transport is None:
            return
        self._transport.write(encode_frame(message))
        if self._transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            self.close(PeerUnreachable("the peer does not read what it is sent"))

    def close(self, error: HandoffError) -> None:
        """Drop the connection; ``on_closed`` follows."""
        if self._error is not None:
            return
        self._error = error
        self._silence_timer.cancel()
        self._stop_frame_timer()
        if self._transport is not None:
            self._transport.abort()
        self._loop.call_soon(self._on_closed, error)

    # -- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name
        if self._error is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        if self._error is not None:
            return
        self._heard_s = self._loop.time()
        try:
            for payload in self._frames.feed(data):
                self._on_message(self._decoder.decode(payload))
                if self._error is not None:
                    return
        except HandoffError as error:
            self.close(error)
            return
        except IllegalEvent as error:
            log.warning("peer left the protocol: %s", error)
            self.close(ProtocolViolation(f"a message out of place: {error}"))
            return
        self._watch_partial_frame()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close(PeerUnreachable(f"the connection was lost: {exc}" if exc else "the peer closed the connection"))

    # -- timers

    def _watch_partial_frame(self) -> None:
        if not self._frames.partial:
            self._stop_frame_timer()
        elif self._frame_timer is None:
            self._frame_timer = self._loop.call_later(
                self._options.frame_s, self.close, ProtocolViolation("half a message, then nothing")
            )

    def _stop_frame_timer(self) -> None:
        if self._frame_timer is not None:
            self._frame_timer.cancel()
            self._frame_timer = None

    def _judge_silence(self) -> None:
        # The loop itself may have been away: let it take in what has arrived meanwhile, and judge after that.
        self._silence_timer = self._loop.call_later(_POLL_S, self._judge_silence_now)

    def _judge_silence_now(self) -> None:
        quiet_s = self._loop.time() - self._heard_s
        if quiet_s >= self._options.silence_s:
            self.close(PeerUnreachable(f"the peer said nothing for {quiet_s:.1f} s"))
        else:
            self._silence_timer = self._loop.call_later(self._options.silence_s - quiet_s, self._judge_silence)


def tune_socket(sock: socket.socket) -> None:
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


async def receive_frame(sock: socket.socket, max_frame_bytes: int) -> bytes:
    """One frame and not a byte more, so that the socket can be handed to whoever reads on. Deadline: the caller's."""
    header = await _receive_exactly(sock, FRAME_HEADER_BYTES)
    length, checksum = parse_frame_header(header, max_frame_bytes)
    payload = await _receive_exactly(sock, length)
    check_payload(payload, checksum)
    return payload


async def _receive_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    received = bytearray()
    while len(received) < num_bytes:
        part = await loop.sock_recv(sock, min(num_bytes - len(received), 65536))
        if not part:
            raise PeerUnreachable("the peer closed the connection in the handshake")
        received += part
    return bytes(received)
