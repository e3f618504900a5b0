"""The wire between a decode and a prefill worker: messages, frames, and the header of raw KV data.

    control frame   | length u32 | crc32 u32 | msgpack of one tagged struct |
    data frame      | header (48 bytes, fixed) | raw KV bytes |

Invariants: nothing is decoded that is not declared here, so a malformed message is refused by the decoder; a frame
longer than the bound of its place is refused by its length, before memory is spent on it; bytes that were damaged are
noticed (crc32 on control frames, xxh3 over header and payload of data frames). A handshake can be read across protocol
versions: ``Hello`` carries the version first, and the rest is decoded only when that is understood.

Knows nothing about sockets, sessions or what the bytes mean to an engine.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Annotated, Literal

import msgspec
import xxhash
from msgspec import Meta

from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.auth import NONCE_BYTES, TAG_BYTES, TICKET_BYTES
from kvbaton.transfer.errors import ProtocolViolation
from kvbaton.types import PROTOCOL_VERSION, Fingerprint, GenerateRequest, TokenOutput

DATA_TOKEN_BYTES = 16
HANDSHAKE_FRAME_BYTES = 64 * 1024  # what a stranger may make us hold
CONTROL_FRAME_BYTES = 8 * 1024 * 1024  # a prompt of a million tokens is 5 MB

Ticket = Annotated[bytes, Meta(min_length=TICKET_BYTES, max_length=TICKET_BYTES)]
DataToken = Annotated[bytes, Meta(min_length=DATA_TOKEN_BYTES, max_length=DATA_TOKEN_BYTES)]
Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Tag = Annotated[bytes, Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
PullId = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # names one pull on its connection; never used twice there
Count = Annotated[int, Meta(ge=0, le=2**31)]
Generation = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, Meta(max_length=2000)]


class HostIdentity(msgspec.Struct, frozen=True):
    """Equal on two workers exactly if one can open the other's shared memory by name."""

    boot_id: Annotated[str, Meta(max_length=100)]
    shm_device: int  # device number of /dev/shm: differs between containers that do not share it


class NixlMemory(msgspec.Struct, frozen=True):
    """A pool as its owner's NIXL agent registered it; whoever has this can read all of it."""

    agent: Annotated[bytes, Meta(max_length=32_768)]  # the agent's metadata, with the keys of its memory
    data_address: Annotated[int, Meta(ge=0)]
    generations_address: Annotated[int, Meta(ge=0)]


class RankPool(msgspec.Struct, frozen=True):
    """What one rank of a worker holds: KV heads [first_head, first_head + num_heads) of every block."""

    first_head: Annotated[int, Meta(ge=0, le=2**16)]
    num_heads: Annotated[int, Meta(ge=1, le=2**16)]
    shm_name: Annotated[str, Meta(max_length=255)] | None = None


class Identity(msgspec.Struct, frozen=True):
    """Who a worker is: what must agree, where its pool is, and which life of it this is."""

    fingerprint: Fingerprint
    layout: KVLayout  # with the heads of the model, however many ranks share them
    num_blocks: Annotated[int, Meta(ge=1, le=2**31)]
    incarnation: Annotated[str, Meta(min_length=1, max_length=100)]
    host: HostIdentity
    shm_name: Annotated[str, Meta(max_length=255)] | None = None
    nixl: NixlMemory | None = None
    ranks: Annotated[tuple[RankPool, ...], Meta(max_length=256)] = ()  # empty: one holds everything


# -- handshake: ``auth`` says what each tag proves


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of a control connection. Name and first fields are the same in every version of the protocol."""

    protocol_version: int
    fingerprint_digest: Annotated[bytes, Meta(max_length=64)] = b""  # version 1 said here who it is
    identity: msgspec.Raw = msgspec.Raw(b"\xc0")
    nonce: Annotated[bytes, Meta(max_length=64)] = b""  # judged after the version: the first one has none


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The version is understood; now say who you are, and prove that you are of this fleet."""

    nonce: Nonce


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    fingerprint_digest: Annotated[bytes, Meta(max_length=64)]
    identity: msgspec.Raw  # an Identity, without what its own memory could be reached by
    tag: Tag


class HelloReply(msgspec.Struct, frozen=True, tag="hello_reply"):
    identity: Identity
    data_token: DataToken
    tag: Tag


class DataHello(msgspec.Struct, frozen=True, tag="data_hello"):
    """First frame of a data connection: which control connection it belongs to."""

    data_token: DataToken
    nonce: Nonce
    tag: Tag


class DataWelcome(msgspec.Struct, frozen=True, tag="data_welcome"):
    tag: Tag


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    reason: Text
    differences: tuple[Text, ...] = ()


# -- decode to prefill


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Prefill this; the first ``have_tokens`` tokens of its KV need not travel."""

    pull_id: PullId
    request: GenerateRequest
    have_tokens: Count


class Renew(msgspec.Struct, frozen=True, tag="renew"):
    ticket: Ticket


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """Everything is here and verified; the blocks may go."""

    ticket: Ticket


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Nobody wants it any more, and nobody reads it any more."""

    pull_id: PullId


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


# -- prefill to decode


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """The request is scheduled; its KV will be in these blocks, which stay for ``lease_s`` after each renewal."""

    pull_id: PullId
    ticket: Ticket
    block_ids: tuple[Count, ...]
    generations: tuple[Generation, ...]  # of each block when offered; another one later means the lease was lost
    num_tokens: Count
    cached_tokens: Count  # in place already, in every layer
    lease_s: Annotated[float, Meta(gt=0)]


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """KV of tokens [0, tokens_ready) is in place in layers [0, layers_ready). What was promised before still holds."""

    ticket: Ticket
    tokens_ready: Count
    layers_ready: Count


class First(msgspec.Struct, frozen=True, tag="first"):
    """The first token. It exists only because all KV of the prompt does."""

    ticket: Ticket
    output: TokenOutput
    queue_s: float  # Start received to Offer, by the clock of the prefill side
    prefill_s: float  # Offer to first token


class RenewReply(msgspec.Struct, frozen=True, tag="renew_reply"):
    ticket: Ticket
    renewed: bool


FailureKind = Literal["capacity", "invalid", "lease", "internal"]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The one terminal word of the prefill side on a request, unless it was acknowledged or aborted."""

    pull_id: PullId
    kind: FailureKind
    message: Text
    field: Text | None = None
    retryable: bool = True


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    pass


# -- data connection


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Send these (layer, offered block) regions: one data frame a layer. Blocks are indices into the offer's list.

    With ``head_stop`` above 0 only KV heads [head_start, head_stop) of the model are sent, in blocks that have no
    others. ``part`` tells apart what different ranks of the reader ask for.
    """

    read_id: Annotated[int, Meta(ge=0, le=2**63 - 1)]
    ticket: Ticket
    layer_start: Count
    layer_stop: Count
    block_start: Count
    block_stop: Count
    rank: Count = 0  # whose pool
    head_start: Count = 0
    head_stop: Count = 0
    part: Annotated[int, Meta(ge=0, lt=1024)] = 0


Opening = Hello | DataHello
OpeningReply = Challenge | Refused
ProofReply = HelloReply | Refused
ToPrefill = Start | Renew | Ack | Abort | Ping
ToDecode = Offer | Progress | First | RenewReply | Failed | Pong

_FRAME = struct.Struct("<II")
_encoder = msgspec.msgpack.Encoder()
_identity_decoder = msgspec.msgpack.Decoder(Identity)


def encode_frame(message: msgspec.Struct) -> bytes:
    payload = _encoder.encode(message)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def make_hello(nonce: bytes, protocol_version: int = PROTOCOL_VERSION) -> Hello:
    return Hello(protocol_version, nonce=nonce)


def encode_identity(identity: Identity) -> bytes:
    return _encoder.encode(identity)


def without_reach(identity: Identity) -> Identity:
    """What a lender need not know of its reader: by which way the reader's own memory can be read."""
    ranks = tuple(msgspec.structs.replace(rank, shm_name=None) for rank in identity.ranks)
    return msgspec.structs.replace(identity, shm_name=None, nixl=None, ranks=ranks)


def decode_identity(encoded: msgspec.Raw | bytes) -> Identity:
    try:
        return _identity_decoder.decode(encoded)
    except Exception as error:  # a struct's own validation raises types of ours
        raise ProtocolViolation(f"the identity of the peer makes no sense: {error}") from error


class MessageDecoder:
    """Payload bytes to one of the structs of a union, or ProtocolViolation."""

    def __init__(self, union: object) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def decode(self, payload: bytes | bytearray | memoryview) -> msgspec.Struct:
        try:
            return self._decoder.decode(payload)
        except Exception as error:  # MsgspecError, or LocalError from a struct's __post_init__
            raise ProtocolViolation(f"not a message of this protocol: {error}") from error


class FrameBuffer:
    """Cuts a byte stream into payloads. Holds at most one frame of ``max_frame_bytes`` and what came with it."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_frame_bytes = max_frame_bytes
        self._buffer = bytearray()

    @property
    def partial(self) -> bool:
        """A frame has begun and is not complete."""
        return bool(self._buffer)

    def feed(self, data: bytes | memoryview) -> Iterable[bytes]:
        self._buffer += data
        payloads = []
        position = 0
        while len(self._buffer) - position >= _FRAME.size:
            length, checksum = parse_frame_header(
                self._buffer[position : position + _FRAME.size], self._max_frame_bytes
            )
            start = position + _FRAME.size
            if len(self._buffer) - start < length:
                break
            payload = bytes(self._buffer[start : start + length])
            check_payload(payload, checksum)
            payloads.append(payload)
            position = start + length
        del self._buffer[:position]
        return payloads


FRAME_HEADER_BYTES = _FRAME.size


def parse_frame_header(header: bytes | bytearray, max_frame_bytes: int) -> tuple[int, int]:
    """(payload length, checksum); refuses a length beyond the bound before anything is read or allocated for it."""
    length, checksum = _FRAME.unpack(header)
    if length > max_frame_bytes:
        raise ProtocolViolation(f"a frame of {length} bytes, the bound here is {max_frame_bytes}")
    return length, checksum


def check_payload(payload: bytes, checksum: int) -> None:
    if zlib.crc32(payload) != checksum:
        raise ProtocolViolation("a control frame fails its checksum")


# -- data frames

DATA_MAGIC = 0x3144564B  # "KVD1"
DATA_OK, DATA_REFUSED = 0, 1
_DATA = struct.Struct("<IIQIIIIQQ")
DATA_HEADER_BYTES = _DATA.size
Buffer = bytes | bytearray | memoryview


class DataHeader(msgspec.Struct, frozen=True):
    """What precedes raw KV: one layer of a range of offered blocks, or with ``status`` refused: nothing."""

    status: int
    read_id: int
    layer: int
    block_start: int
    block_stop: int
    payload_bytes: int
    checksum: int = 0  # xxh3 over the header (this field 0) and the payload

    def pack(self) -> bytes:
        return _DATA.pack(
            DATA_MAGIC,
            self.status,
            self.read_id,
            self.layer,
            self.block_start,
            self.block_stop,
            0,
            self.payload_bytes,
            self.checksum,
        )

    @classmethod
    def unpack(cls, header: Buffer) -> DataHeader:
        magic, status, read_id, layer, block_start, block_stop, zero, payload_bytes, checksum = _DATA.unpack(header)
        if magic != DATA_MAGIC or zero != 0 or status not in (DATA_OK, DATA_REFUSED):
            raise ProtocolViolation("a data frame does not begin like one")
        return cls(status, read_id, layer, block_start, block_stop, payload_bytes, checksum)

    def checksum_of(self, payload: Iterable[Buffer]) -> int:
        digest = xxhash.xxh3_64(msgspec.structs.replace(self, checksum=0).pack())
        for part in payload:
            digest.update(part)
        return digest.intdigest()
