"""Who can reach an address we listen on: this host alone, or others too; and what that asks for.

Invariant: nothing of a fleet listens beyond this host without a secret that cannot be guessed. Knows nothing about who
is let in.
"""

from __future__ import annotations

import ipaddress
import socket

from kvbaton.types import LocalError

MIN_SECRET_BYTES = 16
VARIABLE = "KVBATON_INTERNAL_KEY"


def is_wildcard(host: str) -> bool:
    """Every address of this machine, which as the address of a peer means the machine that reads it."""
    address = _address(host)
    return address is not None and address.is_unspecified


def is_own_machine(host: str) -> bool:
    """Whether whoever reads it takes it for its own machine. No name but ``localhost`` is looked up."""
    address = _address(host)
    if address is None:
        return host.lower().rstrip(".") == "localhost"
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def in_url(host: str) -> str:
    """``host`` as it stands before a port: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def why_not_reached(error: Exception) -> str:
    """The system's own words for a connection that failed, without the library's around them."""
    return getattr(getattr(error, "os_error", error), "strerror", None) or str(error) or type(error).__name__


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """True only if every address that ``host`` stands for is of this host alone. An empty host is every interface."""
    if not host:
        return False
    if (address := _address(host)) is not None:
        return address.is_loopback
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)


def require_secret(what: str, host: str, secret: bytes) -> None:
    """LocalError when ``what`` would listen on ``host`` for others without the fleet's secret, or with a short one."""
    if len(secret) >= MIN_SECRET_BYTES or is_loopback(host):
        return
    why = f"a secret of {len(secret)} bytes can be guessed" if secret else "anybody who reaches it could use it"
    raise LocalError(
        f"{what} on {host or 'every interface'}: {why}",
        field=VARIABLE,
        fix=f"set one secret of {MIN_SECRET_BYTES} bytes or more in {VARIABLE} for router and workers "
        "(openssl rand -base64 32), or listen on 127.0.0.1",
    )
