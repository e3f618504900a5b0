"""How a hand-off goes wrong, by whose fault and whether trying again may help.

Knows nothing about sockets. Every one of them means: the destination blocks hold nothing that may be decoded from.
"""

from __future__ import annotations

from kvbaton.types import RemoteError


class HandoffError(RemoteError):
    """Base of what a pull raises on account of the peer or the way to it.

    ``retryable``: the same request may work elsewhere, or later.
    """

    retryable = True


class PeerUnreachable(HandoffError):
    """No connection could be made, or the one there was broke."""


class PeerRefused(HandoffError):
    """The handshake failed: ``differences`` names each field on which the two sides disagree."""

    retryable = False

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        field, fix = "fingerprint", "run both roles from the same model, settings and version"
        if any(difference.startswith("KVBATON_INTERNAL_KEY") for difference in differences):
            field, fix = "KVBATON_INTERNAL_KEY", "start every worker of the fleet with the same one"
        super().__init__(message, field=field, fix=fix)
        self.differences = differences


class ProtocolViolation(HandoffError):
    """The peer sent what the protocol does not allow; the connection is dropped."""


class LeaseLost(HandoffError):
    """The offered blocks may have been reused: nothing read from them counts."""


class TransferCorrupt(HandoffError):
    """Bytes arrived that are not the bytes sent."""


class DeadlineExceeded(HandoffError):
    """The peer was not done in time."""


class PrefillFailed(HandoffError):
    """The prefill side gave up on the request; the message says why."""
