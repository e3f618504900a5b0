"""Who may hand KV to whom: peers that cannot prove themselves, proofs and tickets said twice, strangers in crowds."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from dataclasses import replace

import msgspec
import pytest
from prefill_process import make_identity, make_pool, make_request
from transfer.test_faults import LAYOUT, Stranger, introduce, introduce_on, until

from kvbaton.transfer.auth import Handshake, Session, expiry_s, fresh_nonce
from kvbaton.transfer.channel import receive_frame
from kvbaton.transfer.client import HandoffClient, pull_all
from kvbaton.transfer.errors import PeerRefused, PeerUnreachable, ProtocolViolation
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.reach import is_loopback
from kvbaton.transfer.wire import (
    DATA_REFUSED,
    HANDSHAKE_FRAME_BYTES,
    Ack,
    Challenge,
    DataHello,
    HelloReply,
    MessageDecoder,
    NixlMemory,
    Offer,
    OpeningReply,
    Proof,
    ProofReply,
    Read,
    Refused,
    Renew,
    RenewReply,
    Start,
    decode_identity,
    encode_frame,
    encode_identity,
    make_hello,
)
from kvbaton.types import LocalError

SECRET = b"the fleet's secret, long enough"


async def test_a_reader_without_the_secret_learns_nothing_and_moves_nothing(make_pair):
    pair = await make_pair(secret=SECRET)
    for secret in (b"", b"another secret, as long as ours", SECRET[:-1]):
        client = HandoffClient(make_identity(pair.pool), pair.pool, replace(pair.options, secret=secret))
        with pytest.raises(PeerRefused, match="KVBATON_INTERNAL_KEY") as caught:
            await pull_all(client.pull(pair.address, make_request("r", 40), 0, [1, 2, 3]))
        assert caught.value.field == "KVBATON_INTERNAL_KEY" and pair.source.incarnation not in str(caught.value)
        await client.close()
    assert pair.backend.calls == [] and pair.server.stats().num_refused == 3
    await pair.pull_all(make_request("r", 40))  # the one that has it is served


async def test_a_lender_without_the_secret_is_not_believed(make_pair):
    """Whoever sits at a prefill worker's address: it gets no request, and no prompt."""
    pair = await make_pair(secret=b"some other fleet's, as long as ours")
    heard: list[bytes] = []

    async def impostor(reader, writer):
        """Takes every proof, and answers as a lender would that does not know the secret."""
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            for answer in (Challenge(fresh_nonce()), HelloReply(make_identity(pair.source), bytes(16), bytes(32))):
                heard.append(await reader.readexactly(int.from_bytes((await reader.readexactly(8))[:4], "little")))
                writer.write(encode_frame(answer))
            heard.append(await reader.read(100))
        writer.close()

    trap = await asyncio.start_server(impostor, "127.0.0.1", 0)
    client = HandoffClient(make_identity(pair.pool), pair.pool, replace(pair.options, secret=SECRET))
    with pytest.raises(PeerRefused, match="not of this fleet"):
        await pull_all(client.pull(trap.sockets[0].getsockname(), make_request("secret", 40), 0, [1, 2, 3]))
    await client.close()
    trap.close()
    await trap.wait_closed()
    assert len(heard) == 3 and heard[2] == b"", "nothing follows the handshake"
    assert not any(b"secret" in each or b"prompt" in each for each in heard)


async def test_a_proof_holds_for_one_handshake_and_one_side(make_pair):
    """Recorded and said again, or turned round: refused."""
    pair = await make_pair(secret=SECRET)
    identity, loop = make_identity(pair.pool), asyncio.get_running_loop()
    nonce, encoded = fresh_nonce(), encode_identity(identity)

    async def say(make_tag) -> object:
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, pair.address)
            await loop.sock_sendall(sock, encode_frame(make_hello(nonce)))
            challenge = MessageDecoder(OpeningReply).decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
            handshake = Handshake(SECRET, nonce, challenge.nonce)
            proof = Proof(b"", msgspec.Raw(encoded), make_tag(handshake))
            await loop.sock_sendall(sock, encode_frame(proof))
            return MessageDecoder(ProofReply).decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))

    recorded: list[bytes] = []

    def honest(handshake: Handshake) -> bytes:
        recorded.append(handshake.of_reader(encoded))
        return recorded[0]

    with pytest.raises(PeerUnreachable):  # its proof is good; its digest is not, so that nothing is opened
        await say(honest)
    for tag in (honest, lambda handshake: handshake.of_lender(encoded, b""), lambda _: bytes(32)):
        refused = await say(tag)
        assert isinstance(refused, Refused) and "KVBATON_INTERNAL_KEY" in refused.differences[0]
    assert pair.backend.calls == [] and pair.server.stats().num_connections == 0


async def test_what_a_reader_says_of_itself_gives_no_way_to_its_own_memory(make_pair):
    pair = await make_pair()
    seen: list[bytes] = []
    judge = pair.server._judge

    def watching(proof):
        seen.append(bytes(proof.identity))
        return judge(proof)

    pair.server._judge = watching
    ours = msgspec.structs.replace(
        make_identity(pair.pool), shm_name="kvbaton-mine-kv", nixl=NixlMemory(b"keys to all of it", 1, 2)
    )
    client = HandoffClient(ours, pair.pool, pair.options)
    await client.connect(pair.address)
    await client.close()
    told = decode_identity(seen[0])
    assert (told.nixl, told.shm_name, told.incarnation) == (None, None, ours.incarnation)
    assert b"keys to all of it" not in seen[0] and b"kvbaton-mine-kv" not in seen[0]


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
async def test_a_data_connection_is_the_peers_own_and_each_of_its_greetings_counts_once(make_pair):
    """Whoever saw the bytes of one cannot open another, to read or to be read from."""
    pair = await make_pair(secret=SECRET)
    loop = asyncio.get_running_loop()
    async with contextlib.AsyncExitStack() as stack:
        control = stack.enter_context(socket.socket())
        control.setblocking(False)
        await loop.sock_connect(control, pair.address)
        reply, session = await introduce_on(control, make_identity(pair.pool), secret=SECRET)
        nonce = fresh_nonce()
        good = DataHello(reply.data_token, nonce, session.of_data_reader(reply.data_token, nonce))

        async def opens(hello: DataHello) -> bool:
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            await loop.sock_connect(sock, pair.address)
            await loop.sock_sendall(sock, encode_frame(hello))
            async with asyncio.timeout(10):
                with contextlib.suppress(ConnectionError):
                    return bool(await loop.sock_recv(sock, 100))
            return False

        await until(lambda: pair.server.stats().num_connections == 1)
        other = Session(b"k" * 32, session.reader, session.lender)
        assert not await opens(DataHello(good.data_token, nonce, other.of_data_reader(good.data_token, nonce)))
        assert not await opens(DataHello(good.data_token, fresh_nonce(), good.tag))
        assert not await opens(DataHello(bytes(16), nonce, session.of_data_reader(bytes(16), nonce)))
        assert await opens(good)
        assert not await opens(good), "said again"
        again = fresh_nonce()
        assert await opens(DataHello(good.data_token, again, session.of_data_reader(good.data_token, again)))


def test_a_ticket_is_for_one_request_of_one_reader_and_one_connection() -> None:
    session = Session(b"k" * 32, "reader", "lender")
    ticket = session.sign_ticket("request", 5.5)
    assert session.signed(ticket, "request") and expiry_s(ticket) == 5.5
    others = (
        Session(b"K" * 32, "reader", "lender"),
        Session(b"k" * 32, "another", "lender"),
        Session(b"k" * 32, "reader", "another"),
    )
    assert not any(other.signed(ticket, "request") for other in others)
    assert not session.signed(ticket, "another") and not session.signed(ticket[:-1], "request")
    assert not session.signed(b"", "request")
    for position in range(len(ticket)):
        bent = bytearray(ticket)
        bent[position] ^= 1
        assert not session.signed(bytes(bent), "request"), position
    assert session.sign_ticket("request", 5.5) != ticket, "never the same one twice"
    assert "kkk" not in repr(session) and "kkk" not in repr(HandoffOptions(secret=b"kkk"))


async def test_an_offer_for_another_request_is_not_read_from(make_pair):
    """A lender that mixes requests up, or is made to: the pull fails before a byte is asked for."""
    pair = await make_pair()
    sign = Session.sign_ticket
    mixed = []

    def mixed_up(session, request_id, expires_s):
        mixed.append(request_id)
        return sign(session, "another request", expires_s)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session, "sign_ticket", mixed_up)
        with pytest.raises(ProtocolViolation, match="ticket is not for the request"):
            await pair.pull_all(make_request("r", 40))
    assert mixed == ["r"]
    assert not pair.pool.buffer.any() and pair.server.stats().num_bytes_sent == 0
    await pair.settled()
    await pair.pull_all(make_request("s", 40))


async def test_what_was_acknowledged_cannot_be_started_renewed_or_read_again(make_pair):
    """One use: said once more, each message of a pull that is over changes nothing."""
    pair = await make_pair()
    async with Stranger(pair) as owner:
        start = Start(1, make_request("r", 100), 0)
        await owner.send(start)
        offer = await owner.receive(Offer)
        whole = {"ticket": offer.ticket, "layer_start": 0, "layer_stop": 1, "block_start": 0, "block_stop": 7}
        await until(lambda: pair.server.book.find(Read(read_id=0, **whole), 0, 1) is not None)
        assert (await owner.read(**whole)).status != DATA_REFUSED
        assert (await owner.read(**whole)).status == DATA_REFUSED, "read twice while the ticket lives"
        await owner.send(Ack(offer.ticket))
        await until(lambda: pair.server.stats().num_sessions == 0)
        await owner.send(start)  # the same frame again
        await owner.send(Renew(offer.ticket))
        assert not (await owner.receive(RenewReply)).renewed
        assert [name for name, _ in pair.backend.calls].count("start") == 1
        assert (await owner.read(**whole)).status == DATA_REFUSED
    await pair.settled()


async def test_strangers_that_say_nothing_keep_nobody_out(make_pair):
    pair = await make_pair(max_strangers=4, connect_s=60.0)
    loop = asyncio.get_running_loop()
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.socket()) for _ in range(20)]
        for sock in silent:
            sock.setblocking(False)
            await loop.sock_connect(sock, pair.address)
        await until(lambda: len(pair.server._strangers) == 4)
        assert await loop.sock_recv(silent[0], 10) == b"", "the oldest goes"
        await pair.pull_all(make_request("r", 40))
        assert len(pair.server._strangers) <= 4


@pytest.mark.parametrize("transport", ["tcp"], indirect=True)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
async def test_beyond_this_host_nobody_listens_without_a_secret(make_pair, host):
    for secret in (b"", b"guess me"):
        pair = await make_pair(secret=secret)
        with pytest.raises(LocalError, match="set one secret of 16 bytes or more in KVBATON_INTERNAL_KEY") as caught:
            await pair.server.start(host)
        assert caught.value.field == "KVBATON_INTERNAL_KEY" and len(pair.server._listeners) == 1


def test_only_this_hosts_own_addresses_are_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost")))
    beyond = ("0.0.0.0", "::", "", "10.0.0.1", "192.0.2.1", "fe80::1%eth0", "no such host.invalid")
    assert not any(map(is_loopback, beyond))


async def test_a_stranger_hears_the_version_and_no_more(make_pair):
    """Before it has proved itself: no incarnation, no memory's name, no fingerprint."""
    pair = await make_pair(secret=SECRET)
    reply, session = await introduce(pair.address, make_identity(pair.pool), secret=b"guess")
    assert session is None and isinstance(reply, Refused)
    assert set(msgspec.structs.asdict(reply).values()) == {
        "the peer is not of this fleet", ("KVBATON_INTERNAL_KEY: not the same on both sides",)
    }  # fmt: skip


def test_the_segment_is_its_users_alone():
    """Shared memory is read without asking: whom the kernel lets open it is who may."""
    pool = make_pool(LAYOUT, 2)
    path = f"/dev/shm/{pool.name}"
    with open(path, "rb") as segment:
        assert os.fstat(segment.fileno()).st_mode & 0o777 == 0o600
    pool.unlink()
    pool.close()
