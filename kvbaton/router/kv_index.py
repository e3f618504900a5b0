"""Which worker holds which KV block, as the workers themselves say: one map from block hash to workers, as bits.

    held       what a worker's events and snapshots said; of a worker whose events stopped, also what was sent there
    expected   blocks of requests under way that the worker does not hold yet, but will when they are computed

Invariants: after every event of a worker was applied its held set equals the worker's cache, except what was dropped
for want of memory; a worker that is forgotten (it restarted or left) is foretold nothing from that moment on. Memory:
at most ``max_blocks`` hashes of all workers together, the least recently used go first and are counted; expected
blocks are at most as many again. A lookup walks a prompt's chain once for all workers, however many there are. Of a
long chain it sees only every 16th block behind the 512th: a hole between two of them goes unnoticed. Holes are rare,
because workers evict tails before heads; a prompt of 8,192 blocks costs a fifth of the memory accesses.

Hashes of different block sizes name different content and never meet, so workers of different block sizes share the
map; a chain only matches workers of its size. Forgetting is O(1): the worker gets a new bit, the old one is dead, and
dead bits are swept out bit by bit while the index is used. Pure; knows nothing about sequence numbers (``kv_feed``),
tokens or clocks.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from operator import and_
from typing import Literal

from kvbaton.kv.blocks import BlockEvents

_FIRST = 32  # blocks of a chain looked up at first: what nobody has ends there
_EXACT = 512  # so many are looked up one by one; behind them every _STRIDE-th
_STRIDE = 16
_SWEEP = 4  # hashes looked at for each one stored, while there are dead bits

Trust = Literal["unsynced", "fresh", "stale"]


class Holder:
    """What is known of one life of one worker."""

    __slots__ = ("bit", "block_size", "expected", "guessed", "name", "num_blocks", "round", "settling", "trust")

    def __init__(self, name: str, block_size: int, bit: int) -> None:
        self.name = name
        self.block_size = block_size
        self.bit = bit
        self.num_blocks = 0
        self.trust: Trust = "unsynced"
        self.guessed = False  # blocks were recorded that no event spoke of: only a snapshot sets it right
        self.expected: dict[bytes, int] = {}  # how many requests under way will store it
        self.settling: deque[tuple[int, Sequence[bytes]]] = deque()  # ended in this round
        self.round = 0


class Expectation:
    """Blocks that one request under way will store on one worker."""

    __slots__ = ("_chain", "_holder", "_index")

    def __init__(self, index: KVIndex, holder: Holder, chain: Sequence[bytes]) -> None:
        self._index, self._holder, self._chain = index, holder, chain

    def settle(self) -> None:
        """The request ended, well or not. What it stored is in the events of the next round that begins."""
        chain, self._chain = self._chain, ()
        if not chain:
            return
        if self._holder.trust == "fresh":
            self._holder.settling.append((self._holder.round, chain))
        else:
            self._index._unexpect(self._holder, chain)


class KVIndex:
    def __init__(self, max_blocks: int) -> None:
        assert max_blocks >= 1
        self._max_blocks = max_blocks
        self._masks: OrderedDict[bytes, int] = OrderedDict()  # least recently used first
        self._holders: dict[str, Holder] = {}
        self._by_bit: dict[int, Holder] = {}  # staged ones too
        self._free_bits: list[int] = []
        self._num_bits = 0
        self._dead = 0  # bits that mean nothing any more, but are still in masks
        self._sweeping: tuple[int, list[bytes]] = (0, [])  # the dead bits of this sweep, and what is left to look at
        self._num_expected = 0
        self.num_dropped = 0

    # -- workers ---------------------------------------------------------------------------------------------------

    def join(self, worker: str, block_size: int) -> None:
        """A worker, or a new life of it, of which nothing is known yet."""
        self.forget(worker)
        holder = Holder(worker, block_size, self._take_bit())
        self._holders[worker] = self._by_bit[holder.bit] = holder

    def forget(self, worker: str) -> None:
        holder = self._holders.pop(worker, None)
        if holder is not None:
            self._num_expected -= sum(holder.expected.values())
            holder.expected, holder.settling = {}, deque()
            self._kill_bit(holder.bit)

    def knows(self, worker: str) -> bool:
        return worker in self._holders

    def trust(self, worker: str) -> Trust:
        return self._holders[worker].trust

    def needs_snapshot(self, worker: str) -> bool:
        """Whether something was recorded that no event spoke of."""
        return self._holders[worker].guessed

    def lost(self, worker: str) -> None:
        """No events come from it any more: from now on what is sent there counts as held."""
        holder = self._holders[worker]
        if holder.trust == "fresh":
            holder.trust = "stale"
            while holder.settling:
                self._unexpect(holder, holder.settling.popleft()[1])

    def block_sizes(self) -> set[int]:
        return {holder.block_size for holder in self._holders.values()}

    def block_size(self, worker: str) -> int:
        return self._holders[worker].block_size

    def num_blocks(self, worker: str) -> int:
        holder = self._holders.get(worker)
        return holder.num_blocks if holder is not None else 0

    @property
    def num_hashes(self) -> int:
        return len(self._masks)

    def held(self, worker: str) -> set[bytes]:
        """All of it: for tests and drills."""
        bit = self._holders[worker].bit
        return {name for name, mask in self._masks.items() if mask & bit}

    # -- what workers say ------------------------------------------------------------------------------------------

    def apply(self, worker: str, events: BlockEvents) -> None:
        holder = self._holders[worker]
        if events.cleared:
            self._replace_bit(holder, self._take_bit(), 0)
        self._remove(holder.bit, events.removed)
        self._store(holder.bit, events.stored)

    def stage(self, worker: str) -> Snapshot:
        """Begin a snapshot. What is known stays in force until it is committed."""
        return Snapshot(self, self._holders[worker], self._take_bit())

    def begin_round(self, worker: str) -> int:
        """Events are about to be asked for."""
        holder = self._holders[worker]
        holder.round += 1
        return holder.round

    def end_round(self, worker: str, began: int) -> None:
        """Everything that happened before round ``began`` has been applied, so what ended before it is settled."""
        holder = self._holders[worker]
        holder.trust = "fresh"
        while holder.settling and holder.settling[0][0] < began:
            self._unexpect(holder, holder.settling.popleft()[1])

    def _store(self, bit: int, hashes: Sequence[bytes]) -> None:
        masks, num_new = self._masks, 0
        for name in reversed(hashes):  # the head of a chain last: it must outlive its tail
            mask = masks.get(name, 0)
            if not mask & bit:
                masks[name] = mask | bit
                num_new += 1
        self._by_bit[bit].num_blocks += num_new
        if self._dead:
            self._sweep(64 + _SWEEP * len(hashes))
        self._bound()

    def _remove(self, bit: int, hashes: Iterable[bytes]) -> None:
        masks, num_gone = self._masks, 0
        for name in hashes:
            mask = masks.get(name, 0)
            if mask & bit:
                num_gone += 1
                if mask == bit:
                    del masks[name]
                else:
                    masks[name] = mask & ~bit
        self._by_bit[bit].num_blocks -= num_gone

    def _bound(self) -> None:
        while len(self._masks) > self._max_blocks:
            _, mask = self._masks.popitem(last=False)
            mask &= ~self._dead
            self.num_dropped += mask != 0
            while mask:
                bit = mask & -mask
                self._by_bit[bit].num_blocks -= 1
                mask ^= bit

    # -- what this router knows itself -----------------------------------------------------------------------------

    def used(self, worker: str, chain: Sequence[bytes]) -> None:
        """A prompt was computed there. Keeps its blocks from being dropped; without events they count as held."""
        holder = self._holders[worker]
        if holder.trust != "fresh":
            self._store(holder.bit, chain)
            holder.guessed = holder.guessed or bool(chain)
        if len(self._masks) * 2 > self._max_blocks:  # else nothing will be dropped soon, and order is of no use
            masks = self._masks
            for name in reversed(chain):
                if name in masks:
                    masks.move_to_end(name)

    def expect(self, worker: str, chain: Sequence[bytes]) -> Expectation:
        """A prompt is about to be computed there. ``settle`` the answer when the request is over, on any way."""
        holder = self._holders[worker]
        wanted = chain[self._depth(holder, chain) :]
        if self._num_expected + len(wanted) > self._max_blocks:
            wanted = ()
        expected = holder.expected
        for name in wanted:
            expected[name] = expected.get(name, 0) + 1
        self._num_expected += len(wanted)
        return Expectation(self, holder, wanted)

    def _unexpect(self, holder: Holder, chain: Sequence[bytes]) -> None:
        expected = holder.expected
        if not expected:
            return  # forgotten meanwhile, and with it the count
        for name in chain:
            count = expected[name] - 1
            if count:
                expected[name] = count
            else:
                del expected[name]
        self._num_expected -= len(chain)

    # -- looking up ------------------------------------------------------------------------------------------------

    def matched(self, chain: Sequence[bytes], block_size: int) -> dict[str, int]:
        """Leading blocks of ``chain`` that each worker of that block size has, or will have; 0 is left out."""
        holders = [holder for holder in self._holders.values() if holder.block_size == block_size]
        depths = self._depths(chain, sum(holder.bit for holder in holders))
        found = {}
        for holder in holders:
            depth = depths.get(holder.bit, 0)
            if holder.expected:
                depth = _expected_depth(holder.expected, chain, depth)
            if depth:
                found[holder.name] = depth
        return found

    def _depth(self, holder: Holder, chain: Sequence[bytes]) -> int:
        return self._depths(chain, holder.bit).get(holder.bit, 0)

    def _depths(self, chain: Sequence[bytes], alive: int) -> dict[int, int]:
        """By bit, how many leading blocks have it. Along a chain bits only fall away, so few places are looked at."""
        depths: dict[int, int] = {}
        alive = self._walk(chain[:_FIRST], 0, alive, depths)
        if alive and len(chain) > _FIRST:
            alive = self._walk(chain[_FIRST:_EXACT], _FIRST, alive, depths)
        if alive and len(chain) > _EXACT:
            alive = self._stride(chain, alive, depths)
        while alive:
            bit = alive & -alive
            depths[bit] = len(chain)
            alive ^= bit
        return depths

    def _walk(self, part: Sequence[bytes], start: int, alive: int, depths: dict[int, int]) -> int:
        """Block by block; the bits of ``alive`` that all of ``part`` has. Notes where the others ended."""
        left = list(accumulate(map(self._masks.get, part, repeat(0)), and_, initial=alive))  # after 0, 1, 2 ... blocks
        while left[-1] != alive:
            end = _first_without(left, alive)
            lost = alive & ~left[end]
            while lost:
                bit = lost & -lost
                depths[bit] = start + end - 1
                lost ^= bit
            alive = left[end]
        return alive

    def _stride(self, chain: Sequence[bytes], alive: int, depths: dict[int, int]) -> int:
        """Behind ``_EXACT`` only every so many blocks, and all of them where a bit fell away."""
        num = (len(chain) - _EXACT) // _STRIDE
        stop = _EXACT + num * _STRIDE
        ends = chain[_EXACT + _STRIDE - 1 : stop : _STRIDE]
        left = list(accumulate(map(self._masks.get, ends, repeat(0)), and_, initial=alive))
        while alive & ~left[-1]:
            start = _EXACT + (_first_without(left, alive) - 1) * _STRIDE
            alive = self._walk(chain[start : start + _STRIDE], start, alive, depths)
        return self._walk(chain[stop:], stop, alive, depths) if alive else 0

    # -- bits ------------------------------------------------------------------------------------------------------

    def _take_bit(self) -> int:
        if self._free_bits:
            return self._free_bits.pop()
        self._num_bits += 1
        return 1 << (self._num_bits - 1)

    def _kill_bit(self, bit: int) -> None:
        holder = self._by_bit.pop(bit)
        if holder.num_blocks and self._masks:
            self._dead |= bit
            self._sweep(4096)
        else:
            self._free_bits.append(bit)

    def _replace_bit(self, holder: Holder, bit: int, num_blocks: int) -> None:
        self._kill_bit(holder.bit)
        holder.bit, holder.num_blocks = bit, num_blocks
        self._by_bit[bit] = holder

    def _sweep(self, num: int) -> None:
        """Take dead bits out of ``num`` masks. A bit can be used again when a whole sweep began after it died."""
        bits, names = self._sweeping
        if not names:
            bits, names = self._sweeping = (self._dead, list(self._masks))
        masks = self._masks
        for name in names[-num:]:
            mask = masks.get(name, 0)
            if mask & bits:
                if mask & ~bits:
                    masks[name] = mask & ~bits
                else:
                    del masks[name]
        del names[-num:]
        if not names:
            self._dead &= ~bits
            while bits:
                bit = bits & -bits
                self._free_bits.append(bit)
                bits ^= bit

    def check(self) -> None:
        """Assert every invariant."""
        assert len(self._masks) <= self._max_blocks
        counts = dict.fromkeys(self._by_bit, 0)
        for mask in self._masks.values():
            assert mask, "a hash that nobody holds"
            assert not mask & self._dead or mask & ~self._dead or self._dead
            for bit in counts:
                counts[bit] += bool(mask & bit)
        for bit, holder in self._by_bit.items():
            assert not bit & self._dead and bit not in self._free_bits
            assert counts[bit] == holder.num_blocks, f"{holder.name}: {holder.num_blocks} counted, {counts[bit]} held"
        assert self._num_expected == sum(sum(h.expected.values()) for h in self._holders.values())
        assert self._num_expected <= self._max_blocks


class Snapshot:
    """All a worker holds, arriving in parts, under a bit of its own until it is complete."""

    def __init__(self, index: KVIndex, holder: Holder, bit: int) -> None:
        self._index, self._holder = index, holder
        self._staged = Holder(holder.name, holder.block_size, bit)
        index._by_bit[bit] = self._staged

    def add(self, hashes: Sequence[bytes]) -> None:
        self._index._store(self._staged.bit, hashes)

    def commit(self) -> None:
        """It is complete: the worker holds this and nothing else. Harmless if the worker was forgotten meanwhile."""
        index, holder, staged = self._index, self._holder, self._staged
        if index._holders.get(holder.name) is not holder:
            self.discard()
            return
        del index._by_bit[staged.bit]
        index._replace_bit(holder, staged.bit, staged.num_blocks)
        holder.guessed = False

    def discard(self) -> None:
        self._index._kill_bit(self._staged.bit)


def _first_without(left: list[int], bits: int) -> int:
    """Index of the first entry that lacks some of ``bits``; there is one. Along the list bits only fall away."""
    low, high = 0, len(left) - 1
    while low < high:
        middle = (low + high) // 2
        if bits & ~left[middle]:
            high = middle
        else:
            low = middle + 1
    return low


def _expected_depth(expected: dict[bytes, int], chain: Sequence[bytes], depth: int) -> int:
    """Go on behind ``depth``. What is expected of a chain has no holes there, so its end is found by bisection."""
    if depth == len(chain) or chain[depth] not in expected:
        return depth
    low, high = depth, len(chain) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if chain[middle] in expected:
            low = middle
        else:
            high = middle - 1
    return low + 1
