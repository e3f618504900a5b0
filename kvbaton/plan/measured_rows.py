"""Measured closed-loop rows (TTFT and TPOT by concurrency) turned into roofline constants, and back into predictions.

In a closed loop of c streams each stream sees, while it decodes, about c - 1 prefills of the others: their time
spread over its output is part of the TPOT. Rows whose cache need exceeds the memory are flagged, never extrapolated:
their TPOT is that of the fewer streams that fit, and their TTFT is queueing.

Knows nothing about which rows are right; the fit reports its errors.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.plan.hardware import gpu
from kvbaton.plan.kv_math import KVCost, Sharding, kv_format
from kvbaton.plan.least_squares import relative_nonnegative
from kvbaton.plan.model_shape import ModelShape
from kvbaton.plan.model_weights import Weights, count_weights
from kvbaton.plan.step_time import Efficiency, kv_budget_bytes, roofline
from kvbaton.types import LocalError

CONSTANTS = ("fixed_ms", "mbu", "mbu_kv", "mfu", "all_reduce_us", "link_efficiency")


class Row(msgspec.Struct, frozen=True):
    """One measured point. Lengths are means, not nominal."""

    gpu: str
    tp: int
    concurrency: int
    prompt_tokens: float
    output_tokens: float
    ttft_s: float
    tpot_s: float


class RowModel(msgspec.Struct, frozen=True):
    """The model and precision all rows share."""

    shape: ModelShape
    weight_bits: int = 8
    kv_dtype: str = "auto"

    @property
    def weights(self) -> Weights:
        return count_weights(self.shape)

    def cost(self, tp: int) -> KVCost:
        return KVCost(self.shape, kv_format(self.kv_dtype, self.shape), Sharding(tp=tp))


class RowFit(msgspec.Struct, frozen=True):
    efficiency: Efficiency
    num_rows: int
    num_flagged: int
    mean_relative_error: float


class Prediction(msgspec.Struct, frozen=True):
    row: Row
    memory_full: bool
    tpot_s: float | None  # None where the row is memory-full: no extrapolation
    relative_error: float | None


def read_rows(path: Path) -> list[Row]:
    """A table of system, tp, concurrency, mean_ttft_ms, mean_tpot_ms, and prompt_tokens and output_tokens (means).

    Or, as in llama70b-rows, isl_nominal and osl_nominal, of which lengths were drawn from 0.8 to 1.0: 0.9 in the mean.
    """
    try:
        with path.open(newline="") as lines:
            return [_row(number, row) for number, row in enumerate(csv.DictReader(lines), 2)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise LocalError(f"cannot read {path}: {error}", field="engine.rows") from None


def _row(number: int, row: Mapping[str, str]) -> Row:
    try:
        lengths = [
            float(row[mean]) if mean in row else 0.9 * float(row[nominal])
            for mean, nominal in (("prompt_tokens", "isl_nominal"), ("output_tokens", "osl_nominal"))
        ]
        found = Row(
            _named(row["system"]), int(float(row["tp"])), int(float(row["concurrency"])), lengths[0], lengths[1],
            float(row["mean_ttft_ms"]) / 1e3, float(row["mean_tpot_ms"]) / 1e3,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise LocalError(f"line {number} of the rows: {error!r}", field="engine.rows",
                         fix="system, tp, concurrency, prompt_tokens, output_tokens, mean_ttft_ms, mean_tpot_ms"
                         ) from None  # fmt: skip
    if min(found.tp, found.concurrency, found.prompt_tokens, found.output_tokens, found.tpot_s) <= 0:
        raise LocalError(f"line {number} of the rows has a figure that is not positive", field="engine.rows")
    return found


def _named(system: str) -> str:
    gpu(system)  # known, or an error that names those that are
    return system.replace("_", "-")


def memory_full(row: Row, model: RowModel) -> bool:
    """Whether the streams' mean cache need exceeds what the GPUs have left beside the weights."""
    cost = model.cost(row.tp)
    budget = kv_budget_bytes(gpu(row.gpu), cost, model.weights, model.weight_bits)
    need = row.concurrency * (row.prompt_tokens + row.output_tokens / 2) * cost.token_bytes
    return need > budget


def _loads(row: Row, model: RowModel) -> list[float]:
    """The TPOT of a row as a linear form in (fixed_ms, 1/mbu, 1/mbu_kv, 1/mfu, all_reduce_us, 1/link_efficiency)."""
    unit = Efficiency(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0)
    device, cost, weights = gpu(row.gpu), model.cost(row.tp), model.weights
    ideal = roofline(cost, weights, device, unit, model.weight_bits)
    hop = roofline(cost, weights, device, msgspec.structs.replace(unit, all_reduce_us=1.0), model.weight_bits)
    flop_s = 2.0 * weights.active / (device.flops(model.weight_bits) * row.tp)
    comm_s = ideal.per_token_s - flop_s
    context = row.prompt_tokens + row.output_tokens / 2
    prefills = (row.concurrency - 1) / row.output_tokens
    tokens = row.concurrency + prefills * row.prompt_tokens
    pair_s = ideal.per_pair_s * prefills * row.prompt_tokens**2 / 2
    return [
        1e-3,
        ideal.fixed_s,
        ideal.per_context_s * row.concurrency * context,
        flop_s * tokens + pair_s,
        hop.fixed_s - ideal.fixed_s,
        comm_s * tokens,
    ]


def fit_rows(rows: list[Row], model: RowModel, source: str) -> RowFit:
    """Roofline constants from the rows that fit in memory."""
    usable = [row for row in rows if not memory_full(row, model)]
    if len(usable) < 2 * len(CONSTANTS):
        raise LocalError(f"{len(usable)} usable rows are too few for {len(CONSTANTS)} constants", field="rows")
    features = np.array([_loads(row, model) for row in usable])
    measured = np.array([row.tpot_s for row in usable])
    fixed_ms, weight, context, flop, hop_us, comm = relative_nonnegative(features, measured)
    errors = np.abs(features @ np.array([fixed_ms, weight, context, flop, hop_us, comm]) / measured - 1.0)
    efficiency = Efficiency(
        mfu=_inverse(flop), mbu=_inverse(weight), mbu_kv=_inverse(context), fixed_ms=float(fixed_ms), sequence_us=0.0,
        all_reduce_us=float(hop_us), link_efficiency=_inverse(comm), source=source,
    )  # fmt: skip
    return RowFit(efficiency, len(usable), len(rows) - len(usable), float(errors.mean()))


def _inverse(value: float) -> float:
    # A term the rows show no sign of costs nothing: an efficiency no product of sizes notices.
    return 1.0 / float(value) if value > 1e-9 else 1e9


def predict(row: Row, model: RowModel, efficiency: Efficiency) -> Prediction:
    """TPOT of a row, unless its cache does not fit."""
    if memory_full(row, model):
        return Prediction(row, True, None, None)
    constants = (efficiency.fixed_ms, 1 / efficiency.mbu, 1 / efficiency.mbu_kv, 1 / efficiency.mfu,
                 efficiency.all_reduce_us, 1 / efficiency.link_efficiency)  # fmt: skip
    tpot_s = float(np.dot(_loads(row, model), constants))
    return Prediction(row, False, tpot_s, tpot_s / row.tpot_s - 1.0)
