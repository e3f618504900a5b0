"""The event parser at every cut, and the chunk reader on what servers really send."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.bench.sse import ChunkKind, Event, SSEParser, StreamReader

STREAM = (
    b"\xef\xbb\xbfdata: one\n\n"
    b": keepalive\n\n"
    b"event: ping\ndata:two\r\n\r\n"
    b"data: a\rdata: b\r\r"
    b"data\n\n"
    b"id: 7\nretry: 10\nunknown: x\ndata:  spaced\n\n"
    b"event: lost\n\ndata: \xe2\x82\xac\n\n"
)
EVENTS = [
    Event("", b"one"),
    Event("ping", b"two"),
    Event("", b"a\nb"),
    Event("", b""),
    Event("", b" spaced"),
    Event("", "€".encode()),
]


def parse(pieces: list[bytes]) -> list[Event]:
    parser = SSEParser()
    return [event for piece in pieces for event in parser.feed(piece)]


def test_whole_stream() -> None:
    assert parse([STREAM]) == EVENTS


@pytest.mark.parametrize("cut", range(len(STREAM) + 1))
def test_same_events_at_every_single_cut(cut: int) -> None:
    assert parse([STREAM[:cut], STREAM[cut:]]) == EVENTS


def test_same_events_byte_by_byte() -> None:
    assert parse([STREAM[i : i + 1] for i in range(len(STREAM))]) == EVENTS


@given(st.randoms(use_true_random=False))
def test_same_events_at_random_cuts(chance: random.Random) -> None:
    cuts = sorted(chance.sample(range(len(STREAM)), chance.randint(0, 12)))
    assert parse([STREAM[a:b] for a, b in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]) == EVENTS


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "x"]), st.text(st.characters(codec="utf-8", exclude_characters="\r\n\0\ufeff")))
    ),
    st.data(),
)
def test_round_trip_with_any_line_end(sent: list[tuple[str, str]], data: st.DataObject) -> None:
    wire = b""
    for name, text in sent:
        end = data.draw(st.sampled_from([b"\n", b"\r\n", b"\r"]))
        if name:
            wire += b"event: " + name.encode() + end
        wire += b"data: " + text.encode() + end + end
    size = data.draw(st.integers(1, 9))
    events = parse([wire[i : i + size] for i in range(0, len(wire), size)])
    assert events == [Event(name, text.encode()) for name, text in sent]


def test_an_unfinished_event_comes_only_from_close() -> None:
    parser = SSEParser()
    assert parser.feed(b"data: [DONE]") == []
    assert parser.close() == [Event("", b"[DONE]")]
    assert parser.close() == []


def test_comments_are_counted_and_never_events() -> None:
    parser = SSEParser()
    assert parser.feed(b": a\n:\n\n") == []
    assert parser.num_comments == 2


def chunk(delta: dict[str, object] | None = None, **fields: object) -> bytes:
    body: dict[str, object] = {"id": "x", "object": "chat.completion.chunk", "created": 1, **fields}
    if delta is not None:
        body["choices"] = [{"index": 0, "delta": delta, "finish_reason": None}]
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def read(*parts: bytes) -> StreamReader:
    reader = StreamReader()
    for number, part in enumerate(parts):
        reader.feed(part, float(number))
    reader.close(float(len(parts)))
    return reader


def kinds(reader: StreamReader) -> list[ChunkKind]:
    return [seen.kind for seen in reader.chunks]


def test_role_null_and_empty_deltas_are_not_output() -> None:
    reader = read(
        chunk({"role": "assistant", "content": ""}),
        b": keepalive\n\n",
        chunk({"content": None}),
        chunk({"content": "a"}),
        b"data: [DONE]\n\n",
    )
    assert kinds(reader) == [ChunkKind.ROLE, ChunkKind.ROLE, ChunkKind.CONTENT, ChunkKind.DONE]
    assert reader.chunks[2].time_s == 3.0
    assert reader.error is None


def test_reasoning_under_either_name_is_output_of_its_own_kind() -> None:
    reader = read(chunk({"reasoning_content": "hm"}), chunk({"reasoning": "so"}), chunk({"content": "42"}))
    assert kinds(reader)[:3] == [ChunkKind.REASONING, ChunkKind.REASONING, ChunkKind.CONTENT]


def test_usage_chunk_without_choices_is_read_and_is_not_output() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    reader = read(chunk({"content": "a"}), chunk(choices=[], usage=usage), b"data: [DONE]\n\n")
    assert kinds(reader) == [ChunkKind.CONTENT, ChunkKind.USAGE, ChunkKind.DONE]
    assert reader.usage is not None and reader.usage.completion_tokens == 3
    assert reader.usage.prompt_tokens_details is not None and reader.usage.prompt_tokens_details.cached_tokens == 4


def test_null_usage_on_every_chunk_is_no_usage() -> None:
    reader = read(chunk({"content": "a"}, usage=None), b"data: [DONE]\n\n")
    assert reader.usage is None


def test_completions_text_token_ids_and_logprobs() -> None:
    body = {"choices": [{"index": 0, "text": "ab", "token_ids": [5, 6], "logprobs": None}]}
    other = {"choices": [{"index": 0, "text": "cd", "logprobs": {"tokens": ["c", "d"], "token_logprobs": [-1, -2]}}]}
    reader = read(*(b"data: " + json.dumps(item).encode() + b"\n\n" for item in (body, other)))
    assert [(seen.text, seen.num_tokens) for seen in reader.chunks] == [("ab", 2), ("cd", 2)]


def test_tool_calls_are_output() -> None:
    call = {"index": 0, "function": {"name": "f", "arguments": "{}"}}
    reader = read(chunk({"tool_calls": [call]}))
    assert reader.chunks[0].kind is ChunkKind.TOOL and reader.chunks[0].text == "f{}"


@pytest.mark.parametrize(
    "wire",
    [
        b'data: {"error": {"message": "kv lost", "code": 500}}\n\n',
        b"event: error\ndata: kv lost\n\n",
        b'event: error\ndata: {"message": "kv lost"}\n\n',
        b'data: {"object": "error", "message": "kv lost", "code": 400}\n\n',
    ],
)
def test_an_error_event_fails_the_stream_even_before_done(wire: bytes) -> None:
    reader = read(chunk({"content": "a"}), wire, b"data: [DONE]\n\n")
    assert reader.error is not None and "kv lost" in reader.error


def test_early_end_and_malformed_chunk_fail_the_stream() -> None:
    assert "early end" in str(read(chunk({"content": "a"})).error)
    assert "malformed" in str(read(b'data: {"choices": [\n\n', b"data: [DONE]\n\n").error)


def test_finish_reason_without_done_is_a_whole_answer() -> None:
    end = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    reader = read(chunk({"content": "a"}), b"data: " + json.dumps(end).encode() + b"\n\n")
    assert reader.error is None and reader.finish_reason == "stop"
    assert kinds(reader)[-1] is ChunkKind.FINISH


def test_done_without_a_final_blank_line_counts() -> None:
    assert read(chunk({"content": "a"}), b"data: [DONE]").done
