"""Every bound on what one request may ask for: what reaches it is taken, what goes beyond it is refused by field."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_request import RequestLimits, parse, tokenize

LIMITS = RequestLimits()
Make = Callable[[int], dict[str, Any]]


def completion(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", **fields}


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], **fields}


# bound -> the field that is named, and a request of that size
BOUNDS: dict[str, tuple[str, Make]] = {
    "max_prompts": ("prompt", lambda n: {"prompt": ["x"] * n}),
    "max_choices": ("n", lambda n: completion(n=n)),
    "max_messages": ("messages", lambda n: {"messages": chat()["messages"] * n}),
    "max_stops": ("stop", lambda n: completion(stop=["x"] * n)),
    "max_stop_chars": ("stop", lambda n: completion(stop="x" * n)),
    "max_stop_token_ids": ("stop_token_ids", lambda n: completion(stop_token_ids=[1] * n)),
    "max_logprobs": ("logprobs", lambda n: completion(logprobs=n)),
    "max_logit_bias": ("logit_bias", lambda n: completion(logit_bias={str(i): 1 for i in range(n)})),
    "max_salt_chars": ("cache_salt", lambda n: completion(cache_salt="x" * n)),
}
# Bounds that are of numbers: name -> the largest, and the first beyond it.
NUMBERS: dict[str, tuple[float, float]] = {
    "max_tokens": (2**31, 2**31 + 1), "min_tokens": (2**31, 2**31 + 1), "seed": (2**63 - 1, 2**63),
    "top_k": (2**31, 2**31 + 1),
    "priority": (2**31 - 1, 2**31), "temperature": (2.0, 2.1), "top_p": (1.0, 1.1), "min_p": (1.0, 1.1),
    "presence_penalty": (2.0, 2.1), "frequency_penalty": (2.0, 2.1), "repetition_penalty": (10.0, 10.1),
}  # fmt: skip


def ask(body: dict[str, Any]) -> Any:
    return parse("chat" if "messages" in body else "completions", json.dumps(body).encode(), LIMITS)


def refused(body: dict[str, Any]) -> str | None:
    with pytest.raises(ApiError) as caught:
        ask(body)
    assert caught.value.status == 400
    return caught.value.param


@pytest.mark.parametrize("bound", BOUNDS)
def test_what_reaches_a_bound_is_taken_and_what_exceeds_it_is_refused(bound: str) -> None:
    field, make = BOUNDS[bound]
    limit = getattr(LIMITS, bound)
    ask(make(limit))
    assert refused(make(limit + 1)) == field
    assert refused(make(50 * (limit + 1))) in (field, None)  # a body of that size may be refused as a whole


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_bounded(name: str) -> None:
    most, beyond = NUMBERS[name]
    ask(completion(**{name: most}))
    assert refused(completion(**{name: beyond})) == name
    assert refused(completion(**{name: 10**60})) == name


def test_choices_are_counted_over_all_prompts() -> None:
    ask({"prompt": ["x"] * 64, "n": 2})
    assert refused({"prompt": ["x"] * 64, "n": 3}) == "n"
    assert refused(completion(logit_bias={"1": 100.1})) == "logit_bias"
    assert refused(chat(logprobs=True, top_logprobs=LIMITS.max_logprobs + 1)) == "top_logprobs"


def test_a_text_that_cannot_fit_is_not_tokenized(tiny_model_dir: Path) -> None:
    tokenizer, context = Tokenizer.load(tiny_model_dir), 16
    most = context * LIMITS.max_chars_per_token
    for body in (completion(prompt="x" * (most + 1)), {"messages": [{"role": "user", "content": "x" * (most + 1)}]}):
        request = ask(body)
        with pytest.raises(ApiError) as caught:
            tokenize(request, tokenizer, context, LIMITS)
        assert caught.value.code == "context_length_exceeded"
    assert tokenize(ask(completion(prompt="x" * most)), tokenizer, context, LIMITS)


def test_no_bound_is_without_a_test() -> None:
    tested = {*BOUNDS, "max_chars_per_token"}
    elsewhere = {"max_prompt_ids"}  # tests/workers/test_openai_request.py
    assert {field.name for field in dataclasses.fields(LIMITS)} <= tested | elsewhere
