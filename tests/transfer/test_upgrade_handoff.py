"""Hand-offs between versions of the protocol, over real sockets: neighbours refuse each other by name, nothing moves.

Version 1 is frozen here as it was spoken: who wrote it can no longer be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
import pytest
from prefill_process import make_identity, make_request
from transfer.test_faults import exchange, introduce

from kvbaton.kv.compat import digest
from kvbaton.transfer.client import HandoffClient, pull_all
from kvbaton.transfer.errors import PeerRefused, PeerUnreachable
from kvbaton.transfer.wire import Refused, encode_frame, encode_identity, make_hello
from kvbaton.types import PROTOCOL_VERSION


class OldHello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of version 1."""

    protocol_version: int
    fingerprint_digest: bytes
    identity: msgspec.Raw


class OldDataHello(msgspec.Struct, frozen=True, tag="data_hello"):
    data_token: bytes


class OldRefused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str
    differences: tuple[str, ...] = ()


class NewHello(msgspec.Struct, frozen=True, tag="hello"):
    """What a later version may say: more, and otherwise, behind the first field."""

    protocol_version: int
    fingerprint_digest: bytes = b""
    identity: msgspec.Raw = msgspec.Raw(b"\xc0")
    nonce: bytes = b"n" * 48
    ciphers: tuple[str, ...] = ("of tomorrow",)


OLD_OPENING = msgspec.msgpack.Decoder(OldHello | OldDataHello)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    header = await reader.readexactly(8)
    return await reader.readexactly(int.from_bytes(header[:4], "little"))


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
async def test_a_reader_of_version_1_is_refused_in_words_it_knows(make_pair) -> None:
    """It proves nothing, so it gets nothing; and is told which version it has met."""
    pair = await make_pair()
    identity = make_identity(pair.pool)
    hello = OldHello(1, digest(identity.fingerprint), msgspec.Raw(encode_identity(identity)))
    host, port = pair.address
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(encode_frame(hello))
    async with asyncio.timeout(20):
        told = msgspec.msgpack.decode(await read_frame(reader), type=OldRefused)
        assert await reader.read(10) == b"", "nothing follows"
    writer.close()
    assert told.differences == (f"protocol_version: prefill {PROTOCOL_VERSION}, decode 1",)
    assert pair.backend.calls == [] and pair.server.stats().num_refused == 1


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
async def test_a_data_connection_of_version_1_is_dropped(make_pair) -> None:
    pair = await make_pair()
    with pytest.raises(PeerUnreachable):
        await exchange(pair.address, encode_frame(OldDataHello(bytes(16))))


class OldLender:
    """Answers as version 1 did: the opening is decoded by its own structs, then the version is judged."""

    def __init__(self, version: int, refused: Any) -> None:
        self.version, self.refused = version, refused
        self.heard: list[OldHello | OldDataHello] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            hello = OLD_OPENING.decode(await read_frame(reader))
            self.heard.append(hello)
            if isinstance(hello, OldHello) and hello.protocol_version != self.version:
                differs = f"protocol_version: prefill {self.version}, decode {hello.protocol_version}"
                writer.write(encode_frame(self.refused("another version of the protocol", (differs,))))
        writer.close()


class NewRefused(msgspec.Struct, frozen=True, tag="refused"):
    reason: str
    differences: tuple[str, ...] = ()
    understood: tuple[int, ...] = (PROTOCOL_VERSION + 1, PROTOCOL_VERSION + 2)


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.parametrize(("version", "refused"), [(1, OldRefused), (PROTOCOL_VERSION + 1, NewRefused)])
async def test_a_lender_of_the_neighbouring_version_refuses_and_is_understood(make_pair, version, refused) -> None:
    """Our first frame can be read by either, and its refusal by us: the request goes elsewhere at once."""
    pair = await make_pair(secret=b"the fleet's secret, long enough")
    lender = OldLender(version, refused)
    server = await asyncio.start_server(lender, "127.0.0.1", 0)
    client = HandoffClient(make_identity(pair.pool), pair.pool, pair.options)
    with pytest.raises(PeerRefused) as caught:
        await pull_all(client.pull(server.sockets[0].getsockname(), make_request("r", 40), 0, [1, 2, 3]))
    assert caught.value.differences == (f"protocol_version: prefill {version}, decode {PROTOCOL_VERSION}",)
    assert not caught.value.retryable and not pair.pool.buffer.any()
    (hello,) = lender.heard
    assert isinstance(hello, OldHello) and bytes(hello.identity) == b"\xc0", "nothing of ours before it is known"
    await client.close()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
async def test_a_reader_of_a_later_version_is_refused_whatever_else_it_says(make_pair) -> None:
    pair = await make_pair()
    for hello in (NewHello(PROTOCOL_VERSION + 1), make_hello(b"", PROTOCOL_VERSION + 7), make_hello(b"", -1)):
        reply = await exchange(pair.address, encode_frame(hello))
        assert isinstance(reply, Refused) and reply.differences[0].startswith("protocol_version: prefill ")
    assert pair.server.stats().num_refused == 3


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
async def test_within_a_version_what_is_added_is_passed_over(make_pair) -> None:
    """So that a build that says more in its identity need not be another version."""
    pair = await make_pair()
    identity = msgspec.msgpack.decode(encode_identity(make_identity(pair.pool)))
    identity["build"] = "of next week"
    reply, _ = await introduce(pair.address, make_identity(pair.pool), encoded=msgspec.msgpack.encode(identity))
    assert reply.identity.incarnation == pair.source.incarnation
