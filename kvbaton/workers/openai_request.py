"""From the bytes of an OpenAI request to sequences for the engine, or to an error that names the field.

Two steps, so that a router and a worker can share them: ``parse`` checks everything that needs no model, ``resolve``
checks token ids and lengths against one. Invariants: what is accepted is honoured; a parameter that cannot be honoured
is refused by name, never dropped, but for fields of a message that say nothing to a model (clients send answers back
whole). What only a router may write is not even looked at unless the caller vouches for it. Knows nothing about HTTP
or engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import msgspec

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import UNREADABLE, GenerateRequest, SamplingParams
from kvbaton.workers.openai_body import (
    BULK_BYTES,
    Body,
    ContentPart,
    Message,
    decode,
    mixed_prompts,
    refuse_bulk,
    too_many_prompts,
    value_of,
)
from kvbaton.workers.openai_errors import ApiError, bad_request
from kvbaton.workers.protocol import InternalRequest

Endpoint = Literal["chat", "completions"]
Prompt = str | tuple[int, ...]


@dataclass(frozen=True)
class RequestLimits:
    """Bounds on what one request may ask for; each is answered with a 400 that names the field."""

    max_prompts: int = 64
    max_choices: int = 128  # prompts times n
    max_messages: int = 2048
    max_stops: int = 16
    max_stop_chars: int = 1024
    max_stop_token_ids: int = 256
    max_logprobs: int = 20
    max_logit_bias: int = 1024
    max_salt_chars: int = 256
    max_prompt_ids: int = 1 << 20  # token ids of a prompt in a large body, before it is known how many fit
    max_chars_per_token: int = 32  # a longer prompt than context x this is refused without tokenizing it


class ApiRequest(msgspec.Struct, frozen=True):
    """A parsed request. ``sampling.max_tokens`` means something only after ``resolve``."""

    endpoint: Endpoint
    model: str | None
    messages: tuple[dict[str, str], ...]
    prompts: tuple[Prompt, ...]
    n: int
    stream: bool
    include_usage: bool
    max_tokens: int | None
    max_tokens_field: str  # which of the two names the client used
    sampling: SamplingParams
    cache_salt: str
    priority: int
    internal: InternalRequest | None
    user: str = ""  # of the client's making: may group requests, never names anything

    @property
    def text_chars(self) -> int:
        """Characters to tokenize: tells whether to do it off the event loop."""
        messages = sum(len(text) for message in self.messages for text in message.values())
        return messages + sum(len(p) for p in self.prompts if isinstance(p, str))


ROLES = ("system", "developer", "user", "assistant")
CHAT_ONLY = ("messages", "max_completion_tokens", "top_logprobs")
COMPLETIONS_ONLY = ("prompt", "best_of", "echo", "suffix")
# name -> values that change nothing
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "use_beam_search": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "add_special_tokens": (True,),
}
_CHECKED = tuple(UNSUPPORTED)
_values_of_checked = attrgetter(*_CHECKED, "kv_transfer_params")
_NONE_OF_CHECKED = _values_of_checked(Body())
_sampling_fields = attrgetter(
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "logprobs", "top_logprobs", "stop", "stop_token_ids", "ignore_eos",
    "include_stop_str_in_output",
)  # fmt: skip
_NO_SAMPLING_FIELDS = (None,) * 16
_USUAL_SAMPLING = SamplingParams(temperature=1.0, seed=None)
_INTERNAL_DECODER = msgspec.json.Decoder(InternalRequest)
MAX_TOKENS = 2**31
_MAX_NEW = 16  # words that were not met before, of a text that is tokenized on an event loop all the same
# What a number is when it is not given, and between what it must be. The API's description is made of this too.
BOUNDS: dict[str, tuple[float, float, float]] = {
    "min_tokens": (0, 0, 2**31),
    "temperature": (1.0, 0.0, 2.0),
    "top_p": (1.0, 0.0, 1.0),
    "top_k": (0, -1, 2**31),  # -1 is vLLM's "off"
    "min_p": (0.0, 0.0, 1.0),
    "seed": (0, -(2**63), 2**63 - 1),
    "presence_penalty": (0.0, -2.0, 2.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "repetition_penalty": (1.0, 0.0, 10.0),
    "priority": (0, -(2**31), 2**31 - 1),
}


def parse(endpoint: Endpoint, raw: bytes, limits: RequestLimits, from_router: bool = False) -> ApiRequest:
    """Everything that can be checked without a model. Raises ApiError 400.

    ``from_router``: the sender has the fleet's key, so its internal object is honoured; from others it is refused.
    """
    if len(raw) > BULK_BYTES:
        refuse_bulk(raw, limits.max_prompts, limits.max_prompt_ids, limits.max_stop_token_ids)
    body = decode(raw)
    internal = _internal(body, from_router)
    _refuse(endpoint, body)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limits.max_choices:
        raise bad_request(f"n must be between 1 and {limits.max_choices}, got {_plain(n)}", "n")
    messages, prompts = (_messages(body, limits), ()) if endpoint == "chat" else ((), _prompts(body, limits))
    num_choices = n * max(1, len(prompts))
    if num_choices > limits.max_choices:
        raise bad_request(f"{num_choices} choices are too many, the limit is {limits.max_choices}", "n")
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise bad_request("stream_options is only allowed together with stream: true", "stream_options")
    max_tokens = _asked_tokens(body)
    sampling = _sampling(endpoint, body, limits)
    return ApiRequest(
        endpoint=endpoint,
        model=body.model,
        messages=messages,
        prompts=prompts,
        n=n,
        stream=stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        max_tokens=max_tokens,
        max_tokens_field="max_tokens" if body.max_completion_tokens is None else "max_completion_tokens",
        sampling=sampling,
        cache_salt=_salt(body.cache_salt or "", limits),
        user=user if isinstance(user := value_of(body.user), str) else "",
        priority=int(_number(body, "priority")),
        internal=internal,
    )


def tokenize(request: ApiRequest, tokenizer: Tokenizer, max_context: int, limits: RequestLimits) -> list[Sequence[int]]:
    """Token ids of each prompt. Slow for long texts: call it off the event loop when ``text_chars`` is large."""
    most = max_context * limits.max_chars_per_token
    chars = [len(p) for p in request.prompts if isinstance(p, str)] or [request.text_chars]
    if max(chars) > most:
        raise _too_long(f"a prompt of {max(chars)} characters cannot fit {max_context} tokens", request)
    if request.endpoint == "chat":
        return [tokenizer.chat([dict(m) for m in request.messages])]
    return [tokenizer.encode_compact(p) if isinstance(p, str) else p for p in request.prompts]


def tokenize_met(request: ApiRequest, tokenizer: Tokenizer) -> list[Sequence[int]] | None:
    """The same for texts of words that are known already, quickly enough for an event loop; None: it would not be."""
    if request.endpoint == "chat":
        return None
    found: list[Sequence[int]] = []
    for prompt in request.prompts:
        ids = tokenizer.encode_met(prompt, _MAX_NEW) if isinstance(prompt, str) else prompt
        if ids is None:
            return None
        found.append(ids)
    return found


def output_limits(
    request: ApiRequest, prompt_token_ids: Sequence[Sequence[int]], tokenizer: Tokenizer, max_context: int
) -> list[int]:
    """max_tokens for each prompt, or ApiError 400: nothing that cannot be computed gets past here."""
    param = "messages" if request.endpoint == "chat" else "prompt"
    for name, token_ids in (
        ("logit_bias", request.sampling.logit_bias),
        ("stop_token_ids", request.sampling.stop_token_ids),
    ):
        for token_id in token_ids:
            if token_id >= tokenizer.vocab_size:
                raise bad_request(f"{name} has {token_id}; token ids are 0 to {tokenizer.vocab_size - 1}", name)
    limits = []
    for i, ids in enumerate(prompt_token_ids):
        if not ids:
            raise bad_request("the prompt is empty: it has no tokens", param, "empty_prompt")
        from_client = bool(request.prompts) and not isinstance(request.prompts[i], str)
        if from_client and (min(ids) < 0 or max(ids) >= tokenizer.vocab_size):
            raise bad_request(f"token ids of a prompt must be in 0 to {tokenizer.vocab_size - 1}", param)
        limits.append(_max_tokens(request, len(ids), max_context))
    return limits


def resolve(
    request: ApiRequest,
    prompt_token_ids: Sequence[Sequence[int]],
    tokenizer: Tokenizer,
    max_context: int,
    request_id: str,
    eos_token_ids: tuple[int, ...],
) -> list[GenerateRequest]:
    """The sequences to generate, prompt-major: choice ``prompt * n + j``. Raises ApiError 400 before any work."""
    limits = output_limits(request, prompt_token_ids, tokenizer, max_context)
    sequences = []
    for i, (ids, max_tokens) in enumerate(zip(prompt_token_ids, limits, strict=True)):
        prompt = tuple(ids)
        for j in range(request.n):
            sampling = msgspec.structs.replace(request.sampling, max_tokens=max_tokens)
            if sampling.seed is not None and j > 0:
                sampling = msgspec.structs.replace(sampling, seed=sampling.seed + j)
            sequences.append(
                GenerateRequest(
                    request_id=f"{request_id}.{i * request.n + j}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    cache_salt=request.cache_salt,
                    priority=request.priority,
                    eos_token_ids=eos_token_ids,
                )
            )
    return sequences


def with_internal(request: ApiRequest, internal: InternalRequest) -> ApiRequest:
    """What the router decided replaces what the client wrote."""
    return msgspec.structs.replace(request, cache_salt=internal.cache_salt, priority=internal.priority)


def _max_tokens(request: ApiRequest, num_prompt_tokens: int, max_context: int) -> int:
    room = max_context - num_prompt_tokens
    asked = request.max_tokens
    if asked is None:
        asked = max(1, room) if request.endpoint == "chat" else max(1, min(16, room))
    if asked > room:
        message = (
            f"this model's maximum context length is {max_context} tokens, but {num_prompt_tokens} prompt tokens "
            f"plus {asked} to generate were asked for"
        )
        if room < 1 or request.max_tokens is None:
            raise _too_long(f"{message}; shorten the prompt", request)
        field = request.max_tokens_field
        raise bad_request(f"{message}; use at most {room} for {field}", field, "context_length_exceeded")
    if request.sampling.min_tokens > asked:
        raise bad_request(f"min_tokens {request.sampling.min_tokens} is more than max_tokens {asked}", "min_tokens")
    return asked


def _too_long(message: str, request: ApiRequest) -> ApiError:
    return bad_request(message, "messages" if request.endpoint == "chat" else "prompt", "context_length_exceeded")


def _internal(body: Body, from_router: bool) -> InternalRequest | None:
    """What is in it is nobody's business but a router's: others learn only that it is refused."""
    if bytes(body.kvbaton).strip() in (b"", b"null"):
        return None
    if not from_router:
        raise bad_request("kvbaton is not accepted from clients; leave it out", "kvbaton")
    try:
        return _INTERNAL_DECODER.decode(body.kvbaton)
    except UNREADABLE as error:
        raise bad_request(f"kvbaton: {error}", "kvbaton") from None


def _refuse(endpoint: Endpoint, body: Body) -> None:
    for name in COMPLETIONS_ONLY if endpoint == "chat" else CHAT_ONLY:
        if getattr(body, name) is not None:
            other = "completions" if endpoint == "chat" else "chat/completions"
            fix = f"leave it out, or ask /v1/{other}"
            raise bad_request(f"unrecognized field for this endpoint: {name}; {fix}", name, "unknown_parameter")
    if _values_of_checked(body) == _NONE_OF_CHECKED:
        return
    for name, harmless in UNSUPPORTED.items():
        value = value_of(getattr(body, name))
        if value is not None and value not in harmless and not (name == "best_of" and value == body.n):
            raise bad_request(f"{name} is not supported here; leave it out", name, "unsupported_parameter")
    if value_of(body.kv_transfer_params) is not None:
        raise bad_request("kv_transfer_params is not accepted from clients; leave it out", "kv_transfer_params")


def _messages(body: Body, limits: RequestLimits) -> tuple[dict[str, str], ...]:
    if not body.messages:
        raise bad_request("messages must be a list with at least one message", "messages")
    if len(body.messages) > limits.max_messages:
        raise bad_request(f"more than {limits.max_messages} messages", "messages")
    return tuple(_message(i, message) for i, message in enumerate(body.messages))


def _message(i: int, message: Message) -> dict[str, str]:
    where = f"messages[{i}]"
    if message.role not in ROLES:
        raise bad_request(f"unknown role {message.role[:40]!r}; use one of {', '.join(ROLES)}", f"{where}.role")
    for name in ("tool_calls", "function_call"):
        if value_of(getattr(message, name)):
            raise bad_request(
                "tool calls are not supported here; leave them out", f"{where}.{name}", "unsupported_parameter"
            )
    match message.content:
        case None:
            raise bad_request("content must be a string or a list of text parts", f"{where}.content")
        case str() as text:
            content = text
        case parts:
            content = "\n".join(_text_of(part, f"{where}.content[{i}]") for i, part in enumerate(parts))
    # "developer" is what newer OpenAI clients call the system message; chat templates know only "system".
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return plain if message.name is None else {**plain, "name": message.name}


def _text_of(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise bad_request(f"content parts of type {part.type[:40]!r} are not supported; only text is", f"{where}.type")
    if part.text is None:
        raise bad_request("a content part of type 'text' needs a string as text", f"{where}.text")
    return part.text


def _prompts(body: Body, limits: RequestLimits) -> tuple[Prompt, ...]:
    prompt = body.prompt
    if prompt is None:
        raise bad_request("prompt is missing", "prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if not prompt:
        raise bad_request("the prompt is empty", "prompt", "empty_prompt")
    kind = type(prompt[0])
    if len(set(map(type, prompt))) > 1:
        raise mixed_prompts()
    if kind is int:
        return (tuple(prompt),)  # type: ignore[arg-type]
    if len(prompt) > limits.max_prompts:
        raise too_many_prompts(len(prompt), limits.max_prompts)
    return tuple(p if isinstance(p, str) else tuple(p) for p in prompt)  # type: ignore[arg-type]


def _number(body: Body, name: str) -> float:
    return _bounded(name, getattr(body, name), *BOUNDS[name])


def _bounded(name: str, value: float | None, default: float, low: float, high: float) -> float:
    if value is None:
        return default
    if not low <= value <= high:
        raise bad_request(f"{name} must be between {_plain(low)} and {_plain(high)}, got {_plain(value)}", name)
    return value


def _plain(value: float) -> str:
    """A number as people write it: no exponent where an integer does, and no page of digits."""
    if isinstance(value, int):
        return str(value) if abs(value) < 10**40 else "a number of more than 40 digits"
    return str(int(value)) if float(value).is_integer() and abs(value) < 2**63 + 1 else repr(value)


def _salt(salt: str, limits: RequestLimits) -> str:
    if len(salt) > limits.max_salt_chars:
        raise bad_request(f"cache_salt must have at most {limits.max_salt_chars} characters", "cache_salt")
    return salt


def _asked_tokens(body: Body) -> int | None:
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise bad_request("max_tokens and max_completion_tokens differ; give one of them", "max_completion_tokens")
    name, value = ("max_tokens", both[0]) if both[1] is None else ("max_completion_tokens", both[1])
    if value is not None and value < 1:
        raise bad_request(f"{name} must be at least 1, got {_plain(value)}", name)
    if value is not None and value > MAX_TOKENS:  # more than any context: never to be counted with
        raise bad_request(f"{name} must be at most {MAX_TOKENS}, got {_plain(value)}", name)
    return value


def _sampling(endpoint: Endpoint, body: Body, limits: RequestLimits) -> SamplingParams:
    if _sampling_fields(body) == _NO_SAMPLING_FIELDS:
        return _USUAL_SAMPLING
    if body.top_p is not None and body.top_p <= 0:
        raise bad_request(f"top_p must be above 0, got {_plain(body.top_p)}", "top_p")
    if body.repetition_penalty is not None and body.repetition_penalty <= 0:
        raise bad_request(
            f"repetition_penalty must be above 0, got {_plain(body.repetition_penalty)}", "repetition_penalty"
        )
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > limits.max_stops:
        raise bad_request(f"at most {limits.max_stops} stop strings, got {len(stop)}", "stop")
    if any(not s or len(s) > limits.max_stop_chars for s in stop):
        raise bad_request(f"stop strings must have 1 to {limits.max_stop_chars} characters", "stop")
    stop_token_ids = tuple(body.stop_token_ids or ())
    if len(stop_token_ids) > limits.max_stop_token_ids or any(t < 0 or t >= 2**31 for t in stop_token_ids):
        raise bad_request(
            f"at most {limits.max_stop_token_ids} stop token ids, each a token id of the model", "stop_token_ids"
        )
    seed = body.seed
    if seed is not None:
        _number(body, "seed")
        seed &= 2**62 - 1  # room for the seeds of further choices
    return SamplingParams(
        min_tokens=int(_number(body, "min_tokens")),
        temperature=_number(body, "temperature"),
        top_p=_number(body, "top_p"),
        top_k=max(0, int(_number(body, "top_k"))),
        min_p=_number(body, "min_p"),
        seed=seed,
        presence_penalty=_number(body, "presence_penalty"),
        frequency_penalty=_number(body, "frequency_penalty"),
        repetition_penalty=_number(body, "repetition_penalty"),
        logit_bias=_logit_bias(body.logit_bias or {}, limits),
        logprobs=_logprobs(endpoint, body, limits),
        stop=stop,
        stop_token_ids=stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


def _logprobs(endpoint: Endpoint, body: Body, limits: RequestLimits) -> int | None:
    """How many alternatives besides the chosen token; None for no logprobs at all."""
    if endpoint == "completions":
        if body.logprobs is None or body.logprobs is False:
            return None
        if body.logprobs is True:
            raise bad_request("logprobs must be a number here", "logprobs")
        return int(_bounded("logprobs", body.logprobs, 0, 0, limits.max_logprobs))
    if body.logprobs is not None and not isinstance(body.logprobs, bool):
        raise bad_request("logprobs must be true or false here; top_logprobs takes the number", "logprobs")
    if not body.logprobs:
        if body.top_logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        return None
    return int(_bounded("top_logprobs", body.top_logprobs, 0, 0, limits.max_logprobs))


def _logit_bias(bias: dict[str, float], limits: RequestLimits) -> dict[int, float]:
    if len(bias) > limits.max_logit_bias:
        raise bad_request(f"logit_bias may have at most {limits.max_logit_bias} entries", "logit_bias")
    result = {}
    for key, value in bias.items():
        if not key.isascii() or not key.isdigit() or len(key) > 9:
            raise bad_request(f"the keys of logit_bias must be token ids, got {key[:20]!r}", "logit_bias")
        result[int(key)] = _bounded("logit_bias", value, 0.0, -100.0, 100.0)
    return result
