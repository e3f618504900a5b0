"""One prefill worker as the decode side sees it: the handshake, the control connection, and the way its KV is read.

Invariants: a connection belongs to one life (incarnation) of the peer, so nothing learned from an earlier one is used;
it is open only after both sides have proved to know the fleet's secret, on each of its sockets; a ticket that was not
signed for the request it is said to be for ends it; when any part of it breaks, all of it is closed and every pull on
it hears so once; heartbeats run while it is open.

Knows nothing about destinations or outcomes of pulls.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

import msgspec

from kvbaton.kv.compat import digest
from kvbaton.transfer.auth import Handshake, Session, fresh_nonce, same
from kvbaton.transfer.channel import ControlChannel, receive_frame, tune_socket
from kvbaton.transfer.copying import OnCopied
from kvbaton.transfer.errors import HandoffError, PeerRefused, PeerUnreachable, ProtocolViolation
from kvbaton.transfer.identity import Transport, choose_transport, refusals
from kvbaton.transfer.nixl_source import NixlPool, NixlSource
from kvbaton.transfer.options import HandoffOptions
from kvbaton.transfer.placement import Placement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.shm import ShmSource
from kvbaton.transfer.tcp import TcpSource
from kvbaton.transfer.wire import (
    HANDSHAKE_FRAME_BYTES,
    Challenge,
    DataHello,
    DataWelcome,
    Failed,
    First,
    HelloReply,
    Identity,
    MessageDecoder,
    Offer,
    OpeningReply,
    Ping,
    Pong,
    Progress,
    Proof,
    ProofReply,
    Refused,
    RenewReply,
    ToDecode,
    encode_frame,
    encode_identity,
    make_hello,
    without_reach,
)
from kvbaton.types import KvbatonError

log = logging.getLogger(__name__)


class KVSource(Protocol):
    """A way to read the peer's pool: ShmSource, TcpSource, NixlSource."""

    def start_copy(self, offer: Offer, region: Region, placement: Placement, on_copied: OnCopied) -> None: ...

    def stop_copies(self, placement: Placement) -> None: ...

    def close(self) -> None: ...

    def join(self) -> None:
        """Wait, in a thread of the caller's, until what ``close`` ended has ended."""
        ...


class Listener(Protocol):
    """A pull, as its connection sees it."""

    @property
    def request_id(self) -> str: ...

    def on_message(self, message: Offer | Progress | First | RenewReply | Failed) -> None: ...

    def on_lost(self, error: HandoffError) -> None: ...


class PeerConnection:
    """Open: made by ``connect``. Pulls join with ``add`` and leave with ``remove``."""

    def __init__(
        self,
        identity: Identity,
        session: Session,
        transport: Transport,
        options: HandoffOptions,
        on_closed: Callable[[PeerConnection], None],
    ) -> None:
        self.identity = identity
        self._session = session
        self.transport = transport
        self._options = options
        self._on_closed = on_closed
        self._loop = asyncio.get_running_loop()
        self._next_pull_id = 0
        self._by_pull: dict[int, Listener] = {}
        self._by_ticket: dict[bytes, Listener] = {}
        self._source: KVSource | None = None
        self._heartbeat: asyncio.TimerHandle | None = None
        self._channel = ControlChannel(ToDecode, self._message, self._lost, options)

    @classmethod
    async def connect(
        cls,
        address: tuple[str, int],
        ours: Identity,
        options: HandoffOptions,
        executor: Executor,
        on_closed: Callable[[PeerConnection], None],
        nixl: NixlPool | None = None,
    ) -> PeerConnection:
        """Shake hands and open the way to the KV. PeerUnreachable, PeerRefused, or LocalError for an impossible way."""
        try:
            async with asyncio.timeout(options.connect_s):
                sock, reply, session = await _handshake(address, ours, options.secret)
                try:
                    connection = cls(
                        reply.identity,
                        session,
                        choose_transport(options.transport, reply.identity, ours.host),
                        options,
                        on_closed,
                    )
                except BaseException:
                    sock.close()
                    raise
                await connection._open(sock, address, reply, executor, nixl)
                return connection
        except TimeoutError as error:
            raise PeerUnreachable(f"no handshake with {_show(address)} in {options.connect_s:.0f} s") from error
        except OSError as error:
            raise PeerUnreachable(f"cannot reach {_show(address)}: {error.strerror or error}") from error

    async def _open(
        self,
        sock: socket.socket,
        address: tuple[str, int],
        reply: HelloReply,
        executor: Executor,
        nixl: NixlPool | None,
    ) -> None:
        try:
            await self._loop.create_connection(lambda: self._channel, sock=sock)
            self._source = await self._open_source(address, reply, executor, nixl)
        except BaseException:
            self._channel.close(PeerUnreachable("the handshake was not completed"))
            raise
        self._beat()

    async def _open_source(
        self, address: tuple[str, int], reply: HelloReply, executor: Executor, nixl: NixlPool | None
    ) -> KVSource:
        if self.transport == "nixl":
            assert nixl is not None, "whoever wants nixl has it"
            options = self._options
            return NixlSource(nixl, reply.identity, executor, options.nixl_copy_bytes, options.stall_s, self.close)
        if self.transport == "shm":
            try:
                return ShmSource(reply.identity, executor)
            except KvbatonError as error:
                if self._options.transport == "shm":
                    raise
                log.warning("falling back to tcp: %s", error)
                self.transport = "tcp"
        sock = await _dial(address)
        try:
            token, nonce = reply.data_token, fresh_nonce()
            hello = DataHello(token, nonce, self._session.of_data_reader(token, nonce))
            await self._loop.sock_sendall(sock, encode_frame(hello))
            welcome = MessageDecoder(DataWelcome).decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
            assert isinstance(welcome, DataWelcome)
            if not same(welcome.tag, self._session.of_data_lender(token, nonce)):
                raise PeerRefused("the data connection does not lead to the peer")
            return TcpSource(sock, self._options.stall_s, self.close)
        except BaseException:
            sock.close()
            raise

    # -- pulls

    @property
    def closed(self) -> bool:
        return self._channel.closed

    @property
    def source(self) -> KVSource:
        assert self._source is not None, "a connection is handed out open"
        return self._source

    def new_pull_id(self) -> int:
        self._next_pull_id += 1
        return self._next_pull_id

    def add(self, pull_id: int, listener: Listener) -> None:
        assert pull_id not in self._by_pull
        self._by_pull[pull_id] = listener

    def remove(self, pull_id: int, ticket: bytes | None) -> None:
        self._by_pull.pop(pull_id, None)
        if ticket is not None:
            self._by_ticket.pop(ticket, None)

    def send(self, message: msgspec.Struct) -> None:
        self._channel.send(message)

    def close(self, error: HandoffError | None = None) -> None:
        self._channel.close(error or PeerUnreachable("the connection was closed"))

    # -- what comes

    def _message(self, message: msgspec.Struct) -> None:
        match message:
            case Pong():
                return
            case Offer():
                listener = self._by_pull.get(message.pull_id)
                if listener is not None:  # else it was given up, and its Abort is on the way
                    if not self._session.signed(message.ticket, listener.request_id):
                        raise ProtocolViolation("an offer whose ticket is not for the request that was asked for")
                    self._by_ticket[message.ticket] = listener
                    listener.on_message(message)
            case Failed():
                listener = self._by_pull.get(message.pull_id)
                if listener is not None:
                    listener.on_message(message)
            case Progress() | First() | RenewReply():
                listener = self._by_ticket.get(message.ticket)
                if listener is not None:
                    listener.on_message(message)

    def _lost(self, error: HandoffError) -> None:
        if self._heartbeat is not None:
            self._heartbeat.cancel()
        if self._source is not None:
            self._source.close()
        for listener in list(self._by_pull.values()):
            listener.on_lost(error)
        self._on_closed(self)

    def _beat(self) -> None:
        self._channel.send(Ping())
        if not self._channel.closed:
            self._heartbeat = self._loop.call_later(self._options.heartbeat_s, self._beat)


async def _handshake(
    address: tuple[str, int], ours: Identity, secret: bytes
) -> tuple[socket.socket, HelloReply, Session]:
    """As ``auth`` draws it: we prove ourselves first, then the peer."""
    loop = asyncio.get_running_loop()
    sock = await _dial(address)
    try:
        nonce = fresh_nonce()
        await loop.sock_sendall(sock, encode_frame(make_hello(nonce)))
        challenge = MessageDecoder(OpeningReply).decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
        if isinstance(challenge, Refused):
            raise _refused(address, challenge)
        assert isinstance(challenge, Challenge)
        handshake = Handshake(secret, nonce, challenge.nonce)
        identity = encode_identity(without_reach(ours))
        proof = Proof(digest(ours.fingerprint), msgspec.Raw(identity), handshake.of_reader(identity))
        await loop.sock_sendall(sock, encode_frame(proof))
        reply = MessageDecoder(ProofReply).decode(await receive_frame(sock, HANDSHAKE_FRAME_BYTES))
        if isinstance(reply, Refused):
            raise _refused(address, reply)
        assert isinstance(reply, HelloReply)
        if not same(reply.tag, handshake.of_lender(encode_identity(reply.identity), reply.data_token)):
            differences = ("KVBATON_INTERNAL_KEY: the peer does not know it",)
            raise PeerRefused(f"{_show(address)} is not of this fleet", differences)
        found = refusals(reply.identity, ours)  # never only the peer's word for it
        if found:
            raise PeerRefused(f"KV of {_show(address)} is not ours: {_reason('', found)}", found)
        return sock, reply, handshake.session(ours.incarnation, reply.identity.incarnation)
    except BaseException:
        sock.close()
        raise


def _refused(address: tuple[str, int], told: Refused) -> PeerRefused:
    return PeerRefused(f"{_show(address)} refused: {_reason(told.reason, told.differences)}", told.differences)


async def _dial(address: tuple[str, int]) -> socket.socket:
    loop = asyncio.get_running_loop()
    host, port = address
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    if not found:
        raise PeerUnreachable(f"{host} has no address")
    family, kind, protocol, _, where = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        tune_socket(sock)
        await loop.sock_connect(sock, where)
    except BaseException:
        sock.close()
        raise
    return sock


def _reason(reason: str, differences: tuple[str, ...]) -> str:
    return "; ".join([reason, *differences] if reason else differences)


def _show(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
