"""What a vLLM server answers, read with suspicion: bytes to events, events to tokens.

Invariants: no event is held beyond ``MAX_EVENT_BYTES``, and splitting looks at each byte once; no more tokens than were
asked for are passed on, none outside the vocabulary, and none after the last; an answer that was broken off is never a
finished one. What breaks this is a ``LocalError``, as the server is the worker's own. Knows nothing about sockets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvbaton.types import UNREADABLE, FinishReason, GenerateRequest, LocalError, TokenLogprobs, TokenOutput

MAX_EVENT_BYTES = 8 * 1024 * 1024
_TOKEN_PREFIX = "token_id:"
_REASONS: dict[str, FinishReason] = {"length": "length", "stop": "stop"}


class Details(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: Details | None = None

    @property
    def num_cached(self) -> int:
        found = self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details is not None else None
        return max(0, min(found or 0, self.prompt_tokens))


class Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    tokens: list[str] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class Chunk(msgspec.Struct):
    """A streamed part, or a whole answer. ``kv_transfer_params`` is kept as it came: its fields are the engines'."""

    choices: list[Choice] = []
    usage: Usage | None = None
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")
    error: dict[str, Any] | None = None


CHUNK = msgspec.json.Decoder(Chunk)


class EventSplitter:
    """The data of server-sent events, each of which is one line here, out of parts cut anywhere."""

    def __init__(self, max_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()

    def push(self, part: bytes) -> Iterator[bytes]:
        searched = len(self._held)  # there is no line's end before
        self._held += part
        begin = 0
        while (end := self._held.find(b"\n", searched)) >= 0:
            line = bytes(self._held[begin:end]).strip()
            begin = searched = end + 1
            if line.startswith(b"data:") and (data := line[5:].strip()):
                yield data
        del self._held[:begin]
        if len(self._held) > self._max_bytes:
            raise LocalError(f"the server sent an event of more than {self._max_bytes} bytes")


class ServerError(LocalError):
    """The server says itself that it could not finish this request."""


class TokenReader:
    """The tokens of one answer.

    The finish reason belongs to the last token, but a server may send it in a part of its own. So a token that may be
    the last (it is an end token, or as many as were asked for) is held back until what follows is known; holding back
    every token would make each of them late by a step.
    """

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        sampling = request.sampling
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.eos_token_ids)}
        self._max_tokens = sampling.max_tokens
        self._vocab_size = vocab_size
        self._num_tokens = 0
        self._held: TokenOutput | None = None
        self.finished = False

    def push(self, choice: Choice) -> list[TokenOutput]:
        ids = choice.token_ids or []
        self._check(ids, choice.finish_reason)
        outputs = [] if self._held is None else [self._held]
        self._held = None
        for index, token_id in enumerate(ids):
            logprobs = None if choice.logprobs is None else _logprobs(choice.logprobs, index, token_id)
            outputs.append(TokenOutput(token_id, logprobs))
        self._num_tokens += len(ids)
        if choice.finish_reason is not None:
            if not outputs:
                raise LocalError(f"the server ended with {choice.finish_reason} behind a token that cannot be the last")
            reason, last = _REASONS[choice.finish_reason], outputs[-1]
            # Told with its token, "stop" means that one, be it an end token that only the server knows.
            stop_token = reason == "stop" and (bool(ids) or last.token_id in self._ends)
            outputs[-1] = TokenOutput(last.token_id, last.logprobs, reason, stop_token)
            self.finished = True
        elif outputs and (outputs[-1].token_id in self._ends or self._num_tokens >= self._max_tokens):
            self._held = outputs.pop()
        return outputs

    def close(self) -> None:
        """The stream has ended as it should."""
        if not self.finished:
            raise LocalError("the server ended its answer without a finish reason")

    def _check(self, ids: list[int], reason: str | None) -> None:
        if reason is not None and reason not in _REASONS:
            raise ServerError(f"the server broke the answer off: finish reason {reason[:40]!r}")
        if self.finished and (ids or reason is not None):
            raise LocalError("the server goes on after the last token")
        if self._num_tokens + len(ids) > self._max_tokens:
            raise LocalError(f"the server sends more than the {self._max_tokens} tokens that were asked for")
        for token_id in ids:
            if not 0 <= token_id < self._vocab_size:
                raise LocalError(f"the server sends token {token_id}; the vocabulary has {self._vocab_size}")


def _logprobs(found: Logprobs, index: int, token_id: int) -> TokenLogprobs | None:
    if index >= len(found.token_logprobs) or (value := found.token_logprobs[index]) is None:
        return None
    if not found.top_logprobs:
        return TokenLogprobs(token_id, value)
    if index >= len(found.top_logprobs):
        raise LocalError(
            f"the server sends top_logprobs for {len(found.top_logprobs)} tokens and more tokens than that"
        )
    top = found.top_logprobs[index] or {}
    best = sorted(((_token_id(name), logprob) for name, logprob in top.items()), key=lambda pair: -pair[1])
    return TokenLogprobs(token_id, value, tuple(best))


def _token_id(name: str) -> int:
    digits = name.removeprefix(_TOKEN_PREFIX)
    if digits == name or not digits.isascii() or not digits.isdigit() or len(digits) > 9:
        raise LocalError(f"the server names a token {name[:40]!r} in top_logprobs, not {_TOKEN_PREFIX}N")
    return int(digits)


def status_of(error: dict[str, Any]) -> int:
    """Of an error inside a stream; its ``code`` may be a status or a word."""
    code = error.get("code")
    match code:
        case bool():
            return 500
        case int() if 400 <= code <= 599:
            return code
        case str() if len(code) == 3 and code.isascii() and code.isdigit():
            return int(code)
        case "BadRequestError" | "invalid_request_error":
            return 400
        case _:
            return 500


def message_of(raw: bytes) -> str:
    try:
        return str(msgspec.json.decode(raw)["error"]["message"])
    except (*UNREADABLE, KeyError, TypeError):
        return raw[:200].decode(errors="replace")
