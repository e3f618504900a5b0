"""Which worker probably holds which prefix, from the router's own routing history.

Approximate on purpose: a worker may have evicted what is listed here, and is never asked. Bounded: each worker has at
most ``max_blocks`` entries, the least recently routed go first. A worker's entries are dropped when it restarts.
Pure; knows nothing about requests or workers beyond their names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixIndex:
    """Chained block hashes by worker. A chain is a list of hashes of which each one stands for its whole prefix."""

    def __init__(self, block_tokens: int, max_blocks: int) -> None:
        self.block_tokens = block_tokens
        self._max_blocks = max_blocks
        self._held: dict[str, OrderedDict[bytes, None]] = {}

    def matched_tokens(self, worker: str, chain: Sequence[bytes]) -> int:
        """Tokens of the longest known prefix. A chain has no holes, so its end is found by bisection."""
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
        return (low + 1) * self.block_tokens

    def record(self, worker: str, chain: Sequence[bytes]) -> None:
        """The worker now has all of ``chain``. Later blocks of a chain are dropped before earlier ones."""
        held = self._held.setdefault(worker, OrderedDict())
        for block_hash in reversed(chain):
            held[block_hash] = None
            held.move_to_end(block_hash)
        while len(held) > self._max_blocks:
            held.popitem(last=False)

    def forget(self, worker: str) -> None:
        self._held.pop(worker, None)

    def num_blocks(self, worker: str) -> int:
        return len(self._held.get(worker, ()))
