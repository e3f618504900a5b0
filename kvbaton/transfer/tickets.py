"""Which tickets are good for which blocks, asked by the threads that lend.

Invariants: a read is allowed only with a ticket that was granted and not revoked, on the connection it was granted to,
before it expires, within the offer, only of what is computed, and of each block in each layer once by each part of the
reader. Everything else is refused alike, so that a stranger learns nothing.

Knows nothing about sockets or how tickets are signed; generations are the lender's to check.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from kvbaton.clock import Clock, MonotonicClock
from kvbaton.transfer.auth import expiry_s
from kvbaton.transfer.wire import Offer, Read


@dataclass
class GrantedOffer:
    offer: Offer
    connection_id: int
    block_size: int
    ready_tokens: list[int]  # by layer; grows. Written by the loop, read by lenders: single items, each exact
    # By part of the reader and layer, a byte for each block: whether it was taken.
    lent: dict[tuple[int, int], bytearray] = field(default_factory=dict)


class TicketBook:
    """Shared by the loop, which grants and revokes, and the lending threads, which ask."""

    def __init__(self, num_layers: int, block_size: int, clock: Clock | None = None) -> None:
        self._clock = clock or MonotonicClock()
        self._num_layers = num_layers
        self._block_size = block_size
        self._lock = threading.Lock()
        self._grants: dict[bytes, GrantedOffer] = {}

    def __len__(self) -> int:
        return len(self._grants)

    def grant(self, offer: Offer, connection_id: int) -> None:
        grant = GrantedOffer(offer, connection_id, self._block_size, [offer.cached_tokens] * self._num_layers)
        with self._lock:
            assert offer.ticket not in self._grants
            self._grants[offer.ticket] = grant

    def advance(self, ticket: bytes, tokens_ready: int, layers_ready: int) -> None:
        with self._lock:
            grant = self._grants.get(ticket)
        if grant is not None:
            for layer in range(min(layers_ready, self._num_layers)):
                grant.ready_tokens[layer] = max(grant.ready_tokens[layer], tokens_ready)

    def expired(self, ticket: bytes) -> bool:
        return self._clock.now_s() >= expiry_s(ticket)

    def revoke(self, ticket: bytes) -> None:
        with self._lock:
            self._grants.pop(ticket, None)

    def find(self, read: Read, layer: int, connection_id: int) -> GrantedOffer | None:
        """The grant that allows this read of this layer, or None."""
        with self._lock:
            grant = self._grants.get(read.ticket)
        if grant is None or grant.connection_id != connection_id or self.expired(read.ticket):
            return None
        if not (read.layer_start <= layer < read.layer_stop <= self._num_layers):
            return None
        if not (0 <= read.block_start < read.block_stop <= len(grant.offer.block_ids)):
            return None
        needed = min(read.block_stop * self._block_size, grant.offer.num_tokens)
        return grant if grant.ready_tokens[layer] >= needed else None

    def take(self, read: Read, layer: int, connection_id: int) -> GrantedOffer | None:
        """``find``, and from now on these blocks of this layer are lent: the same read is refused the next time."""
        grant = self.find(read, layer, connection_id)
        if grant is None:
            return None
        with self._lock:
            lent = grant.lent.setdefault((read.part, layer), bytearray(len(grant.offer.block_ids)))
            if any(lent[read.block_start : read.block_stop]):
                return None
            lent[read.block_start : read.block_stop] = b"\1" * (read.block_stop - read.block_start)
        return grant
