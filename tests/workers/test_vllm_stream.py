"""A server's stream, from whatever it sends: typed errors, bounded memory, and never a wrong answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.types import GenerateRequest, LocalError, SamplingParams, TokenOutput
from kvbaton.workers.vllm_stream import CHUNK, Choice, EventSplitter, Logprobs, TokenReader, Usage, status_of

END = 2


def reader(max_tokens: int = 8, **sampling: Any) -> TokenReader:
    request = GenerateRequest("r", (5,), SamplingParams(max_tokens=max_tokens, **sampling), eos_token_ids=(END,))
    return TokenReader(request, 100)


def read(tokens: TokenReader, *parts: tuple[list[int], str | None]) -> list[tuple[int, str | None, bool]]:
    outputs: list[TokenOutput] = []
    for ids, reason in parts:
        outputs += tokens.push(Choice(ids, reason))
    return [(output.token_id, output.finish_reason, output.stop_token) for output in outputs]


@pytest.mark.parametrize("reason", ["abort", "error", "tool_calls", "no one knows"])
@pytest.mark.parametrize("ids", [[], [11]])
def test_an_answer_that_was_broken_off_is_an_error(reason: str, ids: list[int]) -> None:
    tokens = reader()
    read(tokens, ([10], None))
    with pytest.raises(LocalError, match=reason):
        tokens.push(Choice(ids, reason))
    assert not tokens.finished


def test_a_reason_that_comes_without_a_token_belongs_to_the_one_before() -> None:
    assert read(reader(), ([10, END], None), ([], "stop")) == [(10, None, False), (END, "stop", True)]
    assert read(reader(2), ([10], None), ([11], None), ([], "length")) == [(10, None, False), (11, "length", False)]
    assert read(reader(ignore_eos=True), ([END], None), ([3], "stop")) == [(END, None, False), (3, "stop", True)]
    last_is_text = read(reader(1), ([10], None), ([], "stop"))
    assert last_is_text == [(10, "stop", False)], "its text must not be dropped as that of an end token"


def test_a_token_that_cannot_be_the_last_does_not_wait() -> None:
    tokens = reader()
    assert [output.token_id for output in tokens.push(Choice([10, 11]))] == [10, 11]
    with pytest.raises(LocalError, match="cannot be the last"):
        tokens.push(Choice([], "stop"))


def test_a_stream_without_a_reason_is_not_finished() -> None:
    tokens = reader(1)
    assert tokens.push(Choice([10])) == []
    with pytest.raises(LocalError, match="without a finish reason"):
        tokens.close()


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([([10] * 9, None)], "more than the 8 tokens"),
        ([([10] * 8, None), ([10], "length")], "more than the 8 tokens"),
        ([([-5], None)], "token -5"),
        ([([10**12], None)], "vocabulary has 100"),
        ([([100], "stop")], "vocabulary has 100"),
        ([([10], "stop"), ([11], None)], "after the last"),
        ([([10], "stop"), ([], "stop")], "after the last"),
    ],
)
def test_no_token_is_passed_on_that_was_not_asked_for(parts: list[tuple[list[int], str | None]], word: str) -> None:
    with pytest.raises(LocalError, match=word):
        read(reader(), *parts)


@pytest.mark.parametrize(
    "logprobs",
    [
        Logprobs([-1, -2], ["a", "b"], [{"token_id:1": -1}]),
        Logprobs([-1, -2], ["a", "b"], [{"hello": -1}, None]),
        Logprobs([-1, -2], ["a", "b"], [{"token_id:²": -1}, None]),
        Logprobs([-1, -2], ["a", "b"], [{"17": -1}, None]),
    ],
)
def test_logprobs_that_make_no_sense_are_an_error(logprobs: Logprobs) -> None:
    with pytest.raises(LocalError, match="top_logprobs"):
        reader().push(Choice([1, 3], None, logprobs))


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_events_are_found_wherever_the_stream_was_cut(step: int) -> None:
    stream = b": a comment\n\ndata: one\n\ndata:two\r\n\r\nevent: x\ndata: [DONE]\n\ndata: cut"
    splitter = EventSplitter()
    found = [event for at in range(0, len(stream), step) for event in splitter.push(stream[at : at + step])]
    assert found == [b"one", b"two", b"[DONE]"]


def test_an_endless_event_is_given_up() -> None:
    splitter = EventSplitter(max_bytes=1000)
    assert list(splitter.push(b"data: " + b"x" * 900)) == []
    with pytest.raises(LocalError, match="more than 1000 bytes"):
        list(splitter.push(b"x" * 200))
    many = EventSplitter(max_bytes=1000)
    assert len(list(many.push(b"data: x\n\n" * 10_000))) == 10_000, "the bound is for one event, not for a part"


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ({"code": 400}, 400),
        ({"code": "503"}, 503),
        ({"code": "BadRequestError"}, 400),
        ({"code": "nonsense"}, 500),
        ({"code": True}, 500),
        ({"code": 200}, 500),
        ({"code": [1]}, 500),
        ({}, 500),
    ],
)
def test_an_error_in_a_stream_has_a_status_whatever_its_code(error: dict[str, Any], status: int) -> None:
    assert status_of(error) == status


def test_cached_tokens_are_a_number_no_larger_than_the_prompt() -> None:
    def usage(cached: Any) -> Usage:
        return msgspec.convert({"prompt_tokens": 4, "prompt_tokens_details": {"cached_tokens": cached}}, Usage)

    assert [usage(cached).num_cached for cached in (3, None, -9, 10**9)] == [3, 0, 0, 4]
    with pytest.raises(msgspec.ValidationError):
        CHUNK.decode(b'{"usage":{"prompt_tokens_details":{"cached_tokens":"x"}}}')
