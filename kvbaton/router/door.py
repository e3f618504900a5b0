"""Who may come in at the router, as whom, and what they share of the prefix cache.

    /health /ready                    everybody: they say nothing but whether it serves
    /metrics                          everybody, unless ``open_metrics`` is off: numbers, no text, no addresses
    /ui /fleet, and /metrics then     operators: the fleet's key, or an API key of the tenant ``operator``
    /internal/...                     the fleet's key alone; the gateway asks for it
    everything else                   an API key, or the fleet's key

That holds where API keys are configured. Without them everybody is let in, and then the router listens on this host
alone unless it is told otherwise, and takes nothing from pages of other sites (``own_pages_only``).

Invariants: a tenant's salt is made from who it is, with the fleet's key, so that no salt a client may choose reaches
another tenant's prefixes; refusals are alike whether a key is missing, wrong or malformed. Knows nothing about requests
beyond their path and headers.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging

from kvbaton.config import RouterSettings
from kvbaton.router.api_keys import MAX_KEY_CHARS, ApiKeys
from kvbaton.transfer.reach import is_loopback, require_secret
from kvbaton.types import LocalError
from kvbaton.workers.http import Exchange
from kvbaton.workers.openai_errors import ApiError
from kvbaton.workers.pages import refuse_strange_pages
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER

log = logging.getLogger(__name__)

OPERATOR = "operator"
_MAX_HEADER_BYTES = 2 * MAX_KEY_CHARS


class Door:
    """``keys`` None: everybody may come in, as nobody in particular."""

    def __init__(
        self, keys: ApiKeys | None, fleet_key: bytes, open_metrics: bool = True, own_pages_only: bool = False
    ) -> None:
        self._keys = keys
        self._fleet_key = fleet_key
        self._own_pages_only = own_pages_only
        self._open = frozenset(("/health", "/ready", *(("/metrics",) if open_metrics else ())))

    def admit(self, exchange: Exchange) -> str:
        """The tenant; empty where there are none, and for the fleet's own processes. ApiError 401 or 403."""
        if self._own_pages_only:
            refuse_strange_pages(exchange.headers)
        path = exchange.path
        if self._keys is None or path in self._open or path.startswith("/internal/"):
            return ""
        if self.knows_fleet(exchange):
            return ""
        key = self._keys.find(_given(exchange.headers.get(b"authorization", b"")))
        for_operators = path in ("/fleet", "/metrics", "/ui") or path.startswith("/ui/")
        if key is None:
            log.info("refused: no valid API key")
            raise _who_are_you("Basic" if path.startswith("/ui") else "Bearer")  # browsers ask people for Basic
        if for_operators and key.tenant != OPERATOR:
            raise ApiError(
                403, "this is for operators of the fleet alone", type="permission_error", code="operators_only"
            )
        return key.tenant

    def knows_fleet(self, exchange: Exchange) -> bool:
        given = exchange.headers.get(INTERNAL_KEY_HEADER, b"")
        return bool(self._fleet_key) and hmac.compare_digest(given, self._fleet_key)

    def salt(self, tenant: str, asked: str) -> str:
        """Of the prefix cache. What the client asked for only narrows its tenant's own."""
        if not tenant:
            return asked
        own = tenant.encode()
        told = len(own).to_bytes(4, "little") + own + asked.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(told, key=self._fleet_key[:64], digest_size=16, person=b"tenant salt").hexdigest()


def check_reach(settings: RouterSettings, keys: ApiKeys | None, fleet_key: str) -> None:
    """LocalError when a stranger could use the model by nobody's decision."""
    require_secret("the router", settings.host, fleet_key.encode())
    if keys is None and not settings.allow_anonymous and not is_loopback(settings.host):
        raise LocalError(
            f"the router on {settings.host} would answer everybody who reaches it",
            field="api_keys_file",
            fix="give --api-keys FILE (one key a line) or KVBATON_API_KEYS; if something before it lets in whom it "
            "should, say --allow-anonymous; or listen on 127.0.0.1",
        )


def _given(header: bytes) -> bytes:
    """The key in an Authorization header; empty when there is none."""
    scheme, _, value = header.partition(b" ")
    value = value.strip()
    if len(header) > _MAX_HEADER_BYTES:
        return b""
    match scheme.lower():
        case b"bearer":
            return value
        case b"basic":  # the password of whatever user
            try:
                return base64.b64decode(value, validate=True).partition(b":")[2]
            except (binascii.Error, ValueError):
                return b""
    return b""


def _who_are_you(scheme: str) -> ApiError:
    error = ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
    error.challenge = f'{scheme} realm="kvbaton"'
    return error
