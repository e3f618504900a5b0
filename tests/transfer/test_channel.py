"""Control connections between a real server and a reader that behaves badly."""

from __future__ import annotations

import asyncio
import socket

import pytest

from kvbaton.transfer import channel
from kvbaton.transfer.channel import ControlChannel
from kvbaton.transfer.errors import PeerUnreachable, ProtocolViolation
from kvbaton.transfer.machine import IllegalEvent
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.wire import Abort, Failed, Ping, Pong, ToPrefill, encode_frame
from kvbaton.types import LocalError


class Ends:
    """One end is the channel, the other a bare socket."""

    def __init__(self, on_message=None, **options):
        self.messages, self.errors = [], []
        self.closed = asyncio.Event()
        self.ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.channel = ControlChannel(
            ToPrefill, on_message or self.messages.append, self._on_closed, HandoffOptions(**options)
        )

    def _on_closed(self, error):
        self.errors.append(error)
        self.closed.set()

    async def __aenter__(self):
        self.ours.setblocking(False)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: self.channel, self.ours)
        return self

    async def __aexit__(self, *_):
        self.theirs.close()
        self.channel.close(PeerUnreachable("test over"))
        await self.closed.wait()
        assert len(self.errors) == 1, "told exactly once"

    async def end(self):
        async with asyncio.timeout(10):
            await self.closed.wait()
        return self.errors[0]


async def test_messages_come_in_order_and_the_end_once():
    async with Ends() as ends:
        ends.theirs.send(b"".join(encode_frame(Abort(i)) for i in range(50)))
        ends.theirs.shutdown(socket.SHUT_WR)
        assert "closed the connection" in str(await ends.end())
        assert ends.messages == [Abort(i) for i in range(50)]


async def test_silence_ends_it_and_a_sign_of_life_does_not(monkeypatch):
    """The loop's clock is the test's."""
    loop = asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    heard = []
    ends = Ends(heard.append, heartbeat_s=10.0, silence_s=40.0)
    async with ends:
        for number in range(4):
            ends.theirs.send(encode_frame(Ping()))
            while len(heard) == number:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(30):  # seconds, and what they make due
                now_s += 1.0
                await asyncio.sleep(0)
            assert not ends.channel.closed
        while not ends.closed.is_set():
            now_s += 1.0
            await asyncio.sleep(0)
        assert "said nothing" in str(ends.errors[0])


async def test_half_a_message_ends_it_though_bytes_trickle():
    async with Ends(frame_s=0.3) as ends:
        frame = encode_frame(Abort(2**40))
        for index in range(len(frame) - 1):
            if ends.channel.closed:
                break
            ends.theirs.send(frame[index : index + 1])
            await asyncio.sleep(0.05)
        assert isinstance(await ends.end(), ProtocolViolation)
        assert ends.messages == []


async def test_a_peer_that_does_not_read_is_dropped_before_memory_fills(monkeypatch):
    monkeypatch.setattr(channel, "MAX_UNSENT_BYTES", 1 << 20)
    async with Ends() as ends:
        big = Failed(1, "internal", "x" * 1900)
        for _ in range(20_000):
            ends.channel.send(big)
            if ends.channel.closed:
                break
        assert "does not read" in str(await ends.end())
        ends.channel.send(Pong())  # harmless


@pytest.mark.parametrize("raised", [ProtocolViolation("no"), IllegalEvent("no")])
async def test_a_message_out_of_place_ends_it(raised):
    def refuse(_message):
        raise raised

    async with Ends(refuse) as ends:
        ends.theirs.send(encode_frame(Ping()) * 3)
        assert isinstance(await ends.end(), ProtocolViolation)


@pytest.mark.parametrize("wrong", [{"lease_s": 0}, {"max_copies": 0}, {"heartbeat_s": 10.0}, {"stall_s": -1}])
def test_options_without_sense_are_refused(wrong):
    with pytest.raises(LocalError):
        HandoffOptions(**wrong)
