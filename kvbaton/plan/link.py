"""How long KV takes to move: ``alpha + bytes / beta``, shared links, and what layer-wise overlap hides.

Knows nothing about who sends; the simulator asks when a transfer that starts now would end.
"""

from __future__ import annotations

import csv
from pathlib import Path

import msgspec
import numpy as np

from kvbaton.plan.hardware import Fabric
from kvbaton.plan.least_squares import smallest_worst_relative
from kvbaton.types import LocalError


class LinkModel(msgspec.Struct, frozen=True):
    startup_s: float  # alpha: handshake, registration, first byte
    bytes_per_s: float  # beta: what large messages reach
    source: str = "given"

    def __post_init__(self) -> None:
        if self.startup_s < 0 or self.bytes_per_s <= 0:
            raise LocalError("a link needs startup_s >= 0 and bytes_per_s > 0", field="link")

    def transfer_s(self, num_bytes: float) -> float:
        """Alone on the link. Nothing to move takes no time."""
        return self.startup_s + num_bytes / self.bytes_per_s if num_bytes > 0 else 0.0

    def slower(self, factor: float) -> LinkModel:
        return LinkModel(self.startup_s * factor, self.bytes_per_s / factor, self.source)


class LinkRow(msgspec.Struct, frozen=True):
    num_bytes: float
    seconds: float


class LinkFit(msgspec.Struct, frozen=True):
    model: LinkModel
    worst_relative_error: float
    errors: tuple[float, ...]


def from_fabric(fabric: Fabric) -> LinkModel:
    return LinkModel(fabric.startup_ms / 1e3, fabric.effective_bytes_per_s, f"preset {fabric.name}: {fabric.source}")


def fit_link(rows: list[LinkRow], source: str = "fitted") -> LinkFit:
    """The alpha and beta with the smallest worst relative error over the rows."""
    if len({row.num_bytes for row in rows}) < 2:
        raise LocalError("a link fit needs at least two sizes", field="link.rows")
    sizes, seconds = (np.array([getattr(row, name) for row in rows]) for name in ("num_bytes", "seconds"))
    features = np.stack([np.ones_like(sizes), sizes], axis=1)
    startup_s, per_byte = smallest_worst_relative(features, seconds)
    if per_byte <= 0:
        raise LocalError("time does not grow with bytes in these rows", field="link.rows")
    model = LinkModel(max(0.0, float(startup_s)), 1.0 / float(per_byte), source)
    errors = tuple(model.transfer_s(row.num_bytes) / row.seconds - 1.0 for row in rows)
    return LinkFit(model, max(map(abs, errors)), errors)


def read_mooncake_rows(path: Path, token_bytes: int, block_tokens: int = 16) -> list[LinkRow]:
    """Rows of the Mooncake table: prompts rounded to blocks, plus the one block each hand-off adds."""
    with path.open(newline="") as lines:
        return [
            LinkRow((int(row["prompt_tokens"]) + block_tokens) * token_bytes, float(row["transfer_ms"]) / 1e3)
            for row in csv.DictReader(lines)
        ]


def exposed_s(transfer_s: float, compute_s: float, num_layers: int, layer_wise: bool) -> float:
    """What of a transfer is still to come when prefill ends.

    Layer by layer, layer l can leave once it is computed, so the link is busy from the first layer on: what remains is
    at least the last layer's share, and whatever the link is slower than the computation.
    """
    if not layer_wise:
        return transfer_s
    last = transfer_s / num_layers
    return max(last, transfer_s - compute_s * (num_layers - 1) / num_layers)
