"""The body of an OpenAI request: the fields we know, and what is said about bytes that are not such a body.

Invariants: whatever the bytes are, they become a ``Body`` or a 400 that names the field. Knows nothing about which
values are allowed, or what goes with what.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kvbaton.workers.openai_errors import ApiError, bad_request


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """Unknown fields are ignored: clients append an answer as they got it, with whatever its server put into it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: Any = None
    function_call: Any = None


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding against side channels; we never pad


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """Every field we know by name. ``None`` is what OpenAI's clients send for "not given"."""

    model: str | None = None
    messages: list[Message] | None = None
    prompt: str | list[int | str | list[int]] | None = None  # a list holds one kind only
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | int | None = None
    top_logprobs: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    # Known to OpenAI and without effect on the answer here.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    prediction: Any = None
    # Accepted only with the value that changes nothing.
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    use_beam_search: Any = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: Any = None
    kvbaton: msgspec.Raw = msgspec.Raw()  # for routers; decoded only when the caller vouches for the sender


_DECODER = msgspec.json.Decoder(Body)
_PLACE = re.compile(r"(?: - at `\$\.?([^`]*)`)?$")  # where msgspec found what it tells
# An escaped half of a pair without the other. An even number of backslashes before it is text.
_LONE_SURROGATE = re.compile(
    rb"(?<!\\)(?:\\\\)*(?:\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|"
    rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2})"
)
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]*)`")


def decode(raw: bytes) -> Body:
    if not raw.strip():
        raise bad_request("the body is empty; send a JSON object")
    try:
        return _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        if _LONE_SURROGATE.search(raw):  # which the decoder calls truncated
            raise bad_request(
                "the body has half of a surrogate pair (\\ud800 to \\udfff), which is no character; send both halves, "
                "or the character as UTF-8"
            ) from None
        raise bad_request(f"the body is not valid JSON: {error}") from None
    except (RecursionError, UnicodeDecodeError):
        raise bad_request("the body is not valid JSON: nested too deep, or not UTF-8") from None


def _invalid(text: str) -> ApiError:
    """What msgspec found wrong, told by the field's whole path: messages[0].content[1].text."""
    place = _PLACE.search(text)
    assert place is not None  # it matches nothing, too
    where = (place.group(1) or "").replace("[...]", "")
    problem, field = text[: place.start()], _FIELD.search(text)
    if field is None:
        problem = problem[:1].lower() + problem[1:]
        if where == "messages" or re.fullmatch(r"messages\[\d+\]", where):
            problem += "; messages must be a list of objects with role and content"
        return bad_request(f"{where}: {problem}" if where else f"the body: {problem}", where or None)
    param = f"{where}.{field.group(1)}" if where else field.group(1)
    if "missing" in problem:
        return bad_request(f"{param} is missing", param)
    return bad_request(f"unrecognized field: {param}; leave it out", param, "unknown_parameter")
