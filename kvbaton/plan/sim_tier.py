"""A cache tier in host memory behind one simulated worker: what it holds, and when what it holds is back on the GPU.

The tier keeps a copy of every prompt block its worker computed, least recently used out first; where the tiers of a
fleet are pooled, one store keeps those of all workers. A prompt whose prefix
goes on in the tier beyond what the GPU still holds waits until those blocks are loaded, over a link that serves one
prompt after the other, unless computing them would take less. Loaded blocks go through the real block manager, so the
real scheduler finds them as any cached prefix; if it comes to the prompt so late that they are evicted again, they are
computed.

Writing to the tier costs nothing here: it happens behind computation, in the other direction of the link. Knows nothing
about time beyond what it is told, and nothing about routing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from kvbaton.kv.blocks import BlockManager
from kvbaton.plan.sim_record import Record
from kvbaton.plan.sim_spec import WorkerSpec
from kvbaton.plan.step_time import StepWork, pairs


class HostStore:
    """Which blocks host memory holds, up to a number of them."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()  # oldest first; of a chain the tail is older

    def keep(self, chain: Sequence[bytes]) -> None:
        for block_hash in reversed(chain):
            self._held[block_hash] = None
            self._held.move_to_end(block_hash)
        while len(self._held) > self._num_blocks:
            self._held.popitem(last=False)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._held


class HostTier:
    """Exists for every worker; one without blocks never holds anything."""

    def __init__(self, spec: WorkerSpec, pooled: HostStore | None = None) -> None:
        self._spec = spec
        self._store = HostStore(spec.tier_blocks) if pooled is None else pooled
        self._free_s = 0.0
        self.loaded_tokens = 0

    def keep(self, record: Record) -> None:
        """The worker has computed the prompt."""
        if not self._spec.tier_blocks:
            return
        self._store.keep(record.hashes)

    def load_until_s(self, record: Record, blocks: BlockManager, now_s: float) -> float | None:
        """When the blocks that only the tier holds would be on the GPU; None when there is nothing worth loading."""
        if not self._spec.tier_blocks or not self._spec.prefix_caching:
            return None
        here, there = self._found(record, blocks)
        size, spec = self._spec.block_size, self._spec
        tokens = (there - here) * size
        if tokens <= 0:
            return None
        done_s = max(now_s, self._free_s) + tokens * spec.tier_s_per_token
        computing_s = spec.step.step_s(StepWork(tokens, pairs(here * size, tokens))) - spec.step.fixed_s
        if done_s - now_s >= computing_s:
            return None
        self._free_s = done_s
        return done_s

    def install(self, record: Record, blocks: BlockManager) -> None:
        """The blocks have arrived: into the prefix cache, as much as there is room for."""
        here, there = self._found(record, blocks)
        matched = blocks.match(record.hashes[:here])
        count = min(there - here, blocks.num_takable(matched))
        if count <= 0:
            return
        blocks.acquire(matched)
        fresh = blocks.allocate(count)
        for block, block_hash in zip(fresh, record.hashes[here:], strict=False):
            blocks.publish(block, block_hash)
        blocks.release([*matched, *fresh])
        self.loaded_tokens += count * self._spec.block_size

    def _found(self, record: Record, blocks: BlockManager) -> tuple[int, int]:
        """(leading blocks on the GPU, leading blocks in the tier); the last token of a prompt is always computed."""
        size = self._spec.block_size
        chain = record.hashes[: (record.prompt_tokens - 1) // size]
        there = 0
        for block_hash in chain:
            if block_hash not in self._store:
                break
            there += 1
        return len(blocks.match(chain)), there
