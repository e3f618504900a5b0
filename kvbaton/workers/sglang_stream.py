"""What an SGLang server answers to ``/generate``, read with suspicion: its parts as tokens.

A part carries all tokens so far or only the new ones, as the server was started; which, follows from the count that
comes with it. Invariants are those of ``vllm_stream.TokenReader``, which the parts are handed to. Pure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.types import GenerateRequest, LocalError, TokenOutput
from kvbaton.workers.vllm_stream import Choice, Logprobs, TokenReader


class Ending(msgspec.Struct):
    type: str = ""
    matched: int | str | list[int] | None = None
    message: str = ""
    status_code: int | None = None


class Meta(msgspec.Struct):
    finish_reason: Ending | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None
    output_top_logprobs: list[list[tuple[float, int, str | None]] | None] | None = None


class Part(msgspec.Struct):
    output_ids: list[int] = []
    meta_info: Meta = msgspec.field(default_factory=Meta)
    error: dict[str, Any] | None = None


PART = msgspec.json.Decoder(Part)


class PartReader:
    """The tokens of one answer."""

    def __init__(self, request: GenerateRequest, vocab_size: int) -> None:
        self._tokens = TokenReader(request, vocab_size)
        self._num_seen = 0
        self.num_cached = 0

    def push(self, part: Part) -> list[TokenOutput]:
        meta = part.meta_info
        self.num_cached = max(0, min(meta.cached_tokens, meta.prompt_tokens))
        new = self._new(part)
        reason = meta.finish_reason.type if meta.finish_reason is not None else None
        matched = meta.finish_reason.matched if meta.finish_reason is not None else None
        logprobs = _logprobs(meta, len(new)) if new else None
        if reason == "stop" and isinstance(matched, int) and new[-1:] != [matched]:
            # The end token was cut off; without it the last token that is meant would be taken for it.
            return [*self._tokens.push(Choice(new, None, logprobs)), *self._tokens.push(Choice([matched], reason))]
        return self._tokens.push(Choice(new, reason, logprobs))

    def close(self) -> None:
        self._tokens.close()

    def _new(self, part: Part) -> list[int]:
        ids, total = part.output_ids, part.meta_info.completion_tokens
        if total < self._num_seen:
            raise LocalError(f"the server counts {total} tokens after {self._num_seen}")
        if len(ids) == total:
            new = ids[self._num_seen :]
        elif self._num_seen + len(ids) == total:
            new = ids
        else:
            raise LocalError(f"the server counts {total} tokens and sends {len(ids)} behind {self._num_seen}")
        self._num_seen = total
        return new


def _logprobs(meta: Meta, num_new: int) -> Logprobs | None:
    """Of the new tokens: the last ones, whether earlier ones are there or not."""
    if meta.output_token_logprobs is None:
        return None
    chosen = meta.output_token_logprobs[-num_new:]
    top = None
    if meta.output_top_logprobs:
        top = [_ranked(one) for one in meta.output_top_logprobs[-num_new:]]
    return Logprobs([value for value, _, _ in chosen], [f"token_id:{token}" for _, token, _ in chosen], top)


def _ranked(entries: list[tuple[float, int, str | None]] | None) -> dict[str, float] | None:
    return None if entries is None else {f"token_id:{token}": value for value, token, _ in entries}
