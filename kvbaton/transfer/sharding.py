"""Hand-offs between workers whose ranks share the KV heads: which rank reads what from which, and many copies as one.

    lender          rank 0: heads 0 1    rank 1: heads 2 3
                       |   '--------.            |
    reader          rank 0: 0   rank 1: 1    rank 2: 2 3        three parts: one for each line

Invariants: every head of every rank of the reader's comes from exactly one rank of the lender's, so the bytes are the
layout's arithmetic; a region is copied when every part of it is, and has failed only when no part of it lands any more;
one part that fails is a failure of the whole. Knows nothing about sessions, leases or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbaton.kv.rank_pools import AnyPool, RankPools, rank_layout
from kvbaton.kv.reshard import HeadRange, ranks_to_read
from kvbaton.kv.shared_pool import SharedPool
from kvbaton.transfer.copying import OnCopied
from kvbaton.transfer.placement import Placement, Shard, ShardedPlacement
from kvbaton.transfer.ranges import Region
from kvbaton.transfer.shm import ShmSource
from kvbaton.transfer.wire import Identity, Offer, RankPool
from kvbaton.types import KvbatonError

if TYPE_CHECKING:
    from kvbaton.transfer.peer import KVSource


def rank_pools_of(pool: AnyPool) -> tuple[RankPool, ...]:
    """What a worker's identity says of its ranks; nothing where one holds everything."""
    if isinstance(pool, SharedPool):
        return ()
    return tuple(
        RankPool(held.start, held.num_heads, rank.name if pool.lent else None)
        for held, rank in zip(pool.heads, pool.pools, strict=True)
    )


def _heads_by_rank(identity: Identity) -> list[HeadRange]:
    if not identity.ranks:
        return [HeadRange(0, identity.layout.num_kv_heads)]
    return [HeadRange(rank.first_head, rank.first_head + rank.num_heads) for rank in identity.ranks]


def place(
    pool: AnyPool, block_ids: Sequence[int], peer: Identity, tokens: tuple[int, int], mapped: bool
) -> Placement | ShardedPlacement:
    """For one request with ``tokens`` of (those that are here already, all of the prompt).

    ``mapped``: whole blocks of the peer's ranks can be reached, and their other heads are passed over. Otherwise the
    peer is asked for just the heads that are wanted.
    """
    have_tokens, num_tokens = tokens
    if isinstance(pool, SharedPool) and not peer.ranks:
        return Placement(pool, block_ids, peer.layout, have_tokens, num_tokens)
    sources = _heads_by_rank(peer)
    parts: list[Placement] = []
    for own_heads, own in _ranks(pool):
        for rank, heads in ranks_to_read(own_heads, sources):
            layout = rank_layout(peer.layout, sources[rank])
            shard = Shard(rank, sources[rank].start, own_heads.start, part=len(parts))
            if heads != sources[rank] and not mapped:
                layout = rank_layout(peer.layout, heads)
                shard = Shard(rank, heads.start, own_heads.start, heads, len(parts))
            parts.append(Placement(own, block_ids, layout, have_tokens, num_tokens, shard))
    return ShardedPlacement(parts)


def _ranks(pool: AnyPool) -> list[tuple[HeadRange, SharedPool]]:
    if isinstance(pool, RankPools):
        return list(zip(pool.heads, pool.pools, strict=True))
    return [(HeadRange(0, pool.layout.num_kv_heads), pool)]


def start_copy(
    source: KVSource, offer: Offer, region: Region, placement: Placement | ShardedPlacement, on_copied: OnCopied
) -> None:
    """``on_copied`` is called on the loop, when no byte of any part lands any more."""
    if isinstance(placement, Placement):
        source.start_copy(offer, region, placement, on_copied)
        return
    if isinstance(source, ShmSource):
        source.start_copies(offer, region, placement, on_copied)
        return
    errors: list[KvbatonError | None] = []
    num_parts = len(placement.parts)

    def part_copied(error: KvbatonError | None) -> None:
        errors.append(error)
        if len(errors) == num_parts:
            on_copied(next((found for found in errors if found is not None), None))

    for part in placement.parts:
        source.start_copy(offer, region, part, part_copied)


def stop_copies(source: KVSource, placement: Placement | ShardedPlacement) -> None:
    for part in (placement,) if isinstance(placement, Placement) else placement.parts:
        source.stop_copies(part)
