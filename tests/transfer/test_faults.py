"""Peers that die, lie, differ, or are strangers: real processes, real bytes on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from prefill_process import FakePrefill, expected_kv, make_identity, make_pool, make_request, read_kv

from kvbaton.kv.compat import digest as digest_of
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SHM_DIR, sweep_stale
from kvbaton.transfer.auth import TICKET_BYTES, Handshake, fresh_nonce
from kvbaton.transfer.channel import receive_frame
from kvbaton.transfer.client import HandoffClient, pull_all
from kvbaton.transfer.errors import PeerRefused, PeerUnreachable, ProtocolViolation, TransferCorrupt
from kvbaton.transfer.identity import choose_transport, host_identity
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.server import HandoffServer
from kvbaton.transfer.tcp import TcpSource
from kvbaton.transfer.wire import (
    DATA_HEADER_BYTES,
    DATA_REFUSED,
    HANDSHAKE_FRAME_BYTES,
    Ack,
    DataHeader,
    DataHello,
    HostIdentity,
    MessageDecoder,
    Offer,
    OpeningReply,
    Ping,
    Pong,
    Proof,
    ProofReply,
    Read,
    Refused,
    Start,
    ToDecode,
    encode_frame,
    encode_identity,
    make_hello,
)
from kvbaton.types import PROTOCOL_VERSION, LocalError, RemoteError

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")
SCRIPT = Path(__file__).with_name("prefill_process.py")


async def until(condition, timeout_s: float = 60.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


# -- death


class PrefillProcess:
    def __init__(self, port: int = 0, transport: str = "auto"):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), msgspec.json.encode(LAYOUT).decode(), "64", str(port), transport],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=SCRIPT.parents[2],
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[2])},
        )
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.close()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(120)
        self.process.stdout.close()


# Not bounds on speed: a process that the machine lets starve is not dead, and a peer that was killed is told at once.
STARVED = {"connect_s": 60.0, "frame_s": 60.0, "silence_s": 120.0, "stall_s": 120.0}


async def test_a_killed_prefill_process_fails_what_is_in_flight_and_its_successor_serves(transport):
    pool = make_pool(LAYOUT, 64, named=False)
    client = HandoffClient(make_identity(pool), pool, HandoffOptions(transport=transport, **STARVED))
    first = PrefillProcess(transport=transport)
    address = ("127.0.0.1", first.port)
    request = make_request("before", 100)
    blocks = list(range(7))
    await pull_all(client.pull(address, request, 0, blocks))
    incarnation = (await client.connect(address)).incarnation
    assert np.array_equal(read_kv(pool, blocks, 100), expected_kv(request.prompt_token_ids, LAYOUT))
    # A process that is stopped before it is killed has certainly not answered.
    first.process.send_signal(signal.SIGSTOP)
    task = asyncio.ensure_future(pull_all(client.pull(address, make_request("in flight", 100), 0, blocks)))
    await until(lambda: client.stats().num_pulls == 1)
    first.kill()
    with pytest.raises(PeerUnreachable):
        await task
    sweep_stale()  # kill -9 leaves its segment; whoever starts on this host meanwhile may have swept it before us
    assert not [name for name in os.listdir(SHM_DIR) if incarnation in name]
    second = PrefillProcess(first.port, transport)
    request = make_request("after", 100)
    await pull_all(client.pull(address, request, 0, blocks))
    assert (await client.connect(address)).incarnation != incarnation
    assert np.array_equal(read_kv(pool, blocks, 100), expected_kv(request.prompt_token_ids, LAYOUT))
    await client.close()
    second.close()
    assert not [name for name in sweep_stale() if incarnation in name]
    pool.close()


# -- difference


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"revision": "another"}, "model_revision"),
        ({"layout": {"dtype": "float16"}}, "kv_dtype"),
        ({"layout": {"num_kv_heads": 4}}, "num_kv_heads"),
        ({"layout": {"num_layers": 5}}, "num_layers"),
        ({"layout": {"head_dim": 16}}, "head_dim"),
    ],
)
async def test_a_mismatch_is_refused_with_the_fields_before_a_byte_moves(make_pair, change, field):
    """KV-19 (and KV-01, where the layouts cannot be converted)."""
    pair = await make_pair()
    layout = msgspec.structs.replace(LAYOUT, **change.get("layout", {}))
    pool = make_pool(layout, 64, named=False)
    client = HandoffClient(make_identity(pool, change.get("revision", "tiny")), pool, pair.options)
    with pytest.raises(PeerRefused, match=field) as caught:
        await pull_all(client.pull(pair.address, make_request("r", 40), 0, [1, 2, 3]))
    assert any(difference.startswith(f"{field}: prefill ") for difference in caught.value.differences)
    assert not caught.value.retryable
    stats = pair.server.stats()
    assert stats.num_refused == 1 and stats.num_bytes_sent == 0 and pair.backend.calls == []
    assert not pool.buffer.any()
    await client.close()
    pool.close()


async def test_another_version_of_the_protocol_is_refused_without_decoding_the_rest(make_pair):
    pair = await make_pair()
    hello = make_hello(b"of tomorrow", PROTOCOL_VERSION + 1)
    hello = msgspec.structs.replace(hello, identity=msgspec.Raw(msgspec.msgpack.encode({"of": "tomorrow"})))
    reply = await exchange(pair.address, encode_frame(hello))
    assert isinstance(reply, Refused) and f"decode {PROTOCOL_VERSION + 1}" in reply.differences[0]


async def test_a_fingerprint_with_a_wrong_digest_is_dropped(make_pair):
    pair = await make_pair()
    with pytest.raises(PeerUnreachable):
        await introduce(pair.address, make_identity(pair.pool), digest=b"x")


# -- the way


def test_the_transport_is_chosen_by_where_the_peer_is():
    pool = make_pool(LAYOUT, 2)
    here, nameless = make_identity(pool), msgspec.structs.replace(make_identity(pool), shm_name=None)
    elsewhere = msgspec.structs.replace(here, host=HostIdentity("another boot", 1))
    ours = host_identity()
    assert choose_transport("auto", here, ours) == choose_transport("shm", here, ours) == "shm"
    assert choose_transport("auto", elsewhere, ours) == choose_transport("auto", nameless, ours) == "tcp"
    assert choose_transport("tcp", here, ours) == "tcp"
    for peer, why in ((elsewhere, "another host"), (nameless, "no named pool")):
        with pytest.raises(LocalError, match=why):
            choose_transport("shm", peer, ours)
    pool.unlink()
    pool.close()


async def test_auto_falls_back_to_tcp_when_the_segment_cannot_be_opened():
    options = HandoffOptions(transport="auto")
    source, pool = make_pool(LAYOUT, 64), make_pool(LAYOUT, 64, named=False)
    backend = FakePrefill(source)
    server = HandoffServer(make_identity(source), source, backend, options)
    address = ("127.0.0.1", await server.start())
    source.unlink()
    for transport, outcome in (("auto", "tcp"), ("shm", None)):
        client = HandoffClient(make_identity(pool), pool, replace(options, transport=transport))
        request = make_request("r", 40)
        if outcome is None:
            with pytest.raises(RemoteError, match="cannot open shared memory"):
                await pull_all(client.pull(address, request, 0, [1, 2, 3]))
        else:
            _, completed = await pull_all(client.pull(address, request, 0, [1, 2, 3]))
            assert completed.transport == outcome
        await client.close()
    await server.stop()
    backend.stop()


# -- damage on the way


class Relay:
    """Between the two; ``damage(index of the connection, bytes so far, data)`` may change what the server sends."""

    def __init__(self, target, damage):
        self._target, self._damage = target, damage
        self._num = 0
        self._tasks = set()

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()

    async def _serve(self, reader, writer):
        index, self._num = self._num, self._num + 1
        up_reader, up_writer = await asyncio.open_connection(*self._target)

        async def pump(source, sink, damage):
            position = 0
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    changed = damage(index, position, data)
                    position += len(data)
                    if changed is None:
                        break
                    sink.write(changed)
                    await sink.drain()
            for end in (writer, up_writer):
                end.transport.abort()

        await asyncio.gather(
            pump(reader, up_writer, lambda i, p, d: d), pump(up_reader, writer, self._damage), return_exceptions=True
        )

    async def close(self):
        self._server.close()
        await self._server.wait_closed()


def flip(index, position, data):
    if index == 1 and position <= 20_000 < position + len(data):
        data = bytearray(data)
        data[20_000 - position] ^= 1
    return bytes(data)


def cut(index, position, data):
    return data if index == 0 or position + len(data) <= 20_000 else None


@pytest.mark.parametrize(("damage", "error"), [(flip, TransferCorrupt), (cut, PeerUnreachable)])
async def test_damaged_or_truncated_data_is_an_error_and_never_kv(make_pair, transport, damage, error):
    if transport != "tcp":
        pytest.skip("shared memory has no way on which bytes are lost, and RDMA's own checks are below us")
    pair = await make_pair()
    relay = Relay(pair.address, damage)
    direct, pair.address = pair.address, (await relay.start())[:2]
    with pytest.raises(error):
        await pair.pull_all(make_request("r", 300))
    await pair.settled()
    pair.address = direct
    await pair.pull_all(make_request("s", 300))
    pair.assert_arrived(make_request("s", 300), pair.dst_blocks(300))
    await relay.close()


async def test_a_read_asked_for_after_the_break_hears_why_it_broke():
    """Whether a pull learns of damage or only of a closed connection must not depend on which thread is first."""
    ours, theirs = socket.socketpair()
    lost = asyncio.get_running_loop().create_future()
    source = TcpSource(ours, 5.0, lost.set_result)
    theirs.sendall(bytes(DATA_HEADER_BYTES))  # data that nobody asked for
    assert isinstance(await asyncio.wait_for(lost, 20), ProtocolViolation)
    heard = asyncio.get_running_loop().create_future()
    offer = Offer(1, bytes(16), (0,), (1,), 16, 0, 1.0)
    source.start_copy(offer, Region(0, 1, 0, 1), None, heard.set_result)
    assert isinstance(await asyncio.wait_for(heard, 20), ProtocolViolation)
    theirs.close()
    source.join()


async def test_a_link_that_goes_silent_is_noticed_by_both_and_recovers(make_pair):
    pair = await make_pair(heartbeat_s=0.1, silence_s=1.5, stall_s=1.5)
    silent = False
    forever = asyncio.Event()

    class Deaf(Relay):
        async def _serve(self, reader, writer):
            up_reader, up_writer = await asyncio.open_connection(*self._target)

            async def pump(source, sink):
                with contextlib.suppress(ConnectionError):
                    while data := await source.read(65536):
                        if silent:
                            await forever.wait()
                        sink.write(data)
                for end in (writer, up_writer):
                    end.transport.abort()

            await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    relay = Deaf(pair.address, None)
    pair.address = (await relay.start())[:2]
    await pair.pull_all(make_request("before", 40))
    silent = True
    with pytest.raises(PeerUnreachable):
        await pair.pull_all(make_request("during", 40))
    await pair.settled()
    forever.set()
    silent = False
    await pair.pull_all(make_request("after", 40))
    await relay.close()


# -- strangers


async def exchange(address, opening: bytes):
    """Send an opening, return the reply; PeerUnreachable if the connection is dropped."""
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, address)
        await loop.sock_sendall(sock, opening)
        async with asyncio.timeout(10):
            try:
                return MessageDecoder(OpeningReply).decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
            except ConnectionError as error:
                raise PeerUnreachable("reset") from error


async def introduce_on(sock, identity, digest=None, secret=b"", encoded=None):
    """Our side of the handshake, by hand: the reply and the session."""
    loop = asyncio.get_running_loop()
    nonce = fresh_nonce()
    await loop.sock_sendall(sock, encode_frame(make_hello(nonce)))
    challenge = MessageDecoder(OpeningReply).decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
    handshake, encoded = Handshake(secret, nonce, challenge.nonce), encoded or encode_identity(identity)
    digest = digest_of(identity.fingerprint) if digest is None else digest
    proof = Proof(digest, msgspec.Raw(encoded), handshake.of_reader(encoded))
    await loop.sock_sendall(sock, encode_frame(proof))
    reply = MessageDecoder(ProofReply).decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
    if isinstance(reply, Refused):
        return reply, None
    return reply, handshake.session(identity.incarnation, reply.identity.incarnation)


async def introduce(address, identity, digest=None, secret=b"", encoded=None):
    with socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, address)
        async with asyncio.timeout(10):
            try:
                return await introduce_on(sock, identity, digest, secret, encoded)
            except ConnectionError as error:
                raise PeerUnreachable("reset") from error


TOUCHED = Path(tempfile.gettempdir()) / "kvbaton-pickle-was-run"


class TouchFile:
    def __reduce__(self):
        return (open, (str(TOUCHED), "w"))


HOSTILE = {
    "pickle": pickle.dumps(TouchFile()),
    "a gigabyte announced": (1 << 30).to_bytes(4, "little") + b"\0" * 100,
    "random": np.random.default_rng(1).bytes(5000),
    "half a message": encode_frame(Ping())[:-1],
    "half a header": b"\x05",
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "a frame that is no message": encode_frame(Ping()),
    "a bad checksum": encode_frame(DataHello(b"x" * 16, b"n" * 32, b"t" * 32))[:-1] + b"y",
    "an unknown data token": encode_frame(DataHello(b"x" * 16, b"n" * 32, b"t" * 32)),
    "a hello without a nonce": encode_frame(make_hello(b"")),
    "a proof without a hello": encode_frame(Proof(b"", msgspec.Raw(b"\xc0"), b"t" * 32)),
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_bytes_are_dropped_within_the_deadline_and_harm_nobody(make_pair, name):
    """SE-04: no file, no memory, no answer, and the next peer is served."""
    pair = await make_pair(connect_s=0.6)
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loop = asyncio.get_running_loop()
    for _ in range(2):
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, pair.address)
            await loop.sock_sendall(sock, HOSTILE[name])
            async with asyncio.timeout(5):
                with contextlib.suppress(ConnectionError):
                    assert await loop.sock_recv(sock, 100) == b"", "answered"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 64 * 1024
    assert not TOUCHED.exists()
    await pair.pull_all(make_request("r", 40))


@pytest.mark.parametrize("payload", [b"\xff\xff\xff\x7f" + b"\0" * 8, encode_frame(Ping())[:-1], encode_frame(Pong())])
async def test_a_peer_that_turns_hostile_after_the_handshake_is_dropped(make_pair, payload):
    pair = await make_pair(frame_s=0.3)
    async with Stranger(pair) as stranger:
        await stranger.send_raw(payload)
        assert await stranger.dropped()
    await until(lambda: pair.server.stats().num_connections == 0)


async def test_no_module_of_the_transfer_can_execute_what_it_receives():
    folder = Path(__file__).parents[2] / "kvbaton" / "transfer"
    for path in folder.glob("*.py"):
        text = path.read_text()
        for forbidden in ("import pickle", "eval(", "exec(", "marshal", "yaml", "0.0.0.0"):
            assert forbidden not in text, f"{forbidden} in {path.name}"


class Stranger:
    """Speaks the protocol by hand, to say what the client never would."""

    def __init__(self, pair):
        self.pair = pair
        self.decoder = MessageDecoder(ToDecode)

    async def __aenter__(self):
        loop = asyncio.get_running_loop()
        self.control, self.data = socket.socket(), socket.socket()
        for sock in (self.control, self.data):
            sock.setblocking(False)
            await loop.sock_connect(sock, self.pair.address)
        reply, session = await introduce_on(self.control, make_identity(self.pair.pool))
        nonce = fresh_nonce()
        hello = DataHello(reply.data_token, nonce, session.of_data_reader(reply.data_token, nonce))
        await loop.sock_sendall(self.data, encode_frame(hello))
        assert await receive_frame(self.data, 100)
        return self

    async def __aexit__(self, *_):
        self.control.close()
        self.data.close()

    async def send(self, message):
        await self.send_raw(encode_frame(message))

    async def send_raw(self, data):
        await asyncio.get_running_loop().sock_sendall(self.control, data)

    async def receive(self, kind):
        async with asyncio.timeout(10):
            while True:
                message = self.decoder.decode(await receive_frame(self.control, 1 << 20))
                if isinstance(message, kind):
                    return message

    async def dropped(self) -> bool:
        async with asyncio.timeout(5):
            with contextlib.suppress(ConnectionError):
                while await asyncio.get_running_loop().sock_recv(self.control, 4096):
                    pass
            return True

    async def read(self, **fields) -> DataHeader:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.data, encode_frame(Read(**{"read_id": 1, **fields})))
        async with asyncio.timeout(10):
            received = b""
            while len(received) < 48:
                received += await loop.sock_recv(self.data, 48 - len(received))
            header = DataHeader.unpack(received)
            left = header.payload_bytes
            while left:
                left -= len(await loop.sock_recv(self.data, left))
            return header


async def test_tickets_are_good_once_here_and_for_what_was_offered_only(make_pair):
    """SE-03: an invented, stolen, stretched or used reference reads nothing."""
    pair = await make_pair()
    async with Stranger(pair) as owner, Stranger(pair) as thief:
        await owner.send(Start(1, make_request("r", 100), 0))
        offer = await owner.receive(Offer)
        whole = {"ticket": offer.ticket, "layer_start": 0, "layer_stop": 1, "block_start": 0, "block_stop": 7}
        await until(lambda: pair.server.book.find(Read(read_id=0, **whole), 0, 1) is not None)
        good = await owner.read(**whole)
        assert good.status != DATA_REFUSED and good.payload_bytes == 7 * LAYOUT.layer_block_bytes
        for wrong in (
            {"ticket": b"?" * TICKET_BYTES},
            {"block_stop": 8},
            {"block_start": 7},
            {"layer_start": 4, "layer_stop": 5},
            {"layer_start": 3, "layer_stop": 5},
            {"layer_start": 1, "layer_stop": 1},
        ):
            assert (await owner.read(**{**whole, **wrong})).status == DATA_REFUSED, wrong
        assert (await thief.read(**whole)).status == DATA_REFUSED
        await owner.send(Ack(offer.ticket))
        await until(lambda: pair.server.stats().num_sessions == 0)
        assert (await owner.read(**whole)).status == DATA_REFUSED, "used twice"
    assert pair.server.stats().num_released <= 1


async def test_a_hundred_starts_with_one_id_hold_the_blocks_of_one(make_pair):
    """SE-05, on the side that holds blocks."""
    pair = await make_pair(num_blocks=256)
    async with Stranger(pair) as stranger:
        for pull_id in range(100):
            await stranger.send(Start(pull_id, make_request("same", 100), 0))
        await stranger.receive(Offer)
        assert pair.server.stats().num_sessions == 1
        assert [name for name, _ in pair.backend.calls].count("start") == 1
    await pair.settled()


async def test_tickets_cannot_be_guessed_from_one_another(make_pair):
    pair = await make_pair(num_blocks=256)
    async with Stranger(pair) as stranger:
        tickets = set()
        for pull_id in range(20):
            await stranger.send(Start(pull_id, make_request(f"r{pull_id}", 20), 0))
            tickets.add((await stranger.receive(Offer)).ticket)
        assert len(tickets) == 20
        ones = np.unpackbits(np.frombuffer(b"".join(tickets), dtype=np.uint8)).mean()
        assert 0.4 < ones < 0.6


async def test_connections_beyond_the_bound_are_refused(make_pair):
    pair = await make_pair(max_connections=1)
    await pair.pull_all(make_request("r", 20))
    other = HandoffClient(make_identity(pair.pool), pair.pool, pair.options)
    with pytest.raises(PeerRefused, match="no more connections"):
        await pull_all(other.pull(pair.address, make_request("s", 20), 0, [40, 41]))
    await other.close()


async def test_a_stale_reference_after_reuse_is_refused(make_pair):
    """SE-03: the engine let the blocks go and handed them to another prompt; the ticket has not been revoked yet."""
    pair = await make_pair()
    async with Stranger(pair) as owner:
        await owner.send(Start(1, make_request("r", 100), 0))
        offer = await owner.receive(Offer)
        whole = {"ticket": offer.ticket, "layer_start": 0, "layer_stop": 1, "block_start": 0, "block_stop": 7}
        await until(lambda: pair.server.book.find(Read(read_id=0, **whole), 0, 1) is not None)
        pair.backend.call(lambda: pair.source.generations.__setitem__(offer.block_ids[3], 999))
        assert (await owner.read(**whole)).status == DATA_REFUSED


class Narrow(Relay):
    """Lets bulk through in small pieces, each only when the test's loop has turned, and so many until it is opened."""

    def __init__(self, target):
        super().__init__(target, None)
        self.num_left = 0
        self.open = asyncio.Event()

    def shut(self, after_bytes):
        self.num_left = after_bytes
        self.open.clear()

    async def _serve(self, reader, writer):
        up_reader, up_writer = await asyncio.open_connection(*self._target, limit=4096)

        async def pump(source, sink):
            with contextlib.suppress(ConnectionError):
                while data := await source.read(2048):
                    self.num_left -= len(data)
                    if self.num_left < 0:
                        await self.open.wait()
                    sink.write(data)
                    await sink.drain()
            for end in (writer, up_writer):
                end.transport.abort()

        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))


async def test_blocks_of_an_aborted_pull_are_free_at_once(make_pair, transport):
    """KV-11: X is given up while its bytes are on the way; others write into its blocks, and Y comes the same way."""
    pair = await make_pair(num_blocks=160)
    relay = Narrow(pair.address)
    pair.address = (await relay.start())[:2]
    blocks, others = list(range(10, 73)), list(range(80, 143))
    for repeat in range(10):
        pair.pool.buffer[:] = 0
        relay.shut(after_bytes=100_000)  # X's 258 kB over tcp are not through before it is given up
        x = asyncio.ensure_future(pair.pull_all(make_request(f"x{repeat}", 1000, seed=repeat), blocks=blocks))
        await until(lambda x=x: pair.pool.buffer.any() or x.done())
        x.cancel()
        asyncio.get_running_loop().call_soon(relay.open.set)
        with contextlib.suppress(asyncio.CancelledError):
            await x
        pair.pool.view()[:, blocks] = 0xEE  # a local prefill, say
        y = make_request(f"y{repeat}", 900, seed=100 + repeat)
        await pair.pull_all(y, blocks=others if repeat % 2 else others[::-1])
        pair.assert_arrived(y, others if repeat % 2 else others[::-1])
        assert (pair.pool.view()[:, blocks] == 0xEE).all(), "X's bytes landed after X had ended"
    if transport == "tcp":
        assert pair.client.stats().num_aborted == 10
    await pair.settled()
    await relay.close()
