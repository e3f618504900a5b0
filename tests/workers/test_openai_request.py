"""What is accepted, what is refused, and by which field's name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.workers.openai_body import BULK_BYTES
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_request import ApiRequest, Endpoint, RequestLimits, parse, resolve, tokenize, tokenize_met

LIMITS = RequestLimits()
HELLO = [{"role": "user", "content": "hello"}]


def completions(**body: Any) -> ApiRequest:
    return parse("completions", json.dumps({"prompt": "x", **body}).encode(), LIMITS)


def chat(**body: Any) -> ApiRequest:
    return parse("chat", json.dumps({"messages": HELLO, **body}).encode(), LIMITS)


def refusal(endpoint: Endpoint, raw: bytes | dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(endpoint, raw if isinstance(raw, bytes) else json.dumps(raw).encode(), LIMITS)
    assert caught.value.status == 400
    return caught.value


def test_every_sampling_parameter_reaches_the_engine() -> None:
    sampling = completions(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        seed=3,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        repetition_penalty=1.2,
        logit_bias={"5": -100},
        logprobs=3,
        stop=["a", "b"],
        stop_token_ids=[1],
        min_tokens=2,
        ignore_eos=True,
        include_stop_str_in_output=True,
    ).sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.5,
        0.9,
        7,
        0.1,
        3,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (sampling.logit_bias, sampling.logprobs, sampling.stop, sampling.stop_token_ids) == (
        {5: -100.0},
        3,
        ("a", "b"),
        (1,),
    )
    assert (sampling.min_tokens, sampling.ignore_eos, sampling.include_stop_str_in_output) == (2, True, True)


def test_null_means_not_given() -> None:
    names = ("max_tokens", "temperature", "stop", "seed", "logit_bias", "stream", "n", "tools", "response_format")
    assert completions(**dict.fromkeys(names)).sampling == completions().sampling


@pytest.mark.parametrize(
    ("prompt", "num_prompts"),
    [("a b", 1), ([1, 2, 3], 1), ([[1, 2], [3, 4, 5]], 2), (["a", "b"], 2), ("", 1)],
)
def test_every_form_of_prompt(prompt: Any, num_prompts: int) -> None:
    assert len(completions(prompt=prompt).prompts) == num_prompts


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["x"] * 65}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 10000}, "n"),
        ({"n": True}, "n"),
        ({"prompt": ["x"] * 64, "n": 3}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 2**64}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"logprobs": 1_000_000_000}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"messages": HELLO}, "messages"),
        ({"nonsense": 1}, "nonsense"),
        ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, "kv_transfer_params"),
    ],
)
def test_completions_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refusal("completions", {"prompt": "x", **body}).param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type"),
        ({"messages": [*HELLO, {"content": "a"}]}, "messages[1].role"),
        ({"messages": [*HELLO, {"role": 1, "content": "a"}]}, "messages[1].role"),
        ({"messages": [*HELLO, "hello"]}, "messages[1]"),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {}, "tool_calls": [1]}]},
            "messages[0].tool_calls",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "messages[0].function_call",
        ),
        ({"stream": True, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": HELLO * 2049}, "messages"),
        ({"prompt": "x"}, "prompt"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_chat_refused_by_name(body: dict[str, Any], param: str) -> None:
    assert refusal("chat", {"messages": HELLO, **body}).param == param


@pytest.mark.parametrize(
    ("endpoint", "body", "message"),
    [
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "a content part of type 'text' needs",
        ),
        ("chat", {"messages": [{"role": 1}]}, "messages[0].role: expected `str`, got `int`"),
        ("chat", {"messages": [{}]}, "messages[0].role is missing"),
        ("chat", {"messages": HELLO, "tools": [{}]}, "tools is not supported here; leave it out"),
        ("chat", {"messages": HELLO, "nonsense": 1}, "unrecognized field: nonsense; leave it out"),
        ("completions", {"prompt": "x", "top_k": 2**31 + 1}, "top_k must be between -1 and 2147483648, got 2147483649"),
        ("completions", {"prompt": "x", "min_tokens": 3e9}, "min_tokens: expected `int | null`, got `float`"),
        ("completions", {"prompt": "x", "temperature": 1000000}, "temperature must be between 0 and 2, got 1000000"),
        ("completions", {"prompt": "x", "temperature": 2.5}, "temperature must be between 0 and 2, got 2.5"),
        ("completions", {"prompt": "x", "seed": 2**64}, "seed must be between -9223372036854775808 and"),
        ("completions", {"prompt": "x", "top_p": -1000000}, "top_p must be above 0, got -1000000"),
        ("completions", {"prompt": "x", "logit_bias": {"a": 1}}, "the keys of logit_bias must be token ids, got 'a'"),
        ("completions", {"prompt": "x", "logit_bias": {"1": None}}, "logit_bias: expected `float`, got `null`"),
    ],
)
def test_messages_say_what_to_do(endpoint: Endpoint, body: dict[str, Any], message: str) -> None:
    assert message in refusal(endpoint, body).message


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("digits", [40, 400, 5000])
@pytest.mark.parametrize("name", ["min_tokens", "top_k", "seed", "logprobs", "priority", "max_tokens", "n"])
def test_a_number_beyond_all_bounds_is_refused_by_name(name: str, digits: int, sign: str) -> None:
    error = refusal("completions", f'{{"prompt":"x","{name}":{sign}{"9" * digits}}}'.encode())
    assert error.param == name and name in error.message and len(error.message) < 200


@pytest.mark.parametrize("text", [r"\ud800", r"a\uD83Dx", r"\udc00", r"\\\ud800", r"\ud83d\ud83d\ude00"])
@pytest.mark.parametrize("name", ["prompt", "cache_salt"])
def test_half_a_character_is_called_that(name: str, text: str) -> None:
    body = {"prompt": "x", name: "?"}
    assert "surrogate" in refusal("completions", json.dumps(body).replace("?", text).encode()).message


@pytest.mark.parametrize(
    ("endpoint", "raw", "where"),
    [
        ("completions", rb'{"cache_salt":"\ud83d\ude00","prompt":["a","b\udc00 \\"]}', "prompt[1]"),
        ("completions", rb'{"prompt":"\\\\\ud800","user":"\ud800"}', "prompt"),
        ("chat", rb'{"messages":[{"role":"user","content":[{"type":"text","text":"\uD812x"}]}]}',
         "messages[0].content[0].text"),
        ("chat", rb'{"stop":["a"],"messages":[{"role":"user","content":"a"},{"role":"user","content":"\ud800"}]}',
         "messages[1].content"),
        ("completions", rb'{"prompt":"x","\ud800":1}', None),
    ],
)  # fmt: skip
def test_the_field_with_half_a_character_is_named(endpoint: Any, raw: bytes, where: str | None) -> None:
    error = refusal(endpoint, raw)
    assert error.param == where and error.message.startswith(where or "the body")


LITTLE = 50_000


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (b"[" + b"[1]," * LITTLE + b"[1]]", "too many"),
        (b"[" + b'"a",' * LITTLE + b'"a"]', "too many"),
        (b'[ "a",' + b"[1]," * LITTLE + b"[1]]", "must be a list of strings"),
        (b"[1," + b"[1]," * LITTLE + b"[1]]", "must be a list of strings"),
    ],
    ids=["lists", "strings", "string-and-lists", "id-and-lists"],
)
def test_a_million_little_prompts_are_refused_before_they_are_decoded(
    prompt: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.workers.openai_request.decode", lambda raw: pytest.fail("it was decoded"))
    error = refusal("completions", b'{"max_tokens":1,"prompt":' + prompt + b"}")
    assert error.param == "prompt" and told in error.message


MANY = 100_000


@pytest.mark.parametrize(
    ("endpoint", "body", "param", "told"),
    [
        ("chat", b'{"messages":[' + b'{"role":"user"},' * MANY + b"{}]}", None, "strings"),
        ("chat", b'{"messages":[{"role":"user","content":[' + b'{"type":"text"},' * MANY + b"{}]}]}", None, "strings"),
        ("completions", b'{"prompt":"x","stop":[' + b'"\\\\",' * 2 * MANY + b'""]}', None, "strings"),
        ("completions", b'{"prompt":"x","logit_bias":{' + b'"1":1,' * MANY + b'"2":1}}', None, "strings"),
        ("completions", b'{"prompt":"x",' + b'"user":1,' * MANY + b'"n":1}', None, "strings"),
        ("completions", b'{"prompt":"x","stop_token_ids":[' + b"1," * MANY + b"1]}", "stop_token_ids", "at most 256"),
        ("completions", b'{"prompt":[' + b"1," * MANY + b"1]}", "prompt", "100001 token ids cannot fit 1000 tokens"),
        ("completions", b'{"prompt":[[' + b"1," * MANY + b"1],[2]]}", "prompt", "token ids cannot fit 1000 tokens"),
        ("completions", b'{"prompt":[' + b"1," * MANY + b'"x"]}', "prompt", "must be a list of"),
    ],
)
def test_a_million_little_values_are_refused_before_they_are_decoded(
    endpoint: Any, body: bytes, param: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.workers.openai_request.decode", lambda raw: pytest.fail("it was decoded"))
    with pytest.raises(ApiError, match=told) as caught:
        parse(endpoint, body, replace(LIMITS, max_prompt_ids=1000))
    assert (caught.value.status, caught.value.param) == (400, param)


def test_text_full_of_quotes_is_not_taken_for_many_values() -> None:
    text = '"a", \\"' * MANY
    assert parse("completions", json.dumps({"prompt": text}).encode(), LIMITS).prompts == (text,)


@pytest.mark.parametrize(
    "prompt",
    [
        'a [1],[2] text with "quotes" ' * 8000,
        ['some "words"\\' * 4000] * 3,
        list(range(40_000)),
        [[1, 2, 3] * 9000] * 4,
    ],
    ids=["text", "texts", "ids", "lists"],
)
def test_a_large_prompt_of_any_kind_is_read(prompt: Any) -> None:
    raw = json.dumps({"prompt": prompt}).encode()
    assert len(raw) > BULK_BYTES
    found = parse("completions", raw, LIMITS).prompts
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [list(p) if isinstance(p, tuple) else p for p in found] == (prompt if several else [prompt])


def test_what_no_model_reads_may_be_of_any_size_and_shape() -> None:
    raw = b'{"prompt":"x","metadata":[' + b"[]," * LITTLE + b'{}],"user":["u"]}'
    request = parse("completions", raw, LIMITS)
    assert (request.prompts, request.user) == (("x",), "")
    assert refusal("completions", b'{"prompt":"x","tools":[' + b"{}," * LITTLE + b"{}]}").param == "tools"


def test_whole_pairs_and_text_that_looks_like_one_are_fine() -> None:
    assert parse("completions", rb'{"prompt":"\ud83d\ude00 \\ud800"}', LIMITS).prompts == ("\U0001f600 \\ud800",)
    broken = refusal("completions", rb'{"prompt":"\ud83d\ude00 \\ud800"')
    assert "surrogate" not in broken.message


def test_two_names_for_one_bound_must_agree() -> None:
    error = refusal("chat", {"messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4})
    assert error.param == "max_completion_tokens" and "max_tokens and max_completion_tokens" in error.message
    assert chat(max_tokens=3, max_completion_tokens=3).max_tokens == 3


@pytest.mark.parametrize("messages", ["hello", {"role": "user"}, 5, ["hello"], [[]]])
def test_messages_of_another_kind_are_told_what_they_should_be(messages: Any) -> None:
    assert "messages must be a list of objects with role and content" in refusal("chat", {"messages": messages}).message


@pytest.mark.parametrize("raw", [b"", b" \n"])
def test_an_empty_body_is_called_empty(raw: bytes) -> None:
    assert refusal("chat", raw).message == "the body is empty; send a JSON object"


@pytest.mark.parametrize("value", [{}, {"request_id": 5}, [], "x", {"request_id": "a", "prompt_token_ids": [[1]]}])
def test_a_clients_internal_object_is_refused_unread(value: Any) -> None:
    error = refusal("completions", {"prompt": "x", "kvbaton": value})
    assert (error.message, error.param) == ("kvbaton is not accepted from clients; leave it out", "kvbaton")


def test_a_routers_internal_object_is_read() -> None:
    body = {"prompt": "x", "kvbaton": {"request_id": "a", "prompt_token_ids": [[1, 2]]}}
    request = parse("completions", json.dumps(body).encode(), LIMITS, from_router=True)
    assert request.internal is not None and request.internal.prompt_token_ids == ([1, 2],)
    for broken in ({}, {"request_id": "a", "prompt_token_ids": [], "remote": 1}):
        with pytest.raises(ApiError) as caught:
            parse("completions", json.dumps({**body, "kvbaton": broken}).encode(), LIMITS, from_router=True)
        assert caught.value.param == "kvbaton"


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    """What OpenAI's client gets as a message, and what other servers put into theirs."""
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
        "reasoning_content": "because",
        "cache_control": {"type": "ephemeral"},
    }
    request = chat(messages=[*HELLO, answer, {"role": "user", "content": "and?", "name": "ann"}])
    assert request.messages[1:] == (
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "and?", "name": "ann"},
    )


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"{",
        b'{"prompt":"\xff"}',
        b'{"prompt":"\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":"x","user":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt":"x","temperature":1e999}',
    ],
)
def test_broken_json_is_a_plain_400(raw: bytes) -> None:
    error = refusal("completions", raw)
    assert error.body().startswith(b'{"error":{"message":')


def test_harmless_openai_fields_are_ignored() -> None:
    chat(user="u", metadata={"a": "b"}, store=False, service_tier="auto", response_format={"type": "text"}, tools=[])


def test_content_parts_are_joined_and_developer_is_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": parts}])
    assert request.messages == ({"role": "system", "content": "a\nb"},)


class TestResolve:
    @pytest.fixture
    def tokenizer(self, tiny_model_dir: Path) -> Tokenizer:
        return Tokenizer.load(tiny_model_dir)

    def resolve(self, request: ApiRequest, tokenizer: Tokenizer, max_context: int = 100) -> list[Any]:
        prompts = tokenize(request, tokenizer, max_context, LIMITS)
        return resolve(request, prompts, tokenizer, max_context, "id", (7,))

    def test_defaults_of_max_tokens(self, tokenizer: Tokenizer) -> None:
        assert self.resolve(completions(prompt=[1] * 10), tokenizer)[0].sampling.max_tokens == 16
        assert self.resolve(completions(prompt=[1] * 95), tokenizer)[0].sampling.max_tokens == 5
        request = self.resolve(chat(), tokenizer)[0]
        assert request.sampling.max_tokens == 100 - len(request.prompt_token_ids)
        assert self.resolve(chat(max_completion_tokens=20), tokenizer)[0].sampling.max_tokens == 20

    def test_beyond_the_context_is_refused_before_any_work(self, tokenizer: Tokenizer) -> None:
        assert len(self.resolve(completions(prompt=[1] * 90, max_tokens=10), tokenizer)) == 1
        for request in (completions(prompt=[1] * 90, max_tokens=11), completions(prompt="y" * 10_000)):
            with pytest.raises(ApiError) as caught:
                self.resolve(request, tokenizer)
            assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")

    def test_what_is_too_long_is_named(self, tokenizer: Tokenizer) -> None:
        for request, param, fix in (
            (completions(prompt=[1] * 90, max_tokens=11), "max_tokens", "use at most 10"),
            (chat(max_completion_tokens=100), "max_completion_tokens", "use at most"),
            (completions(prompt=[1] * 100, max_tokens=1), "prompt", "shorten the prompt"),
            (completions(prompt=[1] * 101), "prompt", "shorten the prompt"),
        ):
            with pytest.raises(ApiError) as caught:
                self.resolve(request, tokenizer)
            assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")
            assert fix in caught.value.message

    @pytest.mark.parametrize("prompt", [[-1], [99999999], "", [""]])
    def test_what_is_not_a_prompt_for_this_model(self, tokenizer: Tokenizer, prompt: Any) -> None:
        with pytest.raises(ApiError) as caught:
            self.resolve(completions(prompt=prompt), tokenizer)
        assert (caught.value.status, caught.value.param) == (400, "prompt")

    @pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
    def test_token_ids_outside_the_vocabulary_are_refused_by_name(self, tokenizer: Tokenizer, field: str) -> None:
        last = tokenizer.vocab_size - 1
        for token_id in (last, last + 1):
            value: Any = {str(token_id): 1} if field == "logit_bias" else [token_id]
            request = completions(prompt=[1], **{field: value})
            if token_id == last:
                assert self.resolve(request, tokenizer)
                continue
            with pytest.raises(ApiError) as caught:
                self.resolve(request, tokenizer)
            assert (caught.value.status, caught.value.param) == (400, field) and str(last) in caught.value.message

    def test_min_tokens_above_max_tokens(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(ApiError) as caught:
            self.resolve(completions(max_tokens=4, min_tokens=5), tokenizer)
        assert caught.value.param == "min_tokens"

    def test_choices_are_prompt_major_with_ids_and_seeds_of_their_own(self, tokenizer: Tokenizer) -> None:
        sequences = self.resolve(completions(prompt=["a", "b", "c"], n=2, seed=5), tokenizer)
        assert [s.request_id for s in sequences] == [f"id.{i}" for i in range(6)]
        assert [s.sampling.seed for s in sequences] == [5, 6] * 3
        assert sequences[0].prompt_token_ids == sequences[1].prompt_token_ids != sequences[2].prompt_token_ids
        assert sequences[0].eos_token_ids == (7,)


def test_texts_of_known_words_need_no_thread(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    known = completions(prompt=["the quick brown fox " * 300, "the lazy dog"])
    tokens = tokenize(known, tokenizer, 100_000, LIMITS)
    assert tokenize_met(known, tokenizer) == tokens
    assert tokenize_met(completions(prompt=[[1, 2], [3]]), tokenizer) == [(1, 2), (3,)]
    assert tokenize_met(completions(prompt=" ".join(f"new{i}word" for i in range(200))), tokenizer) is None
    assert tokenize_met(chat(messages=HELLO), tokenizer) is None
