"""Where the cost models start from: a profile file, read for the few numbers that decisions need.

The planner owns the file's format; this reads the fields it knows and leaves the rest alone. Knows nothing about how
the numbers were measured.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from kvbaton.router.cost import COLD_LAYERS, COLD_TOKEN_BYTES, FleetCosts, LinkCost, WorkerCost
from kvbaton.router.learning import Learning
from kvbaton.types import UNREADABLE, LocalError

PROFILE_WEIGHT = 5.0  # samples that a profile is worth


class _Step(msgspec.Struct, frozen=True):
    fixed_s: float
    per_token_s: float
    per_pair_s: float = 0.0
    per_sequence_s: float = 0.0
    per_context_s: float = 0.0


class _Worker(msgspec.Struct, frozen=True):
    token_bytes: int = COLD_TOKEN_BYTES
    num_layers: int = COLD_LAYERS


class _Link(msgspec.Struct, frozen=True):
    startup_s: float
    bytes_per_s: float


class _Profile(msgspec.Struct, frozen=True):
    step: _Step
    worker: _Worker = _Worker()
    link: _Link | None = None
    admission_s: float = 0.0
    control_s: float = 0.0


def learning_from(path: str) -> Learning:
    """``path`` of a profile file; empty: a cold start."""
    return Learning(read_profile(Path(path)), PROFILE_WEIGHT) if path else Learning()


def read_profile(path: Path) -> FleetCosts:
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=_Profile)
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror}", field="router.profile") from None
    except UNREADABLE as error:
        fix = "run kvbaton profile"
        raise LocalError(f"{path} is no profile: {error}", field="router.profile", fix=fix) from None
    step, cold = profile.step, FleetCosts()
    if step.per_token_s <= 0 or step.fixed_s <= 0:
        raise LocalError(f"{path}: steps take no time", field="router.profile", fix="run kvbaton profile again")
    link = cold.link
    if profile.link is not None and not (profile.link.bytes_per_s >= 1.0 and profile.link.startup_s >= 0.0):
        fix = "run kvbaton link again"
        raise LocalError(f"{path}: a link that moves nothing", field="router.profile", fix=fix)
    if profile.link is not None:
        link = LinkCost(profile.link.startup_s, 1.0 / profile.link.bytes_per_s)
    overhead_s = profile.admission_s or cold.overhead_local_s
    return FleetCosts(
        worker=WorkerCost(
            prefill_fixed_s=step.fixed_s,
            prefill_token_s=step.per_token_s,
            prefill_pair_s=step.per_pair_s,
            step_fixed_s=step.fixed_s,
            step_sequence_s=step.per_token_s + step.per_sequence_s,
            step_context_s=step.per_context_s,
        ),
        link=link,
        token_bytes=profile.worker.token_bytes,
        num_layers=profile.worker.num_layers,
        overhead_local_s=overhead_s,
        overhead_remote_s=overhead_s + profile.control_s,
    )
