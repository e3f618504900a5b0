"""Workers that share the cores of one machine with each other, the router and the clients.

    a core is free     a step takes what it takes alone: router and clients run on the free core
    every core busy    it takes (1 + slowdown) of that, or (1 + prefill_slowdown) beside a worker that computes prompts,
                       and the work of router and clients for the tokens of all busy workers comes out of their cores in
                       equal shares; a request waits longer for the router
    a worker is busy   a request waits longer until the worker, which computes on its core, has read it

Invariant: any arrangement of workers gets the same constants; what differs is who is busy when. Constants are measured
(``kvbaton profile --fleet``). Knows nothing about schedulers or requests.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

MOST_SHARE = 0.9  # of a core that others may take; above it the form says nothing


class SharedCores(msgspec.Struct, frozen=True, kw_only=True):
    num_cores: int
    slowdown: float = 0.0  # relative, of steps while every core has a busy worker (memory, caches)
    prefill_slowdown: float = 0.0  # the same while one of the others computes a prompt
    token_s: float = 0.0  # of CPU that router and client spend on each output token
    worker_wait_s: float = 0.0  # what a request waits longer for a worker that computes than for an idle one
    full_wait_s: float = 0.0  # and on top for the router, while every core is busy


class SharedMachine:
    """Who is busy, and with how many tokens a second."""

    def __init__(self, cores: SharedCores) -> None:
        self._cores = cores
        self._tokens_per_s: dict[Hashable, float] = {}  # of busy workers
        self._prefilling: set[Hashable] = set()  # those of them whose step holds a prompt

    @property
    def full(self) -> bool:
        return len(self._tokens_per_s) >= self._cores.num_cores

    @property
    def router_wait_s(self) -> float:
        return self._cores.full_wait_s if self.full else 0.0

    def worker_wait_s(self, worker: Hashable) -> float:
        return self._cores.worker_wait_s if worker in self._tokens_per_s else 0.0

    def step_s(self, worker: Hashable, alone_s: float, num_outputs: int, prefill: bool = False) -> float:
        """Of the step the worker begins now: ``num_outputs`` rows are tokens for clients; ``prefill``: has a prompt."""
        cores = self._cores
        self._prefilling.discard(worker)
        beside_prefill = bool(self._prefilling)
        if prefill:
            self._prefilling.add(worker)
        self._tokens_per_s[worker] = num_outputs / alone_s if alone_s > 0 else 0.0
        num_busy = len(self._tokens_per_s)
        if num_busy < cores.num_cores:
            return alone_s
        taken = sum(self._tokens_per_s.values()) * cores.token_s / num_busy
        crowd = num_busy / cores.num_cores
        # Tokens come slower by as much as the steps do, so the share is of the time that results.
        slowed_s = alone_s * crowd * (1.0 + (cores.prefill_slowdown if beside_prefill else cores.slowdown))
        return slowed_s + min(taken * alone_s, MOST_SHARE * slowed_s / (1.0 - MOST_SHARE))

    def idle(self, worker: Hashable) -> None:
        self._tokens_per_s.pop(worker, None)
        self._prefilling.discard(worker)
