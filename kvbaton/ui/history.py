"""What the page shows of the last minutes: one frame each second, and the windows that rates and percentiles are over.

Fed with what ``GET /fleet`` answers and with totals of the router's metrics. Invariants: bounded by ``MOST_FRAMES``
and, within a frame, by the number of pools; a worker that restarted starts its rates over; no rate is negative. Time
is an argument. Knows nothing about HTTP or how things look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.observe.metric import SECONDS
from kvbaton.ui.decisions import Flow
from kvbaton.ui.spread import Spread, since, spread
from kvbaton.workers.protocol import WorkerStats

WINDOW_S = 60.0  # of percentiles, reasons and flows between pairs
RATIO_WINDOW_S = 300.0
RATE_WINDOW_S = 10.0  # of rates: short enough to see a change, long enough not to flicker
MOST_FRAMES = 301
MOST_LINKS = 64

LATENCIES = ("ttft", "tpot", "itl")
NO_STATS = WorkerStats()


class Totals(msgspec.Struct, frozen=True):
    """What only grows while the router lives, at one moment."""

    at_s: float
    num_requests: float
    num_failed: float  # outcome error
    prompt_tokens: float
    cached_tokens: float
    output_tokens: float
    reasons: dict[str, float]
    counts: tuple[list[int], list[int], list[int]]  # of LATENCIES, by bucket


class PoolLoad(msgspec.Struct, frozen=True):
    num_waiting: int
    num_running: int
    waiting_prompt_tokens: int
    used_share: float  # of the pool's blocks


class Frame(msgspec.Struct, frozen=True):
    number: int
    at_s: float
    inflight: int
    queued: int
    requests_per_s: float
    prompt_tokens_per_s: float  # computed ones; no cache had them
    output_tokens_per_s: float
    moved_bytes_per_s: float  # pulled by all workers, by their own count
    ratio: float | None  # computed prompt tokens for each output token; None: nothing was generated
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    pools: dict[str, PoolLoad]


class Moved(msgspec.Struct, frozen=True):
    """KV bytes of one worker since it started."""

    at_s: float
    incarnation: str
    sent_bytes: int
    received_bytes: int


class Link(msgspec.Struct, frozen=True):
    prefill: str
    decode: str
    bytes_per_s: float
    num_requests: int


class History:
    def __init__(self, gates_s: tuple[float | None, float | None, float | None]) -> None:
        self._gates_s = gates_s  # of LATENCIES
        self._totals: deque[Totals] = deque(maxlen=MOST_FRAMES)
        self._flows: deque[tuple[float, dict[tuple[str, str], Flow]]] = deque(maxlen=MOST_FRAMES)
        self._moved: dict[str, deque[Moved]] = {}
        self._number = 0
        self.frames: deque[Frame] = deque(maxlen=MOST_FRAMES)

    def look(self, fleet: Mapping[str, Any], totals: Totals, flows: dict[tuple[str, str], Flow]) -> Frame:
        """One more second. ``flows``: what moved since the last one."""
        self._totals.append(totals)
        self._flows.append((totals.at_s, flows))
        self._follow(fleet["members"], totals.at_s)
        before = self._before(RATE_WINDOW_S)
        elapsed_s = totals.at_s - before.at_s

        def rate(new: float, old: float) -> float:
            return max(0.0, new - old) / elapsed_s if elapsed_s > 0 else 0.0

        latest = self.latencies()
        computed = totals.prompt_tokens - totals.cached_tokens
        self._number += 1
        frame = Frame(
            self._number,
            totals.at_s,
            fleet["inflight"],
            fleet["queued"],
            rate(totals.num_requests, before.num_requests),
            rate(computed, before.prompt_tokens - before.cached_tokens),
            rate(totals.output_tokens, before.output_tokens),
            sum(self.moved(member["name"])[1] for member in fleet["members"]),
            self.ratio(),
            latest["ttft"],
            latest["tpot"],
            latest["itl"],
            _pools(fleet["members"]),
        )
        self.frames.append(frame)
        return frame

    def after(self, number: int) -> list[Frame]:
        """Frames with a higher number than that."""
        if number > self._number:  # of another life of the router
            number = 0
        return list(self.frames)[max(0, len(self.frames) - (self._number - number)) :]

    @property
    def number(self) -> int:
        return self._number

    # -- windows ------------------------------------------------------------------------------------------------

    def latencies(self) -> dict[str, Spread | None]:
        now, before = self._totals[-1], self._before(WINDOW_S)
        return {
            name: spread(SECONDS, since(now.counts[i], before.counts[i]), self._gates_s[i])
            for i, name in enumerate(LATENCIES)
        }

    def ratio(self) -> float | None:
        now, before = self._totals[-1], self._before(RATIO_WINDOW_S)
        generated = now.output_tokens - before.output_tokens
        prompt, cached = now.prompt_tokens - before.prompt_tokens, now.cached_tokens - before.cached_tokens
        return (prompt - cached) / generated if generated > 0 else None

    def reasons(self) -> dict[str, float]:
        """Decisions by reason within the window."""
        now, before = self._totals[-1], self._before(WINDOW_S)
        return {name: count - before.reasons.get(name, 0.0) for name, count in now.reasons.items()}

    def failed(self) -> float:
        return self._totals[-1].num_failed - self._before(WINDOW_S).num_failed

    def links(self) -> list[Link]:
        """Pairs of workers between which KV moved within the window, the busiest first."""
        now_s, sums = self._totals[-1].at_s, dict[tuple[str, str], Flow]()
        for at_s, flows in self._flows:
            if now_s - at_s < WINDOW_S:
                for link, flow in flows.items():
                    known = sums.setdefault(link, Flow())
                    known.num_bytes += flow.num_bytes
                    known.num_requests += flow.num_requests
        span_s = min(WINDOW_S, max(1.0, now_s - self._totals[0].at_s))
        links = [Link(p, d, flow.num_bytes / span_s, flow.num_requests) for (p, d), flow in sums.items()]
        return sorted(links, key=lambda link: (-link.bytes_per_s, link.prefill, link.decode))[:MOST_LINKS]

    def moved(self, name: str) -> tuple[float, float]:
        """Bytes per second sent and received by a worker."""
        seen = self._moved.get(name)
        if not seen or seen[-1].at_s <= seen[0].at_s:
            return 0.0, 0.0
        first, last = seen[0], seen[-1]
        elapsed_s = last.at_s - first.at_s
        return (last.sent_bytes - first.sent_bytes) / elapsed_s, (
            last.received_bytes - first.received_bytes
        ) / elapsed_s

    def _before(self, window_s: float) -> Totals:
        """The oldest look within the window."""
        now_s = self._totals[-1].at_s
        return next(totals for totals in self._totals if now_s - totals.at_s <= window_s)

    def _follow(self, members: list[dict[str, Any]], now_s: float) -> None:
        for name in set(self._moved) - {member["name"] for member in members}:
            del self._moved[name]
        for member in members:
            stats = member["stats"]
            if stats is None:
                continue
            new = Moved(now_s, member["incarnation"], stats.transfer_bytes_sent, stats.transfer_bytes_received)
            seen = self._moved.setdefault(member["name"], deque())
            if seen and seen[-1].incarnation != new.incarnation:
                seen.clear()
            seen.append(new)
            while now_s - seen[0].at_s > RATE_WINDOW_S:
                seen.popleft()


def _pools(members: list[dict[str, Any]]) -> dict[str, PoolLoad]:
    pools: dict[str, PoolLoad] = {}
    for role in ("prefill", "decode", "both"):
        stats = [member["stats"] or NO_STATS for member in members if member["role"] == role]
        if stats:
            blocks = sum(each.num_blocks for each in stats)
            pools[role] = PoolLoad(
                sum(each.num_waiting for each in stats),
                sum(each.num_running for each in stats),
                sum(each.waiting_prompt_tokens for each in stats),
                sum(each.num_blocks_used for each in stats) / blocks if blocks else 0.0,
            )
    return pools
