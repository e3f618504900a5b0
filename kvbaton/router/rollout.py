"""Which arm of a percentage rollout a request belongs to, the same one every time.

Sticky by the first of these that a request has: ``user``, ``cache_salt``, the first tokens of its first prompt (in most
traffic a system prompt). The hash maps that to a bucket from 0 up to 100; the split gets those below
``disagg_percent``, so raising the share moves nobody back. Pure; knows nothing about what is decided for the arm.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from kvbaton.types import LocalError

FIRST_TOKENS = 32  # of a prompt that has neither a user nor a salt
_RANGE = 1 << 64


class Rollout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``PUT /internal/rollout``."""

    disagg_percent: float

    def __post_init__(self) -> None:
        if not 0 <= self.disagg_percent <= 100:
            raise LocalError(f"disagg_percent is {self.disagg_percent}", field="disagg_percent", fix="use 0 to 100")


def bucket(user: str, cache_salt: str, prompt: Sequence[int]) -> float:
    if user:
        key = b"u" + user.encode()
    elif cache_salt:
        key = b"s" + cache_salt.encode()
    else:
        key = b"p" + array("q", prompt[:FIRST_TOKENS]).tobytes()
    return int.from_bytes(blake2b(key, digest_size=8).digest(), "big") / _RANGE * 100.0
