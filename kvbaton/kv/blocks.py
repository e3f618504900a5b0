"""Who owns which KV block: reference counts, the prefix cache, leases, generations.

A block is in exactly one of three places:

    free list      no reference, no hash: content is worthless
    evictable LRU  no reference, carries a hash: a later prompt may match it, an allocation may take it
    in use         at least one reference (a sequence's or a lease's), with or without a hash

    allocate:  free list, else LRU  ->  in use        publish:  a full block in use gets its hash
    release:   in use  ->  LRU (hash) or free list    acquire:  in use or LRU  ->  in use

Invariants: a block with a reference is never handed out; a hash names one block (the canonical one); the generation of
a block grows each time it is handed out, before anybody can overwrite it, so a late reader can tell; a lease's blocks
stay until ``unpin`` or ``expire``; partly filled blocks carry no hash and so are never matched. Blocks are released
tail first, so of a chain the tail is evicted before the head and a shared prefix survives. Every operation is O(1) per
block. Knows nothing about tokens in the blocks' bytes, sequences, clocks or transport.
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import msgspec

from kvbaton.kv.native_hashes import chain_hashes
from kvbaton.types import CapacityError, LocalError

HASH_BYTES = 16  # 128 bits: a collision among 2**40 blocks has odds below 2**-48


class OutOfBlocks(CapacityError):
    """Fewer blocks are free or evictable than were asked for."""


class BlockEvents(msgspec.Struct, frozen=True):
    """What changed in the cache since the last look. First everything is ``cleared``, if so; no hash is named twice."""

    cleared: bool = False
    removed: tuple[bytes, ...] = ()
    stored: tuple[bytes, ...] = ()  # from now on a prompt whose chain contains one finds that block here

    def __bool__(self) -> bool:
        return self.cleared or bool(self.removed) or bool(self.stored)

    @property
    def num_hashes(self) -> int:
        return len(self.removed) + len(self.stored)


NO_EVENTS = BlockEvents()


@lru_cache(maxsize=256)
def root_hash(salt: str = "") -> bytes:
    """Where a hash chain starts; different salts share nothing."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"kvbaton-chain").digest()


def extend_hashes(parent: bytes, token_ids: Iterable[int], block_size: int) -> list[bytes]:
    """Hashes of the full blocks of ``token_ids``, which follow the block (or root) whose hash is ``parent``."""
    try:
        tokens = array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise LocalError(f"not a token id: {error}", field="prompt") from error
    native = chain_hashes(parent, tokens, block_size, HASH_BYTES)
    if native is not None:
        return native
    if sys.byteorder == "big":  # peers and routers compare hashes across machines
        tokens.byteswap()
    content = memoryview(tokens).cast("B")
    step = block_size * tokens.itemsize
    hashes = []
    for start in range(0, len(content) - step + 1, step):
        digest = blake2b(parent, digest_size=HASH_BYTES)
        digest.update(content[start : start + step])
        parent = digest.digest()
        hashes.append(parent)
    return hashes


def block_hashes(token_ids: Iterable[int], block_size: int, salt: str = "") -> list[bytes]:
    """Chained hashes of the full blocks of a prompt; the partly filled last block has none."""
    return extend_hashes(root_hash(salt), token_ids, block_size)


@dataclass
class _Lease:
    blocks: tuple[int, ...]
    expires_at_s: float


class BlockManager:
    """Owns ``num_blocks`` blocks of ``block_size`` tokens. Block lists are given in chain order, head first."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool = True,
        on_generation: Callable[[int, int], None] | None = None,
    ) -> None:
        assert num_blocks >= 1 and block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._on_generation = on_generation
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack; low ids first, so that runs are adjacent
        self._lru: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._references = [0] * num_blocks
        self._generations = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._leases: dict[str, _Lease] = {}
        self._pin_counts: dict[int, int] = {}
        self._num_gained = 0
        self._earliest_expiry_s = float("inf")  # a lower bound, so that ``expire`` is cheap when nothing is due
        # Net change per hash since the last drain. A hash stored and removed in between cancels out, so there are
        # never more entries than blocks now plus blocks at the last drain, and none is ever lost.
        self._changes: dict[bytes, bool] = {}
        self._cleared = False  # everything known at the last drain is gone; ``_changes`` is what came since

    # -- counts --------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks an allocation can take: free ones and evictable ones."""
        return len(self._free) + len(self._lru)

    @property
    def num_used(self) -> int:
        """Blocks with at least one reference."""
        return self.num_blocks - len(self._free) - len(self._lru)

    @property
    def num_cached(self) -> int:
        """Blocks that carry a hash, in use or evictable."""
        return len(self._block_of)

    @property
    def num_pinned(self) -> int:
        """Blocks under at least one lease."""
        return len(self._pin_counts)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    @property
    def num_gained(self) -> int:
        """Grows with each block that is published or revived.

        A prompt that lacked n blocks beside its match can have enough once ``num_free + num_gained`` has grown by n.
        (A block of a chain that comes back may reconnect others; then this asks for more than is needed.)
        """
        return self._num_gained

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens, the last one maybe partly."""
        return -(-num_tokens // self.block_size)

    # -- taking and giving back ----------------------------------------------------------------------------------

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest cached prefix. Takes no reference: ``acquire`` them before anything else."""
        blocks: list[int] = []
        block_of = self._block_of
        for block_hash in hashes:
            block = block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_takable(self, matched: Sequence[int]) -> int:
        """Blocks an allocation could take once ``matched`` (from ``match``) have been acquired."""
        references = self._references
        return self.num_free - sum(1 for block in matched if references[block] == 0)

    def allocate(self, num: int) -> list[int]:
        """``num`` blocks with one reference each, or ``OutOfBlocks`` and no change."""
        free = self._free
        if num > len(free) + len(self._lru):
            raise OutOfBlocks(f"{num} KV blocks are needed, {self.num_free} of {self.num_blocks} are free")
        num_stacked = min(num, len(free))
        blocks = free[len(free) - num_stacked :]
        del free[len(free) - num_stacked :]
        blocks.reverse()
        for _ in range(num - num_stacked):
            block, _ = self._lru.popitem(last=False)
            self._forget_hash(block)
            blocks.append(block)
        references, generations, on_generation = self._references, self._generations, self._on_generation
        for block in blocks:
            references[block] = 1
            generations[block] += 1
            if on_generation is not None:
                on_generation(block, generations[block])
        return blocks

    def acquire(self, blocks: Sequence[int]) -> None:
        """One more reference to each; revives evictable ones."""
        references, lru = self._references, self._lru
        for block in blocks:
            count = references[block]
            if count == 0:
                assert block in lru, f"block {block} is free: its content is gone"
                del lru[block]
                self._num_gained += 1
            references[block] = count + 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each; at none left, to the LRU if it carries a hash, else to the free list."""
        references, hash_of, lru, free = self._references, self._hash_of, self._lru, self._free
        for block in reversed(blocks):
            count = references[block] - 1
            assert count >= 0, f"block {block} is released more often than it was taken"
            references[block] = count
            if count == 0:
                if hash_of[block] is not None:
                    lru[block] = None
                else:
                    free.append(block)

    def publish(self, block: int, block_hash: bytes) -> int:
        """``block`` is full and its KV computed: it holds the content named ``block_hash``.

        Returns the canonical block of that content: an older one if there is one, and then ``block`` stays private.
        """
        if not self.prefix_caching:
            return block
        assert self._references[block] > 0, f"block {block} is published without a reference"
        canonical = self._block_of.setdefault(block_hash, block)
        if canonical != block or self._hash_of[block] == block_hash:
            return canonical
        assert self._hash_of[block] is None, f"block {block} already carries another hash"
        self._hash_of[block] = block_hash
        self._num_gained += 1
        if self._changes.get(block_hash) is False:
            del self._changes[block_hash]
        else:
            self._changes[block_hash] = True
        return block

    def generation(self, block: int) -> int:
        return self._generations[block]

    # -- leases --------------------------------------------------------------------------------------------------

    def pin(self, lease_id: str, blocks: Sequence[int], expires_at_s: float) -> None:
        """Keep ``blocks`` for a reader elsewhere until ``unpin``, or ``expire`` at ``expires_at_s``."""
        assert lease_id not in self._leases, f"lease {lease_id} exists"
        self.acquire(blocks)
        self._leases[lease_id] = _Lease(tuple(blocks), expires_at_s)
        self._earliest_expiry_s = min(self._earliest_expiry_s, expires_at_s)
        for block in blocks:
            self._pin_counts[block] = self._pin_counts.get(block, 0) + 1

    def renew(self, lease_id: str, now_s: float, expires_at_s: float) -> bool:
        """Move the expiry. False if the lease is gone or its time has passed: the blocks may be reused."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.expires_at_s <= now_s:
            return False
        lease.expires_at_s = expires_at_s
        self._earliest_expiry_s = min(self._earliest_expiry_s, expires_at_s)
        return True

    def unpin(self, lease_id: str) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        for block in lease.blocks:
            count = self._pin_counts.pop(block) - 1
            if count > 0:
                self._pin_counts[block] = count
        self.release(lease.blocks)
        return True

    def expire(self, now_s: float) -> list[str]:
        """Release the leases whose time has passed; returns their ids."""
        if now_s < self._earliest_expiry_s:
            return []
        expired = [lease_id for lease_id, lease in self._leases.items() if lease.expires_at_s <= now_s]
        for lease_id in expired:
            self.unpin(lease_id)
        self._earliest_expiry_s = min((lease.expires_at_s for lease in self._leases.values()), default=float("inf"))
        return expired

    # -- the prefix cache as seen from outside -------------------------------------------------------------------

    def drain_events(self) -> BlockEvents:
        """The net change of the cached hashes since the last call."""
        if not self._changes and not self._cleared:
            return NO_EVENTS
        changes, self._changes = self._changes, {}
        cleared, self._cleared = self._cleared, False
        stored = tuple([name for name, is_stored in changes.items() if is_stored])
        removed = tuple([name for name, is_stored in changes.items() if not is_stored])
        return BlockEvents(cleared, removed, stored)

    def cached_hashes(self) -> list[bytes]:
        """Everything that ``match`` can find, for an index that starts anew."""
        return list(self._block_of)

    def clear_cache(self) -> None:
        """Forget every hash. Blocks in use stay with their owners, but nobody will match them again."""
        self._cleared = self._cleared or bool(self._block_of or self._changes)
        self._changes.clear()
        for block in self._block_of.values():
            self._hash_of[block] = None
        self._block_of.clear()
        self._free.extend(reversed(self._lru))
        self._lru.clear()

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hash_of[block]
        assert block_hash is not None
        self._hash_of[block] = None
        del self._block_of[block_hash]
        if self._changes.get(block_hash) is True:
            del self._changes[block_hash]
        else:
            self._changes[block_hash] = False

    # -- invariants ----------------------------------------------------------------------------------------------

    def check(self, held: Mapping[int, int] | None = None) -> None:
        """Assert every invariant. ``held``: the references of all owners that are not leases, if known, by block."""
        free, lru = set(self._free), set(self._lru)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert not free & lru, "a block is both free and evictable"
        for block, count in enumerate(self._references):
            assert count >= 0
            assert (count == 0) == (block in free or block in lru), f"block {block}: {count} references, wrong place"
            if count == 0:
                assert (self._hash_of[block] is not None) == (block in lru), f"block {block} is in the wrong list"
        hashed = {name: block for block, name in enumerate(self._hash_of) if name is not None}
        assert hashed == self._block_of, "hashes and blocks do not mirror each other"
        assert len(hashed) == sum(name is not None for name in self._hash_of), "two blocks carry one hash"
        assert self.prefix_caching or not hashed
        pins: dict[int, int] = {}
        for lease in self._leases.values():
            assert lease.expires_at_s >= self._earliest_expiry_s, "a lease would never expire"
            for block in lease.blocks:
                pins[block] = pins.get(block, 0) + 1
        assert pins == self._pin_counts, "pins do not add up"
        for block, count in enumerate(self._references):
            pinned = pins.get(block, 0)
            assert count >= pinned, f"block {block} is pinned without a reference"
            if held is not None:
                assert count == pinned + held.get(block, 0), f"block {block}: {count} references, owners know otherwise"
        for block_hash, stored in self._changes.items():
            assert stored == (block_hash in self._block_of), "an event contradicts the cache"
        if self._cleared:
            assert self._changes.keys() == self._block_of.keys(), "after clearing, what is cached is news"
