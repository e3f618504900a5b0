"""What the engine tells the owner of a request, and its counters.

Plain values; knows nothing about threads, sockets or text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.types import KvbatonError, TokenOutput


@dataclass(frozen=True)
class Scheduled:
    """The request is in a batch for the first time; ``block_ids`` cover its whole prompt."""

    block_ids: tuple[int, ...]
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    queue_s: float  # time from arrival at the engine


@dataclass(frozen=True)
class Progress:
    """KV of tokens [0, tokens_ready) is in place for layers [0, layers_ready).

    In the layers above, what an earlier event promised still holds.
    """

    tokens_ready: int
    layers_ready: int


@dataclass(frozen=True)
class Token:
    output: TokenOutput


@dataclass(frozen=True)
class Failed:
    error: KvbatonError


Event = Scheduled | Progress | Token | Failed
Sink = Callable[[Event], None]


@dataclass(frozen=True)
class Reservation:
    """Blocks on the decode side for a prompt whose KV is to arrive; ``num_cached_tokens`` of it are there already."""

    block_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True)
class EngineStats:
    num_waiting: int
    num_running: int
    waiting_prompt_tokens: int
    num_active: int  # every request the engine knows, held and receiving ones too
    num_blocks: int
    num_blocks_used: int
    num_blocks_free: int  # free or evictable
    num_blocks_cached: int
    num_blocks_pinned: int
    num_leases: int
    num_steps: int
    num_prompt_tokens: int  # prompt tokens computed here
    num_cached_tokens: int  # prompt tokens not computed because the prefix cache had them
    num_output_tokens: int
    num_preemptions: int
    num_lease_expiries: int
    num_failed_steps: int
    prefill_busy_s: float
    decode_busy_s: float
    num_receiving: int  # blocks reserved, KV still to come from a peer
    num_held: int  # computed here, not yet read by a peer
    num_reservations_refused: int  # no room for KV that a peer would have computed
