"""Pages of other sites, where nobody is asked who they are because only this host can come in.

A browser is on this host too, and does what any page says that somebody looks at: send a body to a port of loopback,
or, when the page's own name was made to point there once it was loaded (DNS rebinding), read the answers as well. Such
a request says that it is of a browser, and names where it means to go and where its page came from.

Invariants: what is no browser is never refused, whatever else it says; a name is judged as it is written and never
looked up. Knows nothing about keys: where they are asked for, a page of somebody else's has none.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from kvbaton.workers.openai_errors import ApiError

# A browser sends one of them with all that a page can make it send to another place, or read from its own.
_OF_BROWSERS = (b"origin", b"sec-fetch-site")


def refuse_strange_pages(headers: Mapping[bytes, bytes]) -> None:
    """ApiError 403 for a browser that was led here, or that a page of another host sends."""
    if not any(name in headers for name in _OF_BROWSERS):
        return
    origin = headers.get(b"origin")
    if _is_of_this_host(headers.get(b"host", b"")) and (origin is None or _is_of_this_host(_authority(origin))):
        return
    raise ApiError(
        403,
        "a page of another site asks, and nobody here is asked for a key: open it at 127.0.0.1, let clients in by API "
        "keys, or say that everybody may (--allow-anonymous; for a worker --clients allow)",
        type="permission_error",
        code="strange_page",
    )


def _authority(origin: bytes) -> bytes:
    """Of ``scheme://host:port``; empty for the ``null`` of pages that have no origin."""
    scheme, found, rest = origin.partition(b"://")
    return rest if found and scheme.lower() in (b"http", b"https") else b""


def _is_of_this_host(authority: bytes) -> bool:
    text = authority.decode("latin-1").lower()
    name = text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    name = name.removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):  # no browser looks these up
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
