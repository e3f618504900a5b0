"""What ``GET /ui/state`` answers: the fleet as it is, windows over the last minutes, frames, decisions.

Invariants: bounded whatever the size of the fleet (``MOST_WORKERS`` and the bounds of ``history`` and ``decisions``);
beside ``/fleet`` and ``/metrics`` it tells only the rows of ``decisions``. Documented field by field in docs/ui.md,
which a test compares. Knows nothing about HTTP.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.observe.ratio import Band, Place
from kvbaton.router.policy import REASONS
from kvbaton.ui.decisions import Page
from kvbaton.ui.history import NO_STATS, WINDOW_S, Frame, History, Link
from kvbaton.ui.spread import Spread

MOST_WORKERS = 256
VERSION = 1
_REFUSED = "refused before a decision: bad request, too many at once, or no worker"


class Aims(msgspec.Struct, frozen=True):
    """What latencies and traffic are held against."""

    ttft_s: float
    tpot_s: float
    band: Band | None = None


class Blocks(msgspec.Struct, frozen=True):
    total: int
    used: int  # of a sequence or a reader
    pinned: int  # of these, for a reader elsewhere
    free: int  # can be had at once; those of cached prefixes too
    cached: int  # with the content of some prefix, used or free


class Worker(msgspec.Struct, frozen=True):
    name: str
    role: str
    state: str
    reason: str
    num_waiting: int
    num_running: int
    waiting_prompt_tokens: int
    inflight: int  # of this router
    num_failures: int
    num_leases: int
    blocks: Blocks
    sent_bytes_per_s: float
    received_bytes_per_s: float


class Pool(msgspec.Struct, frozen=True):
    role: str
    num_workers: int
    num_up: int
    num_waiting: int
    num_running: int
    waiting_prompt_tokens: int
    blocks: Blocks
    sent_bytes_per_s: float
    received_bytes_per_s: float


class ReasonCount(msgspec.Struct, frozen=True):
    reason: str
    meaning: str
    num: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but what depends on the reader's cursors."""

    version: int = VERSION
    now_s: float  # the router's clock; only differences mean anything
    state: str
    model: str
    inflight: int
    queued: int
    disagg_percent: float
    charts: bool  # whether the charting library is installed
    window_s: float = WINDOW_S
    aims: Aims
    latency: dict[str, Spread | None]
    num_failed: int  # requests that ended with an error, within the window
    ratio: float | None
    place: Place  # of the ratio in the planned band; unknown without one, or without traffic
    pools: list[Pool]
    workers: list[Worker]
    num_workers: int  # ``workers`` has the first ``MOST_WORKERS`` of them
    links: list[Link]
    reasons: list[ReasonCount]


class State(msgspec.Struct, frozen=True):
    head: msgspec.Raw
    frames: list[Frame]
    decisions: Page


def head(fleet: Mapping[str, Any], history: History, aims: Aims, now_s: float, charts: bool) -> Head:
    workers = [_worker(member, history) for member in fleet["members"]]
    ratio = history.ratio()
    return Head(
        now_s=now_s,
        state=fleet["state"],
        model=fleet["model"],
        inflight=fleet["inflight"],
        queued=fleet["queued"],
        disagg_percent=fleet["disagg_percent"],
        charts=charts,
        aims=aims,
        latency=history.latencies(),
        num_failed=round(history.failed()),
        ratio=ratio,
        place=aims.band.place(ratio) if aims.band is not None else "unknown",
        pools=[
            _pool(role, mine)
            for role in ("prefill", "decode", "both")
            if (mine := [worker for worker in workers if worker.role == role])
        ],
        workers=workers[:MOST_WORKERS],
        num_workers=len(workers),
        links=history.links(),
        reasons=[
            ReasonCount(reason, dict(REASONS).get(reason, _REFUSED), round(count))  # type: ignore[call-overload]
            for reason, count in sorted(history.reasons().items(), key=lambda item: -item[1])
        ],
    )


def _worker(member: Mapping[str, Any], history: History) -> Worker:
    stats = member["stats"] or NO_STATS
    sent, received = history.moved(member["name"])
    blocks = Blocks(
        stats.num_blocks, stats.num_blocks_used, stats.num_blocks_pinned, stats.num_blocks_free, stats.num_blocks_cached
    )
    return Worker(
        member["name"],
        member["role"],
        member["state"],
        member["reason"],
        stats.num_waiting,
        stats.num_running,
        stats.waiting_prompt_tokens,
        member["inflight"],
        member["failures"],
        stats.num_leases,
        blocks,
        sent,
        received,
    )


def _pool(role: str, workers: list[Worker]) -> Pool:
    def total(name: str) -> Any:
        return sum(getattr(worker, name) for worker in workers)

    blocks = Blocks(**{name: sum(getattr(w.blocks, name) for w in workers) for name in Blocks.__struct_fields__})
    return Pool(
        role,
        len(workers),
        sum(worker.state == "up" for worker in workers),
        total("num_waiting"),
        total("num_running"),
        total("waiting_prompt_tokens"),
        blocks,
        total("sent_bytes_per_s"),
        total("received_bytes_per_s"),
    )
