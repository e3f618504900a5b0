"""One declared metric, and the buckets that histograms share.

Knows nothing about which metrics there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]
Where = Literal["router", "worker"]

# Up to the longest request (600 s) and beyond, so that a quantile never sticks at the last bucket.
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 600, 1200)
TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536, 262144)
BYTES_PER_S = (1e6, 3e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11, 3e11)
RATIOS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1, 2, 5, 10, 100)


@dataclass(frozen=True)
class Metric:
    name: str
    kind: Kind
    where: Where
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    stat: str = ""  # worker metrics read from this field of the worker's stats when scraped
