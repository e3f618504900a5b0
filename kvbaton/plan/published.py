"""Step times that papers published: DistServe's fitted coefficients and Splitwise's measured table.

Read from the authors' files; converted to the planner's own step model where their form allows it.

Knows nothing about traces.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import msgspec

from kvbaton.plan.step_time import StepModel
from kvbaton.types import LocalError


class DistServeCoefficients(msgspec.Struct, frozen=True):
    """ms: prefill a + b sum(l) + c sum(l^2); decode a + b sum(context) + c batch, in two batch ranges."""

    prefill: tuple[float, float, float]
    decode_small: tuple[float, float, float]
    decode_large: tuple[float, float, float]
    threshold: int

    def prefill_ms(self, lengths: list[int], pp: int = 1) -> float:
        a, b, c = self.prefill
        tokens = sum(lengths)
        return (a + b * tokens + c * sum(each * each for each in lengths)) / pp + pp + 2 + 1e-4 * tokens

    def decode_ms(self, contexts: list[int], pp: int = 1) -> float:
        batch, tokens = len(contexts), sum(contexts)
        a, b, c = self.decode_small if batch < self.threshold else self.decode_large
        return (a + b * tokens + c * batch) / pp + 2 + 1e-4 * batch

    def step_model(self) -> StepModel:
        """The small-batch coefficients in the planner's form (prefill's quadratic term counts pairs twice)."""
        fixed = min(self.prefill[0], self.decode_small[0]) + 2
        return StepModel(
            fixed_s=fixed / 1e3,
            per_token_s=(self.prefill[1] + 1e-4) / 1e3,
            per_pair_s=2 * self.prefill[2] / 1e3,
            per_sequence_s=max(0.0, self.decode_small[2] - self.prefill[1]) / 1e3,
            per_context_s=self.decode_small[1] / 1e3,
            source="DistServe profile, A100-80G",
        )


def read_distserve(path: Path, model: str, tp: int) -> DistServeCoefficients:
    table = json.loads(path.read_text())
    try:
        row = table[model][str(tp)]
    except KeyError:
        raise LocalError(f"{path.name} has no {model} at tp {tp}", field="model") from None
    return DistServeCoefficients(
        tuple(row["prefill"]), tuple(row["decoding_smallbs"]), tuple(row["decoding_largebs"]),
        row["decoding_large_small_bs_threshold"],
    )  # fmt: skip


class SplitwiseTable(msgspec.Struct, frozen=True):
    """Median prompt time by prompt size (batch 1), and token time by batch (prompt 512), in ms."""

    prompt_ms: dict[int, float]
    token_ms: dict[int, float]

    def prompt_s(self, tokens: float) -> float:
        """Interpolated; beyond the table the last slope goes on."""
        return _interpolate(self.prompt_ms, tokens) / 1e3

    def decode_s_per_request(self, output_tokens: float, batch: int) -> float:
        """Worker seconds of one request's decoding when ``batch`` sequences share each step."""
        return output_tokens * self.token_ms[batch] / 1e3 / batch


def _interpolate(table: dict[int, float], at: float) -> float:
    sizes = sorted(table)
    upper = next((index for index, size in enumerate(sizes) if size >= at), len(sizes) - 1)
    right, left = sizes[max(upper, 1)], sizes[max(upper, 1) - 1]
    slope = (table[right] - table[left]) / (right - left)
    return max(table[left] + slope * (at - left), 0.0)


def read_splitwise(path: Path, model: str, hardware: str, tp: int) -> SplitwiseTable:
    prompt: dict[int, list[float]] = defaultdict(list)
    token: dict[int, list[float]] = defaultdict(list)
    with path.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if (row["model"], row["hardware"], row["tensor_parallel"]) != (model, hardware, str(tp)):
                continue
            if row["batch_size"] == "1":
                prompt[int(row["prompt_size"])].append(float(row["prompt_time"]))
            if row["prompt_size"] == "512":
                token[int(row["batch_size"])].append(float(row["token_time"]))
    if not prompt or not token:
        raise LocalError(f"{path.name} has no {model} on {hardware} at tp {tp}", field="hardware")
    return SplitwiseTable(
        {size: median(values) for size, values in prompt.items()},
        {size: median(values) for size, values in token.items()},
    )


class PhaseShare(msgspec.Struct, frozen=True):
    prefill_s: float  # worker seconds a request
    decode_s: float

    @property
    def prefill_share(self) -> float:
        return self.prefill_s / (self.prefill_s + self.decode_s)

    @property
    def prefill_per_decode(self) -> float:
        """Prefill workers for each decode worker."""
        return self.prefill_s / self.decode_s


class MooncakeDivision(msgspec.Struct, frozen=True):
    """One point of Figure 15 of the FAST'25 paper, read off the figure's own vector paths."""

    prefill: int  # nodes of eight A800-80G; the other of 16 decode
    effective: float  # share of requests within 10 s TTFT and 100 ms TBT
    mean_ttft_s: float
    mean_tbt_s: float


# The synthetic trace on LLaMA3-70B; the paper calls the middle "approximately 1:1".
MOONCAKE_FIGURE_15 = (
    MooncakeDivision(5, 0.7767, 5.738, 0.03151),
    MooncakeDivision(6, 0.9720, 1.712, 0.03177),
    MooncakeDivision(7, 0.9910, 1.302, 0.03288),
    MooncakeDivision(8, 0.9899, 1.191, 0.03505),
    MooncakeDivision(9, 0.9917, 1.123, 0.03825),
    MooncakeDivision(10, 0.9841, 1.111, 0.04420),
    MooncakeDivision(11, 0.8612, 1.137, 0.05831),
)
