"""The body of an OpenAI request: the fields we know, and what is said about bytes that are not such a body.

Invariants: whatever the bytes are, they become a ``Body`` or a 400 that names the field. Knows nothing about which
values are allowed, or what goes with what.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

import msgspec

from kvbaton.workers.openai_errors import ApiError, bad_request

BULK_BYTES = 128 * 1024  # of a body that is looked at before it is decoded
MAX_STRINGS = 1 << 16  # of such a body: thousands of messages in parts have fewer
_ABSENT = msgspec.Raw()
_MAX_PLAIN_BYTES = 1024


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    """Unknown fields are ignored: clients append an answer as they got it, with whatever its server put into it."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: msgspec.Raw = _ABSENT
    function_call: msgspec.Raw = _ABSENT


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
    # Known to OpenAI and without effect on the answer here. Raw: however large, no object is made of it.
    user: msgspec.Raw = _ABSENT
    metadata: msgspec.Raw = _ABSENT
    store: msgspec.Raw = _ABSENT
    service_tier: msgspec.Raw = _ABSENT
    safety_identifier: msgspec.Raw = _ABSENT
    prompt_cache_key: msgspec.Raw = _ABSENT
    prompt_cache_retention: msgspec.Raw = _ABSENT
    prediction: msgspec.Raw = _ABSENT
    # Accepted only with the value that changes nothing.
    tools: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT
    parallel_tool_calls: msgspec.Raw = _ABSENT
    functions: msgspec.Raw = _ABSENT
    function_call: msgspec.Raw = _ABSENT
    response_format: msgspec.Raw = _ABSENT
    modalities: msgspec.Raw = _ABSENT
    audio: msgspec.Raw = _ABSENT
    web_search_options: msgspec.Raw = _ABSENT
    reasoning_effort: msgspec.Raw = _ABSENT
    verbosity: msgspec.Raw = _ABSENT
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    use_beam_search: msgspec.Raw = _ABSENT
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    kv_transfer_params: msgspec.Raw = _ABSENT
    kvbaton: msgspec.Raw = _ABSENT  # for routers; decoded only when the caller vouches for the sender


def value_of(value: Any) -> Any:
    """A raw value decoded, or its bytes, which are no value that is known, if it is a long one with parts."""
    if not isinstance(value, msgspec.Raw):
        return value
    raw = bytes(value)
    if not raw:
        return None
    if len(raw) > _MAX_PLAIN_BYTES and not raw.startswith(b'"'):
        return raw
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw


_DECODER = msgspec.json.Decoder(Body)
_PLACE = re.compile(r"(?: - at `\$\.?([^`]*)`)?$")  # where msgspec found what it tells
# An escaped half of a pair without the other, where no backslash is text.
_LONE_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|"
    rb"(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F][0-9a-fA-F]{2}"
)
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a pair or of none
_FIELD = re.compile(r"(?:unknown|missing required) field `([^`]*)`")


class _Bulk(msgspec.Struct):
    """Where a body may have a million little values. Decoding them takes seconds, in which no other thread runs."""

    prompt: msgspec.Raw = _ABSENT
    stop_token_ids: msgspec.Raw = _ABSENT


_BULK_DECODER = msgspec.json.Decoder(_Bulk)


def refuse_bulk(raw: bytes, max_prompts: int, max_ids: int, max_stop_ids: int) -> None:
    """400 for a large body of too many little values, of which ``max_ids`` bounds the token ids of a prompt.

    Counted without decoding, in time that grows with the bytes. Whatever else is wrong, decoding tells.
    """
    if (num_strings := _num_strings(raw)) > MAX_STRINGS:
        raise bad_request(f"the body has {num_strings} strings, keys among them; {MAX_STRINGS} are the most")
    try:
        bulk = _BULK_DECODER.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return
    if bytes(bulk.stop_token_ids).count(b",") > max_stop_ids:
        raise bad_request(f"at most {max_stop_ids} stop token ids", "stop_token_ids")
    prompt = bytes(bulk.prompt)
    num_prompts, num_ids = _prompts_in(prompt) if prompt.startswith(b"[") else (1, 0)
    if num_prompts > max_prompts:
        raise too_many_prompts(num_prompts, max_prompts)
    if num_ids > max_ids:
        text = f"a prompt of {num_ids} token ids cannot fit {max_ids} tokens"
        raise bad_request(text, "prompt", "context_length_exceeded")


def _num_strings(raw: bytes) -> int:
    """At least so many, and at most twice: half of the quotes that are certainly not escaped."""
    return (raw.count(b'"') - raw.count(rb"\"")) // 2


def _prompts_in(prompt: bytes) -> tuple[int, int]:
    """How many prompts a list holds, and about how many token ids each. 400 when they are of several kinds."""
    first = prompt[1:1024].lstrip()[:1]
    if first == b"[":
        num_prompts = prompt.count(b"[") - 1  # lists of ids hold no text
        return num_prompts, prompt.count(b",") // max(1, num_prompts)
    if first != b'"':
        if b'"' in prompt or b"[" in prompt[1:]:
            raise mixed_prompts()
        return 1, prompt.count(b",") + 1
    try:
        msgspec.json.decode(prompt, type=list[str])  # ends at the first of another kind
    except msgspec.ValidationError:
        raise mixed_prompts() from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 1, 0
    return _num_strings(prompt), 0


def mixed_prompts() -> ApiError:
    return bad_request("prompt must be a list of strings, or of token ids, or of lists of token ids", "prompt")


def too_many_prompts(num_prompts: int, max_prompts: int) -> ApiError:
    return bad_request(f"{num_prompts} prompts are too many, the limit is {max_prompts}", "prompt")


def decode(raw: bytes) -> Body:
    if not raw.strip():
        raise bad_request("the body is empty; send a JSON object")
    try:
        return _DECODER.decode(raw)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        if _HALF.search(raw) and _LONE_SURROGATE.search(_without_text_backslashes(raw)):  # the decoder says: truncated
            where = _field_with_half(raw)
            raise bad_request(
                f"{where or 'the body'} has half of a surrogate pair (\\ud800 to \\udfff), which is no character; send "
                "both halves, or the character as UTF-8",
                where,
            ) from None
        raise bad_request(f"the body is not valid JSON: {error}") from None
    except (RecursionError, UnicodeDecodeError):
        raise bad_request("the body is not valid JSON: nested too deep, or not UTF-8") from None


def _without_text_backslashes(raw: bytes) -> bytes:
    """As long, but with no backslash that stands for itself: each one left begins another escape."""
    return raw.replace(rb"\\", b"  ")


def _field_with_half(raw: bytes) -> str | None:
    """The path of the first string with half of a surrogate pair. None: in a name, or the rest is no JSON either."""
    if len(raw) > BULK_BYTES:
        return None
    mark = next((each for each in (b"half%02d" % number for number in range(100)) if each not in raw), None)
    if mark is None:
        return None
    try:
        places, end = [], 0
        for found in _LONE_SURROGATE.finditer(_without_text_backslashes(raw)):
            places += [raw[end : found.start()], mark]
            end = found.end()
        document = msgspec.json.decode(b"".join([*places, raw[end:]]))
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    text = mark.decode()
    left: list[tuple[str, Any]] = [("", document)]
    while left:  # depth first, in the order of the document
        where, value = left.pop()
        if isinstance(value, str) and text in value:
            return where or None
        if isinstance(value, dict):
            inner = [(f"{where}.{name}" if where else name, each) for name, each in value.items() if text not in name]
        elif isinstance(value, list):
            inner = [(f"{where}[{number}]", each) for number, each in enumerate(value)]
        else:
            continue
        left += reversed(inner)
    return None


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
    shown = param if field.group(1) else f"{param!r} (its name is empty)"
    near = [] if where else difflib.get_close_matches(param[:100], Body.__struct_encode_fields__, n=1, cutoff=0.8)
    fix = f"did you mean {near[0]}?" if near else "leave it out"
    return bad_request(f"unrecognized field: {shown}; {fix}", param, "unknown_parameter")
