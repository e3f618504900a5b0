"""Wire structs and ids shared by every layer.

Knows nothing about torch, sockets, HTTP or time. Everything that crosses a process or a layer boundary is a frozen
``msgspec.Struct`` here, so that a malformed message is refused by the decoder and not by the code behind it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["prefill", "decode", "both"]
FinishReason = Literal["stop", "length", "abort", "error"]

# What decoding the bytes of others may raise. RecursionError: nested too deep, even where nobody asked for that part.
UNREADABLE = (msgspec.MsgspecError, RecursionError, UnicodeDecodeError)

PROTOCOL_VERSION = 2  # of the hand-off; 1 knew no proof of who the peer is, and is refused


class KvbatonError(Exception):
    """Base of every error raised on purpose. ``field`` names the offending input; ``fix`` says what to do."""

    def __init__(self, message: str, *, field: str | None = None, fix: str | None = None) -> None:
        super().__init__(message if fix is None else f"{message}; {fix}")
        self.message = message
        self.field = field
        self.fix = fix


class LocalError(KvbatonError):
    """Our own side is at fault: bad configuration, bad input, a limit of ours."""


class RemoteError(KvbatonError):
    """The peer is at fault: it sent nonsense, died, refused, or let a deadline pass."""


class CapacityError(LocalError):
    """No room now; the caller may retry later or elsewhere (HTTP 503 or 429)."""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to sample, with the meaning OpenAI's and vLLM's users expect."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 means greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 means off
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None  # None: none; 0: the chosen token only; k: the k best besides
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities (natural log, from the raw logits) at one output position."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # best first


class TokenOutput(msgspec.Struct, frozen=True):
    """One sampled token of one sequence."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None  # set on the last token
    stop_token: bool = False  # the token is EOS or a stop token id: not part of the text


class GenerateRequest(msgspec.Struct, frozen=True):
    """One sequence to generate (``n`` > 1 is expanded by the API layer into n requests)."""

    request_id: str  # fresh, made by us, never the client's
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str = ""  # separates prefix caches of tenants
    priority: int = 0  # lower runs first
    eos_token_ids: tuple[int, ...] = ()
    # So many tokens at the end of the prompt are output that was sampled before, on a worker that failed: the sampler
    # goes on behind them. ``sampling`` says what is still to come, as if this request began here.
    num_resumed_tokens: int = 0
    traceparent: str = ""  # whose child this work is, in W3C's form; empty: nobody records it


class Fingerprint(msgspec.Struct, frozen=True):
    """What must agree before KV may move. Block size and order may differ (kv/reshard converts)."""

    protocol_version: int
    model_revision: str  # hash of weight index and config content, not a name
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_dtype: str
    rope: str  # canonical text of the rope parameters
    tp_size: int = 1
