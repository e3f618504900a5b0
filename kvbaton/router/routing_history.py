"""Which worker probably holds which prefix, from the router's own routing history: for workers that send no events.

Approximate on purpose: a worker may have evicted what is listed here, and is never asked. Bounded: each worker has at
most ``max_blocks`` entries, fewer if its cache is smaller; the least recently routed go first. Pure; knows nothing
about requests or workers beyond their names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class RoutingHistory:
    """Chained block hashes by worker. A chain is a list of hashes of which each one stands for its whole prefix."""

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._limits: dict[str, int] = {}
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def limit(self, worker: str, cache_tokens: int) -> None:
        """What the worker's cache holds at most; 0: unknown."""
        self._limits[worker] = min(self._max_blocks, cache_tokens // self.block_tokens or self._max_blocks)

    def matched_blocks(self, worker: str, chain: Sequence[bytes]) -> int:
        """Blocks of the longest known prefix. A chain has no holes, so its end is found by bisection."""
        held = self._held.get(worker)
        if not held or not chain or chain[0] not in held:
            return 0
        low, high = 0, len(chain) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if chain[middle] in held:
                low = middle
            else:
                high = middle - 1
        return low + 1

    def record(self, worker: str, chain: Sequence[bytes]) -> None:
        """The worker now has all of ``chain``. Later blocks of a chain are dropped before earlier ones."""
        held = self._held.setdefault(worker, OrderedDict())
        known, move_to_end, drop = self.matched_blocks(worker, chain), held.move_to_end, held.popitem
        for block_hash in reversed(chain[known:]):
            held[block_hash] = None
        for block_hash in reversed(chain[:known]):
            move_to_end(block_hash)
        for _ in range(len(held) - self._limits.get(worker, self._max_blocks)):
            drop(False)

    def forget(self, worker: str) -> None:
        self._held.pop(worker, None)
        self._limits.pop(worker, None)

    def num_blocks(self, worker: str) -> int:
        return len(self._held.get(worker, ()))
