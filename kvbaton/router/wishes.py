"""What a client may ask of the router in headers: how long it will wait, and whether a broken stream may be continued.

Invariant: a wish can only narrow what the settings allow. Knows nothing about bodies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvbaton.workers.openai_errors import bad_request

TIMEOUT_HEADER = b"x-request-timeout-ms"
REPLAY_HEADER = b"x-kvbaton-replay"


@dataclass(frozen=True)
class Wishes:
    timeout_s: float  # for the whole request, the queue and every retry included
    replay: bool = True  # a stream whose worker fails may be continued on another


@lru_cache(maxsize=16)
def _usual(longest_s: float) -> Wishes:
    """Of those who wish for nothing."""
    return Wishes(longest_s)


def read_wishes(headers: Mapping[bytes, bytes], longest_s: float) -> Wishes:
    """ApiError 400 that names the header when it makes no sense."""
    if TIMEOUT_HEADER not in headers and REPLAY_HEADER not in headers:
        return _usual(longest_s)
    timeout_s, raw = longest_s, headers.get(TIMEOUT_HEADER)
    if raw is not None:
        if not (raw.isdigit() and len(raw) <= 12 and int(raw) > 0):
            raise bad_request(
                "x-request-timeout-ms must be a whole number of milliseconds above 0", TIMEOUT_HEADER.decode()
            )
        timeout_s = min(longest_s, int(raw) / 1e3)
    replay = headers.get(REPLAY_HEADER, b"allow").lower()
    if replay not in (b"allow", b"never"):
        raise bad_request("x-kvbaton-replay must be allow or never", REPLAY_HEADER.decode())
    return Wishes(timeout_s, replay == b"allow")
