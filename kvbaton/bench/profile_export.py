"""A measured profile as the file that the planner reads (kvbaton.plan.profile_file).

Rows that are one engine step go in as such; prompts that took several are left to the fit, which knew. Knows nothing
about how rows are measured.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvbaton import __version__
from kvbaton.bench.link import LinkResult
from kvbaton.bench.profile import ProfileResult
from kvbaton.bench.profile_beside import Beside
from kvbaton.kv.layout import KVLayout
from kvbaton.plan.link import LinkModel, LinkRow
from kvbaton.plan.profile_file import Origin, ProfileFile, StepRow, WorkerLimits
from kvbaton.plan.step_time import pairs


def hardware_name() -> str:
    """The processor as the system names it, and how many cores."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass
    return model


def limits_of(layout: KVLayout, num_blocks: int, chunk_tokens: int, max_running: int, max_context: int) -> WorkerLimits:
    return WorkerLimits(
        num_blocks=num_blocks,
        block_size=layout.block_size,
        max_batch_tokens=chunk_tokens,
        max_running=max_running,
        max_context=max_context,
        token_bytes=layout.token_bytes,
        num_layers=layout.num_layers,
    )


def step_rows(found: ProfileResult, chunk_tokens: int) -> list[StepRow]:
    """Single steps only, the overhead of a request taken off."""
    overhead = found.fit.request_overhead_s
    rows = [
        StepRow(
            prefill_tokens=row.tokens,
            prefill_pairs=pairs(row.cached, row.tokens),
            num_chunks=1,
            seconds=max(row.seconds - overhead, 1e-6),
        )
        for row in found.prefill
        if row.tokens <= chunk_tokens
    ]
    rows += [
        StepRow(num_decodes=row.batch, context_tokens=row.context_tokens, seconds=row.seconds) for row in found.decode
    ]
    rows += [
        StepRow(
            prefill_tokens=row.tokens,
            prefill_pairs=pairs(0, row.tokens),
            num_decodes=row.batch,
            context_tokens=row.context_tokens,
            num_chunks=1,
            seconds=row.seconds,
        )
        for row in found.mixed
    ]
    return rows


def to_profile_file(
    found: ProfileResult,
    limits: WorkerLimits,
    origin: Origin,
    link: LinkResult | None,
    notes: Sequence[str] = (),
    beside: Beside | None = None,
) -> ProfileFile:
    link_model = None
    link_rows: tuple[LinkRow, ...] = ()
    if link is not None:
        link_rows = tuple(LinkRow(size.num_bytes, size.p50_ms / 1e3) for size in link.sizes)
        if link.startup_ms is not None and link.gb_per_s is not None:
            link_model = LinkModel(link.startup_ms / 1e3, link.gb_per_s * 1e9, f"measured over {link.transport}")
    held_out = (
        f"held-out error of the step model: median {found.fit.held_out_median:.1%}, p90 {found.fit.held_out_p90:.1%}, "
        f"worst {found.fit.held_out_max:.1%} over {len(found.fit.errors)} rows"
    )
    return ProfileFile(
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        origin=origin,
        worker=limits,
        step=found.fit.model,
        step_rows=tuple(step_rows(found, limits.max_batch_tokens)),
        step_error=sum(abs(error) for error in found.fit.errors) / len(found.fit.errors),
        link=link_model,
        link_rows=link_rows,
        admission_s=found.fit.request_overhead_s if beside is None else beside.admission_s,
        shared_cores=None if beside is None else beside.cores,
        beside_rows=() if beside is None else beside.rows,
        prefill_rate_per_s=found.prefill_goodput.rate_per_s if found.prefill_goodput else None,
        decode_rate_per_s=found.decode_goodput.rate_per_s if found.decode_goodput else None,
        notes=(held_out, *notes),
    )


def origin_of_run(found: ProfileResult, engine: str, revision: str, hardware: str) -> Origin:
    return Origin(
        engine=engine,
        engine_version=__version__ if engine == "kvbaton" else "unknown",
        model_id=found.model,
        model_revision=revision,
        hardware=hardware or hardware_name(),
    )
