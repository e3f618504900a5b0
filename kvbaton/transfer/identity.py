"""Who may hand KV to whom, and by which way.

Invariants: two workers exchange KV only if their fingerprints are equal and their layouts differ in nothing but what
kv/reshard converts; shared memory is chosen only where the peer's segment can be opened. Knows nothing about sockets or
sessions.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from kvbaton.kv.compat import blocking, differences, layout_differences
from kvbaton.kv.shared_pool import SHM_DIR
from kvbaton.transfer.wire import HostIdentity, Identity
from kvbaton.types import LocalError

TransportChoice = Literal["auto", "shm", "tcp", "nixl"]
Transport = Literal["shm", "tcp", "nixl"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> HostIdentity:
    """Of this process. Where the system does not tell, an identity that matches no other."""
    try:
        return HostIdentity(_BOOT_ID.read_text().strip(), os.stat(SHM_DIR).st_dev)
    except OSError:
        return HostIdentity(f"unknown-{os.getpid()}", 0)


def refusals(prefill: Identity, decode: Identity) -> tuple[str, ...]:
    """Why KV must not move between the two, a line for each field that differs; empty when it may."""
    found = differences(prefill.fingerprint, decode.fingerprint)
    named = {difference.field for difference in found}
    # The layout is asked too: one that contradicts its own fingerprint would be converted into nonsense.
    found += [
        difference
        for difference in blocking(layout_differences(prefill.layout, decode.layout))
        if difference.field not in named and not (difference.field == "dtype" and "kv_dtype" in named)
    ]
    return tuple(
        f"{difference.field}: prefill {difference.ours}, decode {difference.theirs}"[:2000] for difference in found
    )


def choose_transport(choice: TransportChoice, theirs: Identity, ours: HostIdentity) -> Transport:
    """``auto`` is shared memory wherever it can be, else tcp; demanding a way that is not there is an error."""
    if choice == "tcp":
        return "tcp"
    if choice == "nixl":
        if theirs.nixl is None:
            raise LocalError(
                f"transport nixl is not possible with peer {theirs.incarnation}: it has not registered its pool",
                field="transport",
                fix="start both workers with --transport nixl",
            )
        return "nixl"
    if theirs.shm_name is not None and theirs.host == ours:
        return "shm"
    if choice == "shm":
        reason = "it has no named pool" if theirs.shm_name is None else "it is on another host or in another container"
        raise LocalError(
            f"transport shm is not possible with peer {theirs.incarnation}: {reason}",
            field="transport",
            fix="use --transport auto or tcp, or let both share /dev/shm",
        )
    return "tcp"
