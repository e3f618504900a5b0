"""Which worker probably holds which prefix, from the router's own routing history: for workers that send no events.

Approximate on purpose: a worker may have evicted what is listed here, and is never asked. Two generations for each
worker: when the young one would pass half of the bound it becomes the old one, and the old one goes; what is still met
is in the young one. So nothing is moved or evicted block by block, which for long prompts cost a router more than
hashing them. Invariants: a worker has at most ``max_blocks`` entries, fewer if its cache is smaller; with a block its
whole prefix is in the same generation. Pure; knows nothing about requests or workers beyond their names.
"""

from __future__ import annotations

from collections.abc import Sequence


class RoutingHistory:
    """Chained block hashes by worker. A chain is a list of hashes of which each one stands for its whole prefix."""

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._limits: dict[str, int] = {}
        self._held: dict[str, tuple[set[bytes], set[bytes]]] = {}  # young, old

    def limit(self, worker: str, cache_tokens: int) -> None:
        """What the worker's cache holds at most; 0: unknown."""
        self._limits[worker] = min(self._max_blocks, cache_tokens // self.block_tokens or self._max_blocks)

    def matched_blocks(self, worker: str, chain: Sequence[bytes]) -> int:
        """Blocks of the longest known prefix."""
        return max([_depth(blocks, chain) for blocks in self._held.get(worker, ())], default=0)

    def record(self, worker: str, chain: Sequence[bytes]) -> None:
        """The worker now has all of ``chain``; of one that is longer than its cache, the head."""
        limit = self._limits.get(worker, self._max_blocks)
        young, old = self._held.get(worker) or (set(), set())
        chain = chain[:limit]
        unknown = chain[_depth(young, chain) :]
        if young and len(young) + len(unknown) > limit // 2:
            young, old = set(chain), young
        else:
            young.update(unknown)
        if len(young) + len(old) > limit:
            old = set()
        self._held[worker] = young, old

    def forget(self, worker: str) -> None:
        self._held.pop(worker, None)
        self._limits.pop(worker, None)

    def num_blocks(self, worker: str) -> int:
        """What is in both generations counts twice."""
        return sum(map(len, self._held.get(worker, ())))


def _depth(blocks: set[bytes], chain: Sequence[bytes]) -> int:
    """A chain has no holes in a generation, so its end is found by bisection."""
    if not chain or chain[0] not in blocks:
        return 0
    low, high = 0, len(chain) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle] in blocks:
            low = middle
        else:
            high = middle - 1
    return low + 1
