"""What ``plan`` answers: plain structs, encoded as JSON and drawn by the report.

Knows nothing about how they are found.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from kvbaton.plan.sim_result import Percentiles, PoolUse
from kvbaton.plan.sizing import Layout
from kvbaton.plan.trace_stats import TraceStats

VerdictWord = Literal["split", "stay", "not enough evidence"]
Leaning = Literal["split", "stay", "neutral"]


class Band(msgspec.Struct, frozen=True):
    low: float
    high: float


class Spread(msgspec.Struct, frozen=True):
    """The least and the most of each figure while uncertain constants are turned up and down, one at a time."""

    low: Percentiles
    high: Percentiles


class Cost(msgspec.Struct, frozen=True):
    usd_per_hour: float
    gpu_hours_per_hour: float
    usd_per_million_output: float  # blended: every GPU charged to output tokens
    usd_per_million_prompt: float | None  # prefill pool alone, to prompt tokens; None when colocated
    usd_per_million_output_decode_pool: float | None  # decode pool alone, to output tokens


class Arm(msgspec.Struct, frozen=True):
    """One way to spend the GPUs."""

    layout: Layout
    label: str
    goodput_per_s: float
    goodput_per_gpu: float
    goodput_per_usd_hour: float
    gpus_for_rate: int | None  # to serve the wanted rate; None when no rate was given
    at_rate_per_s: float  # the rate the figures below hold for
    attainment: float
    ttft: Percentiles
    tpot: Percentiles
    ttft_band: Spread
    tpot_band: Spread
    p99_gap_s: float
    p90_exposed_s: float
    token_hit: float
    pools: tuple[PoolUse, ...]
    cost: Cost


class Condition(msgspec.Struct, frozen=True):
    """One line of the decision matrix."""

    question: str
    measured: str
    leaning: Leaning
    why: str


class Suggestion(msgspec.Struct, frozen=True):
    what: str
    gain: str
    source: str  # simulated, computed, or not evaluated


class Sensitivity(msgspec.Struct, frozen=True):
    change: str
    advantage: float
    verdict: VerdictWord


class Uncertain(msgspec.Struct, frozen=True):
    """The advantage when one constant is off, for both arms alike."""

    what: str
    factor: float
    advantage: float


class DriftBand(msgspec.Struct, frozen=True):
    """Prompt tokens for each output token between which the chosen pools stay within their goodput."""

    now: float
    low: float
    high: float


class Dimension(msgspec.Struct, frozen=True):
    """One thing the search varied: what it tried, on single workers or whole fleets, and what either arm ended with."""

    name: str
    tried: tuple[str, ...]
    single: str
    split: str


class Answer(msgspec.Struct, frozen=True):
    name: str
    verdict: VerdictWord
    reason: str
    measure_next: tuple[str, ...]
    advantage: float | None  # goodput per dollar of the split over that of the single pool
    advantage_band: Band | None
    margin: float
    num_gpus: int
    slo: str
    colocated: Arm
    split: Arm | None
    threshold_tokens: int | None
    matrix: tuple[Condition, ...]
    cheaper: tuple[Suggestion, ...]
    sensitivity: tuple[Sensitivity, ...]
    uncertainty: tuple[Uncertain, ...]
    drift: DriftBand | None
    searched: tuple[Dimension, ...]
    trace: TraceStats
    prompt_buckets: tuple[tuple[int, int], ...]  # (upper edge, requests)
    step_source: str
    link_source: str
    warnings: tuple[str, ...]
    num_simulations: int
    ttft_s: float | None = None  # the two limits of ``slo``; None: a plan of a version that did not say
    tpot_s: float | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)
