"""From sampled tokens to OpenAI's answers: text without stop strings, logprobs, usage, whole answers, SSE events.

Invariants: a stream's text concatenated is the whole answer's text; no part of a stop string is ever sent (unless asked
for); every sampled token, the end token too, counts in ``completion_tokens`` and has its logprobs entry.
Knows nothing about HTTP or where tokens come from.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.engine.tokenizer import Detokenizer, StopChecker, Tokenizer
from kvbaton.types import FinishReason, SamplingParams, TokenLogprobs, TokenOutput
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.openai_request import Endpoint

_ENCODER = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
ERROR_MARK = b'data: {"error":'  # begins an error event; cannot occur inside a JSON string
REPORT_PREFIX = b": kvbaton "  # an SSE comment; clients ignore it, and the router takes it out


@dataclass(frozen=True)
class Delta:
    """What one sampled token adds to the answer. ``text`` may be empty while a character or a stop string is open."""

    index: int
    text: str
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


class Choice:
    """The text of one choice as it grows."""

    def __init__(self, index: int, sampling: SamplingParams, tokenizer: Tokenizer) -> None:
        self.index = index
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._min_tokens = sampling.min_tokens
        self._include_stop = sampling.include_stop_str_in_output
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopChecker(sampling.stop, include=sampling.include_stop_str_in_output)

    def push(self, output: TokenOutput) -> Delta:
        """Once ``finish_reason`` is set, by the model or by a stop string, no token may follow."""
        assert self.finish_reason is None, "a token after the end"
        self.num_tokens += 1
        last = output.finish_reason is not None
        # A special token has no text, so an end token shows in neither case.
        text = "" if output.stop_token and not self._include_stop else self._detokenizer.push(output.token_id)
        if last:
            text += self._detokenizer.flush()
        text, stopped = self._stops.push(text, may_stop=self.num_tokens >= self._min_tokens)
        if last and not stopped:
            text += self._stops.flush()
        self.finish_reason = "stop" if stopped else output.finish_reason
        if self.finish_reason in ("abort", "error"):
            raise ApiError(500, "generation ended with an error", type="server_error", code="internal_error")
        return Delta(self.index, text, output.logprobs, self.finish_reason)


@dataclass
class Usage:
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_output_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


class LogprobsShape:
    """Logprobs in the two shapes of OpenAI's API. Keeps the text offset that completions report."""

    def __init__(self, endpoint: Endpoint, tokenizer: Tokenizer) -> None:
        self._chat = endpoint == "chat"
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}  # by choice

    def of(self, index: int, entries: list[TokenLogprobs]) -> dict[str, Any]:
        return self._chat_shape(entries) if self._chat else self._completions_shape(index, entries)

    def skip(self, index: int, token_ids: Iterable[int]) -> None:
        """These were reported by somebody else: only the offset moves on."""
        self._offsets[index] = self._offsets.get(index, 0) + sum(len(self._text(token_id)[0]) for token_id in token_ids)

    def _text(self, token_id: int) -> tuple[str, bytes]:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode("utf-8"), raw
        except UnicodeDecodeError:  # part of a character: OpenAI's notation keeps such tokens apart
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw

    def _chat_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self._text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    def _chat_shape(self, entries: list[TokenLogprobs]) -> dict[str, Any]:
        content = []
        for entry in entries:
            item = self._chat_entry(entry.token_id, entry.logprob)
            item["top_logprobs"] = [self._chat_entry(token_id, logprob) for token_id, logprob in entry.top]
            content.append(item)
        return {"content": content, "refusal": None}

    def _completions_shape(self, index: int, entries: list[TokenLogprobs]) -> dict[str, Any]:
        offset = self._offsets.get(index, 0)
        tokens, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            text, _ = self._text(entry.token_id)
            tokens.append(text)
            logprobs.append(_finite(entry.logprob))
            top = {self._text(token_id)[0]: _finite(logprob) for token_id, logprob in entry.top}
            top.setdefault(text, _finite(entry.logprob))
            tops.append(top)
            offsets.append(offset)
            offset += len(text)
        self._offsets[index] = offset
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI uses this number for "never"."""
    return max(logprob, -9999.0)


@dataclass
class Answer:
    """One request's answer, written whole (``add`` then ``whole``) or as SSE events (``events``, ``last_events``)."""

    endpoint: Endpoint
    response_id: str
    model: str
    created_s: int
    tokenizer: Tokenizer
    include_usage: bool = False
    usage: Usage = field(default_factory=Usage)

    def __post_init__(self) -> None:
        chat = self.endpoint == "chat"
        self._logprobs = LogprobsShape(self.endpoint, self.tokenizer)
        self._texts: dict[int, list[str]] = {}
        self._entries: dict[int, list[TokenLogprobs]] = {}
        self._finish: dict[int, FinishReason | None] = {}
        self._open_roles: set[int] = set()
        self._head = {
            "id": self.response_id,
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created_s,
            "model": self.model,
        }
        self._chunk_head = {**self._head, "object": "chat.completion.chunk"} if chat else self._head

    def add(self, delta: Delta) -> None:
        self._texts.setdefault(delta.index, []).append(delta.text)
        entries = self._entries.setdefault(delta.index, [])
        if delta.logprobs is not None:
            entries.append(delta.logprobs)
        self._finish[delta.index] = delta.finish_reason

    def whole(self) -> bytes:
        choices = []
        for index in sorted(self._texts):
            text, entries = "".join(self._texts[index]), self._entries[index]
            logprobs = self._logprobs.of(index, entries) if entries else None
            choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": self._finish[index]}
            if self.endpoint == "chat":
                choice["message"] = {"role": "assistant", "content": text, "refusal": None}
            else:
                choice["text"] = text
            choices.append(choice)
        return _ENCODER.encode({**self._head, "choices": choices, "usage": self.usage.to_json()})

    def events(self, delta: Delta) -> bytes:
        """SSE events for one token; empty when there is nothing to say yet."""
        return self.opening(delta.index) + self.content(delta)

    def opening(self, index: int) -> bytes:
        """The event that names the role, before the first of a choice in a chat; else nothing."""
        if self.endpoint != "chat" or index in self._open_roles:
            return b""
        self._open_roles.add(index)
        return self._event({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None})

    def resume(self, index: int, opened: bool, token_ids: Iterable[int]) -> None:
        """Go on behind ``token_ids`` of this choice, which were sent by another worker."""
        if opened:
            self._open_roles.add(index)
        self._logprobs.skip(index, token_ids)

    def content(self, delta: Delta) -> bytes:
        """The event of one token, or nothing."""
        index, chat = delta.index, self.endpoint == "chat"
        if not delta.text and delta.logprobs is None and delta.finish_reason is None:
            return b""
        choice: dict[str, Any] = {"index": index}
        if chat:
            choice["delta"] = {"content": delta.text} if delta.text else {}
        else:
            choice["text"] = delta.text
        choice["logprobs"] = self._logprobs.of(index, [delta.logprobs]) if delta.logprobs is not None else None
        choice["finish_reason"] = delta.finish_reason
        return self._event(choice)

    def last_events(self) -> bytes:
        """The usage chunk when it was asked for. The caller ends the stream with ``DONE``."""
        if not self.include_usage:
            return b""
        return _sse({**self._chunk_head, "choices": [], "usage": self.usage.to_json()})

    def _event(self, choice: dict[str, Any]) -> bytes:
        choice.setdefault("finish_reason", None)
        chunk: dict[str, Any] = {**self._chunk_head, "choices": [choice]}
        if self.include_usage:
            chunk["usage"] = None
        return _sse(chunk)


def _sse(payload: dict[str, Any]) -> bytes:
    return b"data: " + _ENCODER.encode(payload) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """What a stream that has begun ends with when something breaks."""
    return b"data: " + error.body() + b"\n\n"
