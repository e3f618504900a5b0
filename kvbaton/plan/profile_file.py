"""The profile file: what ``kvbaton profile`` measured of one running worker, and what ``plan`` reads.

    {version, origin: {engine, engine_version, model_id, model_revision, hardware}, worker: {limits and KV layout},
     step: {fitted coefficients}, step_rows: [measured steps], link: {alpha, beta}, link_rows: [measured transfers],
     shared_cores: {what busy workers of one machine cost each other}, beside_rows: [measured steps alone and beside]}

Raw rows stay in the file, so that a later version can fit them again. A profile taken on another engine version, model
or hardware than planned for is a warning that ends up in the result, never a silent use.

Knows nothing about how steps are timed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from kvbaton.plan.least_squares import relative_nonnegative
from kvbaton.plan.link import LinkModel, LinkRow, fit_link
from kvbaton.plan.sim_host import SharedCores
from kvbaton.plan.sim_spec import WorkerSpec
from kvbaton.plan.step_time import StepModel, StepWork
from kvbaton.types import UNREADABLE, LocalError

PROFILE_VERSION = 1


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured. Everything that makes the numbers wrong elsewhere."""

    engine: str  # kvbaton, vllm, sglang
    engine_version: str
    model_id: str
    model_revision: str
    hardware: str  # CPU or GPU model and count, as text
    cores_per_worker: int | None = None
    weight_format: str = ""


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits the scheduler worked under, and the KV layout."""

    num_blocks: int
    block_size: int
    max_batch_tokens: int
    max_running: int
    max_context: int
    token_bytes: int  # KV bytes of one token, all layers
    num_layers: int
    num_gpus: int = 1
    max_chunk_tokens: int | None = None


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measured step (or the median of equal ones)."""

    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    num_decodes: int = 0
    context_tokens: int = 0
    num_chunks: int = 0
    seconds: float

    @property
    def work(self) -> StepWork:
        return StepWork(self.prefill_tokens, self.prefill_pairs, self.num_decodes, self.context_tokens, self.num_chunks)


class BesideRow(msgspec.Struct, frozen=True):
    streams: int  # on each worker
    alone_s: float  # a step of theirs, the other workers idle
    beside_s: float  # all workers busy


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int = PROFILE_VERSION
    measured_at: str = ""  # ISO time, for people
    origin: Origin
    worker: WorkerLimits
    step: StepModel
    step_rows: tuple[StepRow, ...] = ()
    step_error: float = 0.0  # mean relative error of the fit over its rows
    link: LinkModel | None = None
    link_rows: tuple[LinkRow, ...] = ()
    admission_s: float = 0.0  # idle TTFT minus the prefill step: HTTP, tokenizer, queue, first byte
    control_s: float = 0.0  # one message between workers
    shared_cores: SharedCores | None = None  # None: not measured, or the workers share nothing
    beside_rows: tuple[BesideRow, ...] = ()
    prefill_rate_per_s: float | None = None  # goodput of one prefill-only worker, if it was measured
    decode_rate_per_s: float | None = None
    notes: tuple[str, ...] = ()

    def worker_spec(self, prefix_caching: bool = True) -> WorkerSpec:
        """The worker as the simulator wants it."""
        limits = self.worker
        return WorkerSpec(
            step=self.step,
            num_blocks=limits.num_blocks,
            block_size=limits.block_size,
            max_batch_tokens=limits.max_batch_tokens,
            max_running=limits.max_running,
            max_context=limits.max_context,
            max_chunk_tokens=limits.max_chunk_tokens,
            prefix_caching=prefix_caching,
            num_gpus=limits.num_gpus,
        )

    def mismatches(self, wanted: Origin) -> list[str]:
        """Where the profile was taken on something else, in words for the report."""
        return [
            f"profile was taken with {name} {getattr(self.origin, name)!r}, the plan is for {getattr(wanted, name)!r}"
            for name in ("engine", "engine_version", "model_id", "model_revision", "hardware")
            if getattr(wanted, name) and getattr(wanted, name) != getattr(self.origin, name)
        ]


class StepFit(msgspec.Struct, frozen=True):
    model: StepModel
    mean_error: float  # relative
    worst_error: float


def fit_steps(rows: list[StepRow], source: str) -> StepFit:
    """Coefficients from measured steps: nonnegative, smallest squared relative errors.

    Needs prefill steps of different lengths and decode steps of different batch sizes and contexts; what a chunk costs
    by itself shows only in steps that hold both.
    """
    if len(rows) < 6:
        raise LocalError(f"{len(rows)} measured steps are too few to fit", field="step_rows", fix="measure at least 6")
    features = np.array(
        [
            [1.0, row.prefill_tokens + row.num_decodes, row.prefill_pairs, row.num_decodes, row.context_tokens,
             row.num_chunks]
            for row in rows
        ]
    )  # fmt: skip
    if not any(row.num_chunks and row.num_decodes for row in rows):
        features[:, -1] = 0.0
    measured = np.array([row.seconds for row in rows])
    if (measured <= 0).any():
        raise LocalError("a measured step takes no time", field="step_rows.seconds")
    fixed, token, pair, sequence, context, chunk = map(float, relative_nonnegative(features, measured))
    model = StepModel(fixed, token, pair, sequence, context, source=source, per_chunk_s=chunk)
    errors = np.array([model.step_s(row.work) / row.seconds - 1.0 for row in rows])
    return StepFit(model, float(np.abs(errors).mean()), float(np.abs(errors).max()))


def build(origin: Origin, worker: WorkerLimits, step_rows: list[StepRow], link_rows: list[LinkRow],
          **more: object) -> ProfileFile:  # fmt: skip
    """A profile from raw rows: fits step and link."""
    name = f"{origin.engine} {origin.engine_version} on {origin.hardware}"
    steps = fit_steps(step_rows, f"measured: {name}")
    link = fit_link(link_rows, f"measured: {name}").model if len({row.num_bytes for row in link_rows}) > 1 else None
    return ProfileFile(
        origin=origin,
        worker=worker,
        step=steps.model,
        step_rows=tuple(step_rows),
        step_error=steps.mean_error,
        link=link,
        link_rows=tuple(link_rows),
        **more,  # type: ignore[arg-type]
    )


def write_profile(profile: ProfileFile, path: str | Path) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def read_profile(path: str | Path) -> ProfileFile:
    try:
        profile = msgspec.json.decode(Path(path).read_bytes(), type=ProfileFile)
    except OSError as error:
        raise LocalError(f"cannot read {path}: {error.strerror}", field="profile") from None
    except UNREADABLE as error:
        raise LocalError(f"{path} is no profile: {error}", field="profile", fix="run kvbaton profile") from None
    if profile.version != PROFILE_VERSION:
        raise LocalError(f"{path} has version {profile.version}, not {PROFILE_VERSION}", field="profile.version")
    return profile
