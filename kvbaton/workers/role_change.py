"""Another role for a worker while it runs: its open work ends first, and nothing is cut off for it.

Invariants: from the first moment the worker says ``switching``, so that nothing new is sent to it; it either becomes
the new role or, when its open work has not ended by the deadline, takes requests again in the old one; one change at a
time; a drain that begins meanwhile wins. Knows nothing about how a worker does it, or who asks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from kvbaton.types import UNREADABLE, Role
from kvbaton.workers.openai_errors import ApiError, bad_request

if TYPE_CHECKING:
    from kvbaton.workers.server import WorkerServer

MAX_BODY_BYTES = 4096


class RoleChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /internal/role``."""

    role: Role
    deadline_s: float = 60.0  # for what is open to end


class Drain(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of ``POST /internal/drain``; it may be empty."""

    deadline_s: float | None = None  # None: what the worker was started with


def decode_drain(raw: bytes) -> Drain:
    try:
        return msgspec.json.decode(raw, type=Drain) if raw.strip() else Drain()
    except UNREADABLE as error:
        raise bad_request(str(error), "drain") from None


async def change_role(server: WorkerServer, raw: bytes) -> None:
    """Carry it out, or raise ApiError with the worker as it was."""
    try:
        change = msgspec.json.decode(raw, type=RoleChange)
    except UNREADABLE as error:
        raise bad_request(str(error), "role") from None
    if server.state != "serving":
        raise ApiError(409, f"the worker is {server.state}", param="role", code="not_serving")
    if change.role == server.worker.role:
        return
    server.state = "switching"
    started_s, why = server.clock.now_s(), f"requests were still open after {change.deadline_s:g} s"
    try:
        done = await server.open.idle(change.deadline_s)
        if done and server.state == "switching":
            left_s = max(0.0, change.deadline_s - (server.clock.now_s() - started_s))
            why = "peers still read from it at the deadline, or its engine does only what it was started for"
            done = await server.worker.switch_role(change.role, left_s)
    finally:
        if server.state == "switching":
            server.state = "serving"
    if not done:
        raise ApiError(
            409,
            f"{why}; the role is {server.worker.role} as before",
            param="deadline_s",
            code="still_busy",
        )
    server.role_changes += 1
    server.metrics.set_role(server.worker.role)
