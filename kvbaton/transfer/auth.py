"""What two workers of one fleet prove to each other, and how a ticket is signed.

    reader                                      lender
      Hello{version, nonce}        ---------->
                                   <----------  Challenge{nonce}
      Proof{identity, tag}         ---------->    tag over both nonces and the identity, under the fleet's secret
                                   <----------  HelloReply{identity, data token, tag}
      DataHello{token, nonce, tag} ---------->    on the data connection, under the key of this session alone
                                   <----------  DataWelcome{tag}

Invariants: the reader proves itself first, so that a stranger learns nothing but the version; a proof holds for one
pair of nonces, one side and one purpose, so that none can be replayed, turned round or used elsewhere; secrets and
proofs are compared in constant time and never shown. A ticket is ``id | expiry | tag``: the tag binds it to one
request, one reader, one lender and one connection.

What crosses is authenticated where connections begin, not encrypted: whoever can change packets between two workers
needs to be kept off their network (docs/security.md). Knows nothing about sockets or frames.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

NONCE_BYTES = 32
TAG_BYTES = 32
TICKET_ID_BYTES = 16
TICKET_TAG_BYTES = 16
TICKET_BYTES = TICKET_ID_BYTES + 8 + TICKET_TAG_BYTES
_CONTEXT = b"kvbaton hand-off 2"  # another protocol derives other keys from the same secret


def fresh_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def _tag(key: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 of the parts, each with its length, so that no two lists of parts are one message."""
    return hmac.digest(key, b"".join(len(part).to_bytes(8, "little") + part for part in parts), "sha256")


@dataclass(frozen=True)
class Handshake:
    """One connection's nonces under the fleet's secret (empty: a fleet of one host that has none)."""

    secret: bytes = field(repr=False)
    reader_nonce: bytes
    lender_nonce: bytes

    def of_reader(self, identity: bytes) -> bytes:
        return _tag(self._key, b"reader", self.reader_nonce, self.lender_nonce, identity)

    def of_lender(self, identity: bytes, data_token: bytes) -> bytes:
        return _tag(self._key, b"lender", self.reader_nonce, self.lender_nonce, identity, data_token)

    def session(self, reader: str, lender: str) -> Session:
        key = _tag(self._key, b"session", self.reader_nonce, self.lender_nonce, reader.encode(), lender.encode())
        return Session(key, reader, lender)

    @property
    def _key(self) -> bytes:
        return _tag(self.secret, _CONTEXT)


@dataclass(frozen=True)
class Session:
    """What the two ends of one connection know after their handshake, and nobody else. By incarnation."""

    key: bytes = field(repr=False)
    reader: str
    lender: str

    def of_data_reader(self, data_token: bytes, nonce: bytes) -> bytes:
        return _tag(self.key, b"data reader", data_token, nonce)

    def of_data_lender(self, data_token: bytes, nonce: bytes) -> bytes:
        return _tag(self.key, b"data lender", data_token, nonce)

    def sign_ticket(self, request_id: str, expires_s: float) -> bytes:
        """A fresh ticket. ``expires_s``: on the lender's clock, which alone judges it."""
        body = secrets.token_bytes(TICKET_ID_BYTES) + int(expires_s * 1000).to_bytes(8, "little")
        return body + self._ticket_tag(body, request_id)

    def signed(self, ticket: bytes, request_id: str) -> bool:
        """Whether this is a ticket of this session for that request."""
        body, tag = ticket[:-TICKET_TAG_BYTES], ticket[-TICKET_TAG_BYTES:]
        return len(ticket) == TICKET_BYTES and same(tag, self._ticket_tag(body, request_id))

    def _ticket_tag(self, body: bytes, request_id: str) -> bytes:
        parts = (b"ticket", body, request_id.encode(), self.reader.encode(), self.lender.encode())
        return _tag(self.key, *parts)[:TICKET_TAG_BYTES]


def expiry_s(ticket: bytes) -> float:
    return int.from_bytes(ticket[TICKET_ID_BYTES : TICKET_ID_BYTES + 8], "little") / 1000


def same(given: bytes, expected: bytes) -> bool:
    """In a time that tells nothing of where they differ."""
    return hmac.compare_digest(given, expected)
