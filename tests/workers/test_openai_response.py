"""Text, stop strings, logprobs and usage: the stream says what the whole answer says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from workers.scripted import sse_events

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_request import Endpoint
from kvbaton.workers.openai_response import Answer, Choice


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


def outputs(token_ids: list[int], finish: FinishReason = "length", logprobs: bool = False) -> list[TokenOutput]:
    last = len(token_ids) - 1
    return [
        TokenOutput(
            token_id,
            TokenLogprobs(token_id, -float(i), ((token_id, -float(i)), (65, -9.0))) if logprobs else None,
            finish if i == last else None,
        )
        for i, token_id in enumerate(token_ids)
    ]


def both_ways(
    tokenizer: Tokenizer, endpoint: Endpoint, tokens: list[TokenOutput], sampling: SamplingParams
) -> tuple[dict, list[dict]]:
    """The same tokens as a whole answer and as a stream's chunks."""
    whole, stream = (Answer(endpoint, "id", "m", 1, tokenizer, include_usage=True) for _ in range(2))
    events = b""
    first, second = Choice(0, sampling, tokenizer), Choice(0, sampling, tokenizer)
    for token in tokens:
        if first.finish_reason is None:
            whole.add(first.push(token))
            whole.usage.num_output_tokens += 1
            events += stream.events(second.push(token))
            stream.usage.num_output_tokens += 1
    chunks = [json.loads(event) for event in sse_events(events + stream.last_events())]
    return json.loads(whole.whole()), chunks


def text_of(chunks: list[dict], endpoint: Endpoint) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["delta"].get("content", "") if endpoint == "chat" else c["text"] for c in choices)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("text", ["plain", "hello the world", "\u00e9\u4e2d\U0001f600e\u0301 end", ""])
def test_a_stream_is_the_whole_answer_in_parts(tokenizer: Tokenizer, endpoint: Endpoint, text: str) -> None:
    token_ids = tokenizer.encode(text) + [258]
    tokens = [*outputs(token_ids)[:-1], TokenOutput(258, None, "stop", stop_token=True)]
    whole, chunks = both_ways(tokenizer, endpoint, tokens, SamplingParams())
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if endpoint == "chat" else choice["text"]) == text
    assert text_of(chunks, endpoint) == text
    assert choice["finish_reason"] == "stop" and chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert [c["finish_reason"] for chunk in chunks[:-2] for c in chunk["choices"]] == [None] * (len(chunks) - 2)
    assert whole["usage"] == chunks[-1]["usage"] and chunks[-1]["choices"] == []
    assert whole["usage"]["completion_tokens"] == len(token_ids)
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    roles = [c["delta"]["role"] for chunk in chunks for c in chunk["choices"] if "role" in c.get("delta", {})]
    assert roles == (["assistant"] if endpoint == "chat" else [])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    ("stop", "include", "expected"),
    [
        (("rld an",), False, "hello wo"),
        (("rld an",), True, "hello world an"),
        (("never",), False, "hello world and"),
        (("and", "wor"), False, "hello "),
        (("h",), False, ""),
        (("andx",), False, "hello world and"),
    ],
)
def test_stop_strings_across_tokens(
    tokenizer: Tokenizer, endpoint: Endpoint, stop: tuple[str, ...], include: bool, expected: str
) -> None:
    sampling = SamplingParams(stop=stop, include_stop_str_in_output=include)
    whole, chunks = both_ways(tokenizer, endpoint, outputs(tokenizer.encode("hello world and")), sampling)
    choice = whole["choices"][0]
    assert (choice["message"]["content"] if endpoint == "chat" else choice["text"]) == expected
    assert text_of(chunks, endpoint) == expected
    stopped = expected != "hello world and"
    assert choice["finish_reason"] == ("stop" if stopped else "length")


def test_a_character_cut_by_max_tokens_ends_alike_in_both_ways(tokenizer: Tokenizer) -> None:
    """AP-15"""
    token_ids = tokenizer.encode("a\U0001f600")[:-1]
    whole, chunks = both_ways(tokenizer, "completions", outputs(token_ids), SamplingParams())
    assert whole["choices"][0]["text"] == text_of(chunks, "completions")


def test_stop_strings_wait_for_min_tokens(tokenizer: Tokenizer) -> None:
    sampling = SamplingParams(stop=("l",), min_tokens=5)
    whole, _ = both_ways(tokenizer, "completions", outputs(tokenizer.encode("hello all")), sampling)
    assert whole["choices"][0]["text"] == "hello a"


@pytest.mark.parametrize(("min_tokens", "stopped"), [(2, True), (9, True), (10, True), (11, False)])
def test_a_stop_string_may_begin_before_min_tokens(tokenizer: Tokenizer, min_tokens: int, stopped: bool) -> None:
    """The stop string's letters are tokens 8, 9 and 10: it counts once the tenth may end the text."""
    expected = "hello the " if stopped else "hello the end"
    token_ids = [token for part in ("hello the e", "nd") for token in tokenizer.encode(part)]
    assert len(token_ids) == 10
    sampling = SamplingParams(stop=("end",), min_tokens=min_tokens)
    whole, chunks = both_ways(tokenizer, "completions", outputs(token_ids), sampling)
    assert whole["choices"][0]["text"] == text_of(chunks, "completions") == expected


@pytest.mark.parametrize(("include", "expected"), [(False, "hell"), (True, "hello")])
def test_a_stop_token_is_text_only_when_asked_for(tokenizer: Tokenizer, include: bool, expected: str) -> None:
    *before, last = tokenizer.encode("hello")
    tokens = [*(TokenOutput(i) for i in before), TokenOutput(last, None, "stop", stop_token=True)]
    sampling = SamplingParams(stop_token_ids=(last,), include_stop_str_in_output=include)
    whole, chunks = both_ways(tokenizer, "completions", tokens, sampling)
    assert whole["choices"][0]["text"] == text_of(chunks, "completions") == expected
    assert whole["choices"][0]["finish_reason"] == "stop"
    end = [*(TokenOutput(i) for i in before), TokenOutput(258, None, "stop", stop_token=True)]
    assert both_ways(tokenizer, "completions", end, sampling)[0]["choices"][0]["text"] == "hell", "it is special"


def test_logprobs_have_one_entry_for_each_token(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("x\u00e9z\U0001f600")
    tokens = outputs(token_ids, logprobs=True)
    whole, chunks = both_ways(tokenizer, "completions", tokens, SamplingParams(logprobs=2))
    entry = whole["choices"][0]["logprobs"]
    assert entry["token_logprobs"] == [-float(i) for i in range(len(token_ids))]
    assert entry["text_offset"][:3] == [0, 1, 2]
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
    for key in entry:
        assert sum((part[key] for part in streamed), []) == entry[key]
    whole, chunks = both_ways(tokenizer, "chat", tokens, SamplingParams(logprobs=2))
    content = whole["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == "x\u00e9z\U0001f600"
    assert len(content) == len(token_ids) and len(content[0]["top_logprobs"]) == 2
    streamed = [c["logprobs"]["content"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert sum(streamed, []) == content


def test_infinite_logprobs_stay_json(tokenizer: Tokenizer) -> None:
    token = TokenOutput(65, TokenLogprobs(65, float("-inf")), "length")
    whole, _ = both_ways(tokenizer, "completions", [token], SamplingParams(logprobs=0))
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [-9999.0]


def test_an_engine_error_is_never_a_finish_reason(tokenizer: Tokenizer) -> None:
    with pytest.raises(ApiError):
        Choice(0, SamplingParams(), tokenizer).push(TokenOutput(65, None, "error"))
