"""The router's description of its API is what its parsers do: every field is in it, and what it forbids is refused."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import jsonschema
import msgspec
import pytest
from fuzz.shapes import changed
from router.fleet import Fleet

from kvbaton.router.openapi import PATH, document
from kvbaton.workers.openai_body import Body
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_request import CHAT_ONLY, COMPLETIONS_ONLY, RequestLimits, parse

LIMITS = RequestLimits()
CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}], "name": "n"}], "temperature": 0.5,
    "n": 2, "logprobs": True, "top_logprobs": 2, "stop": ["a", "b"], "stream": True, "tools": [], "user": "u",
    "stream_options": {"include_usage": True}, "logit_bias": {"3": 1.5}, "response_format": {"type": "text"},
}  # fmt: skip
COMPLETION: dict[str, Any] = {
    "prompt": ["a", "b"],
    "max_tokens": 3,
    "best_of": 1,
    "echo": False,
    "seed": 1,
    "top_k": -1,
}
# What no schema says: one field with another, what is a number inside a text, kinds in one list.
UNSAID = ("stream_options", "logit_bias", "stop", "stop_token_ids", "n", "logprobs", "top_logprobs", "top_p", "best_of")


def validator(name: str) -> jsonschema.Draft202012Validator:
    whole = document("m")
    return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": whole["components"]})


def test_every_field_is_described_and_each_endpoint_has_its_own() -> None:
    schemas = document("m")["components"]["schemas"]
    known = {field.name for field in msgspec.structs.fields(Body)} - {"kvbaton", "kv_transfer_params"}
    assert set(schemas["ChatRequest"]["properties"]) == known - set(COMPLETIONS_ONLY)
    assert set(schemas["CompletionRequest"]["properties"]) == known - set(CHAT_ONLY)
    jsonschema.Draft202012Validator.check_schema(schemas["ChatRequest"])
    assert schemas["ChatRequest"]["properties"]["temperature"]["anyOf"][0]["maximum"] == 2.0


@pytest.mark.parametrize(("endpoint", "name", "good"), [("chat", "ChatRequest", CHAT),
                                                        ("completions", "CompletionRequest", COMPLETION)])  # fmt: skip
def test_description_and_parser_agree(endpoint: Any, name: str, good: dict[str, Any]) -> None:
    """Bodies that are wrong somewhere: refused by the one, refused by the other; where only the parser refuses, it
    names a field whose rule no schema can say."""
    judge, rng, refused = validator(name), Random(5), 0
    assert not list(judge.iter_errors(good))
    parse(endpoint, json.dumps(good).encode(), LIMITS)
    for _ in range(400):
        body = changed(good, rng)
        try:
            raw = json.dumps(body, allow_nan=False).encode()
        except ValueError:
            continue  # no JSON
        errors = list(judge.iter_errors(body))
        try:
            parse(endpoint, raw, LIMITS)
        except ApiError as error:
            refused += 1
            said = "surrogate" in error.message or "JSON" in error.message or _unsaid(error.param or "")
            assert errors or said, (body, error.message)
        else:
            assert not errors, (body, errors[0].message)
    assert refused > 100


def _unsaid(param: str) -> bool:
    return param.partition("[")[0] in (*UNSAID, "prompt", "messages", "seed", "priority")


async def test_the_router_serves_it_and_answers_errors_as_it_says(split: Fleet) -> None:
    async with split.http.get(split.url + PATH) as response:
        assert response.status == 200
        served = await response.json()
    assert served == json.loads(json.dumps(document("tiny")))
    error, rng = validator("Error"), Random(6)
    for path, good in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        for _ in range(60):
            body = {**changed(good, rng), "stream": False} if isinstance(good, dict) else good
            body.pop("stream_options", None)
            status, answer, _ = await split.post(json.dumps(body).encode(), path)
            assert status == 200 or 400 <= status < 500, (status, body)
            if status != 200:
                error.validate(answer)
                assert answer["error"]["param"] is not None or "body" in answer["error"]["message"], answer
