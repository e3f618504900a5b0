"""Frames and messages: what goes in comes out, and everything else is refused."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.transfer.auth import TICKET_BYTES
from kvbaton.transfer.errors import ProtocolViolation
from kvbaton.transfer.wire import (
    CONTROL_FRAME_BYTES,
    DATA_HEADER_BYTES,
    DATA_OK,
    Abort,
    Ack,
    DataHeader,
    Failed,
    First,
    FrameBuffer,
    MessageDecoder,
    Offer,
    Ping,
    Pong,
    Progress,
    Read,
    Renew,
    RenewReply,
    Start,
    ToDecode,
    ToPrefill,
    encode_frame,
)
from kvbaton.types import GenerateRequest, SamplingParams, TokenLogprobs, TokenOutput

TICKET = b"t" * TICKET_BYTES
REQUEST = GenerateRequest(
    "r", (1, 2, 3), SamplingParams(logit_bias={5: -1.5}, stop=("a", "é"), seed=7), cache_salt="s", eos_token_ids=(2,)
)
TO_PREFILL = [Start(1, REQUEST, 16), Renew(TICKET), Ack(TICKET), Abort(2**40), Ping()]
TO_DECODE = [
    Offer(1, TICKET, (3, 4), (1, 2**62), 30, 16, 9.5),
    Progress(TICKET, 16, 3),
    First(TICKET, TokenOutput(7, TokenLogprobs(7, -0.5, ((7, -0.5),)), "stop", True), 0.1, 0.2),
    RenewReply(TICKET, False),
    Failed(1, "invalid", "no", "prompt", False),
    Pong(),
]


@given(st.data())
def test_messages_survive_any_cutting_of_the_stream(data):
    union, messages = data.draw(st.sampled_from([(ToPrefill, TO_PREFILL), (ToDecode, TO_DECODE)]))
    chosen = data.draw(st.lists(st.sampled_from(messages), max_size=6))
    stream = b"".join(map(encode_frame, chosen))
    frames, decoder, got = FrameBuffer(CONTROL_FRAME_BYTES), MessageDecoder(union), []
    while stream:
        step = data.draw(st.integers(1, len(stream)))
        got += [decoder.decode(payload) for payload in frames.feed(stream[:step])]
        stream = stream[step:]
    assert got == chosen and not frames.partial


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_incomplete_and_never_a_crash(noise):
    frames, decoder = FrameBuffer(64), MessageDecoder(ToPrefill)
    try:
        for payload in frames.feed(noise):
            decoder.decode(payload)
    except ProtocolViolation:
        pass
    assert len(frames._buffer) <= len(noise)


@given(st.sampled_from(TO_PREFILL), st.data())
def test_a_flipped_bit_is_noticed(message, data):
    frame = bytearray(encode_frame(message))
    position = data.draw(st.integers(4, len(frame) - 1))
    frame[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ProtocolViolation, match="checksum"):
        FrameBuffer(CONTROL_FRAME_BYTES).feed(bytes(frame))


def test_a_length_beyond_the_bound_is_refused_by_its_header_alone():
    frames = FrameBuffer(1000)
    with pytest.raises(ProtocolViolation, match="1001 bytes"):
        frames.feed((1001).to_bytes(4, "little") + b"\0\0\0\0")


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "start", "pull_id": -1, "request": {}, "have_tokens": 0},
        {"type": "ack", "ticket": b"short"},
        {"type": "ack"},
        {"type": "unheard of"},
        {"type": "start", "pull_id": 1, "have_tokens": 0, "request": {"request_id": "r", "prompt_token_ids": "x"}},
        {"type": "offer"},
        [1, 2],
    ],
)
def test_a_message_that_is_not_declared_is_refused(fields):
    with pytest.raises(ProtocolViolation):
        MessageDecoder(ToPrefill).decode(msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("reply", [{"type": "failed", "pull_id": 1, "kind": "other", "message": ""}])
def test_kinds_of_failure_are_a_closed_list(reply):
    with pytest.raises(ProtocolViolation):
        MessageDecoder(ToDecode).decode(msgspec.msgpack.encode(reply))


@given(st.binary(min_size=1, max_size=300), st.lists(st.integers(0, 300), max_size=3), st.integers(0, 2**32 - 1))
def test_the_data_checksum_covers_header_and_payload_however_it_is_cut(payload, cuts, layer):
    header = DataHeader(DATA_OK, 5, layer, 1, 9, len(payload))
    cuts = sorted({0, len(payload), *(cut for cut in cuts if cut < len(payload))})
    parts = [payload[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    checksum = header.checksum_of(parts)
    sealed = msgspec.structs.replace(header, checksum=checksum)
    assert len(sealed.pack()) == DATA_HEADER_BYTES and DataHeader.unpack(sealed.pack()) == sealed
    assert sealed.checksum_of([payload]) == checksum
    assert msgspec.structs.replace(sealed, layer=layer ^ 1).checksum_of([payload]) != checksum
    assert sealed.checksum_of([payload[:-1] + bytes([payload[-1] ^ 1])]) != checksum


@pytest.mark.parametrize("position", [0, 4, 28, 31])
def test_a_data_header_that_does_not_begin_like_one_is_refused(position):
    header = bytearray(DataHeader(DATA_OK, 5, 1, 1, 9, 10, 3).pack())
    header[position] ^= 0x40
    with pytest.raises(ProtocolViolation):
        DataHeader.unpack(header)


def test_a_read_fits_its_bound():
    read = Read(2**62, TICKET, 2**31, 2**31, 2**31, 2**31)
    assert len(encode_frame(read)) < 200
