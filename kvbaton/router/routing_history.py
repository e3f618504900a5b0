"""Which worker probably holds which prefix, from the router's own routing history: for workers that send no events.

Approximate on purpose: a worker may have evicted what is listed here, and is never asked. What was sent to a worker
lies in generations, the youngest first: a prompt goes into the youngest whole, out of whichever had parts of it; when
that one is full another begins, and of too many blocks the oldest generations go. So blocks are neither moved nor
evicted one by one, which for long prompts cost a router more than hashing them. Invariants: a worker has at most
``max_blocks`` entries, fewer if its cache is smaller; no block is in two generations; of a chain a block is never in an
older generation than those behind it, so what goes of it goes from its end. Pure; knows nothing about requests or
workers beyond their names.
"""

from __future__ import annotations

from collections.abc import Sequence

GENERATIONS = 8  # of a full history: up to one of them is forgotten before it must be


class RoutingHistory:
    """Chained block hashes by worker. A chain is a list of hashes of which each one stands for its whole prefix."""

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._limits: dict[str, int] = {}
        self._held: dict[str, list[set[bytes]]] = {}

    def limit(self, worker: str, cache_tokens: int) -> None:
        """What the worker's cache holds at most; 0, or what is no size at all: unknown."""
        limit = min(self._max_blocks, max(0, cache_tokens) // self.block_tokens or self._max_blocks)
        if self._limits.get(worker) != limit:
            self._limits[worker] = limit
            self._bound(worker)

    def matched_blocks(self, worker: str, chain: Sequence[bytes]) -> int:
        """Blocks of the longest known prefix. A chain has no holes, so its end is found by bisection."""
        held = self._held.get(worker)
        if not held or not chain or not _is_in(held, chain[0]):
            return 0
        low, high = 0, len(chain) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if _is_in(held, chain[middle]):
                low = middle
            else:
                high = middle - 1
        return low + 1

    def record(self, worker: str, chain: Sequence[bytes]) -> None:
        """The worker now has all of ``chain``; of one that is longer than its cache, the head."""
        limit = self._limits.get(worker, self._max_blocks)
        chain = chain[:limit]
        if not chain:
            return
        held = self._held.setdefault(worker, [])
        known = chain[: self.matched_blocks(worker, chain)]
        if known:
            for generation in held:
                generation.difference_update(known)
            held[1:] = [each for each in held[1:] if each]  # what was in them is younger now
        if not held or (held[0] and len(held[0]) + len(chain) > limit // GENERATIONS):
            held.insert(0, set())
        held[0].update(chain)
        self._bound(worker)

    def forget(self, worker: str) -> None:
        self._held.pop(worker, None)
        self._limits.pop(worker, None)

    def num_blocks(self, worker: str) -> int:
        return sum(map(len, self._held.get(worker, ())))

    def _bound(self, worker: str) -> None:
        held, limit = self._held.get(worker, []), self._limits.get(worker, self._max_blocks)
        while self.num_blocks(worker) > limit:
            held.pop()


def _is_in(held: Sequence[set[bytes]], block_hash: bytes) -> bool:
    for generation in held:  # noqa: SIM110 (a generator costs as much as the lookups)
        if block_hash in generation:
            return True
    return False
