"""The numbers a hand-off runs by. Both shells receive them complete; nobody reads a global."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvbaton.transfer.identity import TransportChoice
from kvbaton.types import LocalError


@dataclass(frozen=True)
class HandoffOptions:
    """Defaults suit one data centre. Every wait on a peer is bounded by one of the ``_s`` below or by the request's."""

    transport: TransportChoice = "auto"
    streaming: bool = True  # read layers while later ones are computed; off only to measure what it is worth
    lease_s: float = 30.0  # must be the engine's: it pins, the hand-off renews at a third of it
    connect_s: float = 5.0  # connecting and shaking hands
    frame_s: float = 5.0  # a frame that has begun must be complete in this time
    heartbeat_s: float = 2.0  # the reader says something at least this often ...
    silence_s: float = 15.0  # ... and a side that hears nothing for this long takes the other one for dead
    stall_s: float = 10.0  # a read that was asked for and brings no byte for this long has failed
    max_copy_bytes: int = 8 * 2**20  # one copy; bounds how long an abort waits for the copy in flight
    nixl_copy_bytes: int = 32 * 2**20  # one copy over NIXL, of which one is in flight for a request
    max_copies: int = 2  # in flight for one request; with the above, what one request may have outstanding
    max_connections: int = 256
    max_sessions: int = 4096  # requests in progress on one connection
    max_strangers: int = 64  # connections that have not proved themselves yet; beyond it the oldest of them goes
    ticket_s: float = 3600.0  # nothing is read by a ticket older than that, however often its lease was renewed
    secret: bytes = field(default=b"", repr=False)  # the fleet's; without one a lender listens on loopback alone

    def __post_init__(self) -> None:
        positive = ("lease_s", "connect_s", "frame_s", "heartbeat_s", "stall_s")
        for name in (*positive, "max_copy_bytes", "nixl_copy_bytes", "max_copies"):
            if getattr(self, name) <= 0:
                raise LocalError(f"{name} must be positive, got {getattr(self, name)}", field=name)
        if self.max_strangers < 1 or self.ticket_s < self.lease_s:
            raise LocalError("a ticket must outlast a lease, and one stranger be heard", field="ticket_s")
        if self.silence_s < 2 * self.heartbeat_s:
            raise LocalError(
                f"silence_s {self.silence_s} allows less than two heartbeats of {self.heartbeat_s} s", field="silence_s"
            )
