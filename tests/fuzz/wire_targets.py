"""Parsers of what workers say to each other and to routers: frames, messages, tickets, KV events."""

from __future__ import annotations

from pathlib import Path
from random import Random

import msgspec

from .shapes import as_msgpack, example
from .target import Run, Target

UNIONS = ("Opening", "OpeningReply", "ProofReply", "ToPrefill", "ToDecode", "Read", "Identity")


def _examples(of: object, number: int, raw: bytes = b"\xc0") -> list[bytes]:
    rng = Random(7)
    return [as_msgpack(example(of, rng, raw)) for _ in range(number)]


def _message_seeds() -> list[bytes]:
    from kvbaton.transfer import wire

    return [each for name in UNIONS if hasattr(wire, name) for each in _examples(getattr(wire, name), 12)]


def _messages(folder: Path) -> Run:
    from kvbaton.transfer import wire
    from kvbaton.transfer.errors import ProtocolViolation

    decoders = [wire.MessageDecoder(getattr(wire, name)) for name in UNIONS if hasattr(wire, name)]

    def run(data: bytes) -> None:
        for decoder in decoders:
            try:
                message = decoder.decode(data)
            except ProtocolViolation:
                continue
            assert decoder.decode(msgspec.msgpack.encode(message)) == message
            if hasattr(message, "identity") and isinstance(message.identity, msgspec.Raw):
                try:
                    wire.decode_identity(message)  # type: ignore[arg-type]
                except ProtocolViolation:
                    continue

    return run


def _frames(folder: Path) -> Run:
    """The first byte says how the rest is cut; frames are the same however that is."""
    from kvbaton.transfer.errors import ProtocolViolation
    from kvbaton.transfer.wire import DATA_HEADER_BYTES, DataHeader, FrameBuffer

    def fed(data: bytes, step: int) -> tuple[list[bytes], bool]:
        buffer, found = FrameBuffer(4096), []
        try:
            for start in range(0, len(data), step):
                found += buffer.feed(data[start : start + step])
                assert len(buffer._buffer) <= 4096 + 8 + step
        except ProtocolViolation:
            return found, True
        return found, False

    def run(data: bytes) -> None:
        whole, refused = fed(data, len(data) or 1)
        parts, refused_too = fed(data, 1 + (data[0] % 7 if data else 0))
        assert refused == refused_too and parts[: len(whole)] == whole
        if len(data) >= DATA_HEADER_BYTES:
            try:
                header = DataHeader.unpack(data[:DATA_HEADER_BYTES])
            except ProtocolViolation:
                return
            assert DataHeader.unpack(header.pack()) == header

    return run


def _frame_seeds() -> list[bytes]:
    import zlib

    from kvbaton.transfer.wire import DataHeader

    framed = [
        len(payload).to_bytes(4, "little") + zlib.crc32(payload).to_bytes(4, "little") + payload
        for payload in _message_seeds()[::9]
    ]
    headers = [DataHeader(0, 1, 2, 0, 3, 100, 5).pack(), DataHeader(1, 1, 2, 0, 3, 0).pack()]
    return [*framed, b"".join(framed[:4]), *headers]


# -- KV events


def _http_events(folder: Path) -> Run:
    """An answer to a question for events, taken by the index; it holds its own invariants whatever comes."""
    from kvbaton.router.kv_feed import KVFeed
    from kvbaton.router.kv_follow import _DECODER, Errors
    from kvbaton.router.prefix_index import PrefixIndex

    index = PrefixIndex(16, 100, 200)

    def run(data: bytes) -> None:
        index.forget("w")
        index.heard_of("w", "a", 16, True, 1000)
        feed = KVFeed(index, "w", "a")
        staged = feed.on_snapshot("a", 0)
        if staged is not None:
            staged.commit()
        try:
            answer = _DECODER.decode(data)
        except Errors:
            return
        answer = msgspec.structs.replace(answer, incarnation="a", block_size=16)
        feed.on_events(answer, index.exact.begin_round("w"))
        index.exact.check()

    return run


def _http_event_seeds() -> list[bytes]:
    from kvbaton.workers.kv_events import KVEventsAnswer

    return _examples(KVEventsAnswer, 30)


_STORED = ["BlockStored", [1, 2], None, [5] * 32, 16, None, "GPU", None, None]
_STORED_MAP = {
    "type": "BlockStored", "block_hashes": [b"x" * 32], "parent_block_hash": 2, "token_ids": [7] * 16,
    "block_size": 16, "lora_id": None, "medium": "GPU", "extra_keys": [["salt"]], "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}  # fmt: skip


def _zmq_event_seeds() -> list[bytes]:
    batches = (
        [1.5, [_STORED, ["BlockRemoved", [1], "GPU"], ["AllBlocksCleared"]]],
        [1.5, [_STORED_MAP, {"type": "BlockRemoved", "block_hashes": [2]}, {"type": "AllBlocksCleared"}], 0],
        [0, [_STORED, _STORED_MAP, _STORED]],
        [0, []],
    )
    return [msgspec.msgpack.encode(each) for each in batches]


def _zmq_events(folder: Path) -> Run:
    from kvbaton.workers.vllm_kv_events import EngineBlocks, UnreadableEvents, decode_batch

    def run(data: bytes) -> None:
        for engine in ("vllm", "sglang"):
            blocks = EngineBlocks(16, 40)
            try:
                events = decode_batch(data, engine)
            except UnreadableEvents:
                continue
            for _ in range(2):
                blocks.apply(events)
                blocks.check()

    return run


def _event_order(folder: Path) -> Run:
    """Batches in any order, live and replayed: each is applied once, in order, and a hole is told."""
    from kvbaton.workers.vllm_kv_order import Batch, BatchOrder

    def run(data: bytes) -> None:
        order, expected = BatchOrder(), 0
        for at in range(0, len(data) - 1, 2):
            number = data[at + 1] if data[at] & 8 else data[at + 1] % 6
            match data[at] % 4:
                case 0:
                    steps = order.live(number, b"")
                case 1:
                    steps = order.replayed(number, b"")
                case 2:
                    steps = order.replay_ended()
                case _:
                    order.look_again()
                    continue
            for step in steps:
                if isinstance(step, Batch):
                    assert step.number >= expected
                    expected = step.number + 1
                else:
                    expected = 0

    return run


# -- tickets


def _tickets(folder: Path) -> Run:
    """A book with one grant; whatever is asked, a read is allowed only within it."""
    from kvbaton.transfer import wire
    from kvbaton.transfer.tickets import TicketBook

    decoder = msgspec.msgpack.Decoder(wire.Read)
    ticket = b"\xff" * wire.TICKET_BYTES
    offer = wire.Offer(1, ticket, (4, 5, 6), (1, 1, 1), 40, 16, 5.0)

    class Clock:
        def now_s(self) -> float:
            return 0.0

    def run(data: bytes) -> None:
        book = TicketBook(4, 16, Clock())
        book.grant(offer, 3)
        book.advance(ticket, 40, 2)
        try:
            read = decoder.decode(data)
        except (msgspec.MsgspecError, RecursionError):
            return
        read = msgspec.structs.replace(read, ticket=ticket) if data[-1:] < b"\xc0" else read
        for layer in range(-1, 6):
            for connection in (3, 4):
                if book.find(read, layer, connection) is not None:
                    assert connection == 3 and read.ticket == ticket and 0 <= layer < 4
                    assert 0 <= read.block_start < read.block_stop <= 3
                    assert layer < 2 or read.block_stop <= 1

    return run


def _ticket_seeds() -> list[bytes]:
    from kvbaton.transfer import wire

    ticket = b"\xff" * wire.TICKET_BYTES
    reads = [wire.Read(1, ticket, low, low + 2, 0, stop) for low in (0, 1, 3) for stop in (1, 3, 4)]
    return [msgspec.msgpack.encode(each) for each in reads]


# -- what workers tell routers of themselves


def _worker_info(folder: Path) -> Run:
    from kvbaton.config import MemberSettings
    from kvbaton.observe.metrics import Metrics
    from kvbaton.router.monitor import _DECODER, UNREADABLE
    from kvbaton.router.prefix_index import PrefixIndex
    from kvbaton.router.registry import Registry

    registry = Registry(
        [MemberSettings("http://127.0.0.1:1", "decode", "d0"), MemberSettings("http://127.0.0.1:2", "prefill", "p0")],
        "m", PrefixIndex(16, 100, 100), Metrics("router"),
    )  # fmt: skip

    def run(data: bytes) -> None:
        try:
            info = _DECODER.decode(data)
        except UNREADABLE:
            return
        for member in registry.members:
            registry.answered(member, info)
        registry.usable(0.0)
        registry.export()
        registry.check()

    return run


def _worker_info_seeds() -> list[bytes]:
    from kvbaton.workers.protocol import WorkerInfo

    rng = Random(3)
    return [msgspec.json.encode(example(WorkerInfo, rng, b"null")) for _ in range(20)]


TARGETS = (
    Target("KV frames", _frames, _frame_seeds),
    Target("KV messages", _messages, _message_seeds, "msgpack", 2.0),
    Target("tickets", _tickets, _ticket_seeds, "msgpack"),
    Target("KV events over HTTP", _http_events, _http_event_seeds, "msgpack"),
    Target("KV events over ZeroMQ", _zmq_events, _zmq_event_seeds, "msgpack", 1.5),
    Target("order of KV events", _event_order, lambda: [bytes(range(40)), b"\0\0\0\1\0\3\2\0\1\2", b""]),
    Target("what a worker says of itself", _worker_info, _worker_info_seeds, "json"),
)
