"""Who may hand KV to whom, and by which way.

Invariants: two workers exchange KV only if their fingerprints and layouts differ in nothing but what kv/reshard
converts, and the ranks of each together hold every head; shared memory is chosen only where the peer's segment can be
opened. Knows nothing about sockets or sessions.
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
    found = blocking(differences(prefill.fingerprint, decode.fingerprint))
    named = {difference.field for difference in found}
    # The layout is asked too: one that contradicts its own fingerprint would be converted into nonsense.
    found += [
        difference
        for difference in blocking(layout_differences(prefill.layout, decode.layout))
        if difference.field not in named and not (difference.field == "dtype" and "kv_dtype" in named)
    ]
    lines = [f"{difference.field}: prefill {difference.ours}, decode {difference.theirs}" for difference in found]
    for who, identity in (("prefill", prefill), ("decode", decode)):
        if problem := _rank_problem(identity):
            lines.append(f"ranks: {who} {problem}")
    return tuple(line[:2000] for line in lines)


def _rank_problem(identity: Identity) -> str:
    """What is wrong with the ranks a worker says it has; empty when together they hold every head."""
    num_ranks, num_heads = len(identity.ranks), identity.layout.num_kv_heads
    if num_ranks != (identity.fingerprint.tp_size if identity.fingerprint.tp_size > 1 else 0):
        return f"says tensor parallelism {identity.fingerprint.tp_size} and names {num_ranks} ranks"
    position = 0
    for rank in sorted(identity.ranks, key=lambda rank: rank.first_head):
        if rank.first_head > position or rank.first_head + rank.num_heads > num_heads:
            return f"has a rank with {rank.num_heads} KV heads from {rank.first_head} on"
        position = max(position, rank.first_head + rank.num_heads)
    return "" if position == num_heads or not num_ranks else f"has no rank with KV head {position}"


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
