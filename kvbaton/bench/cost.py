"""GPU-hours and money: what a run's tokens cost, for the whole and for each pool by its own work.

Invariants: input tokens are credited to the GPUs that prefill and output tokens to those that decode; a figure that
mixes the two says so in its name. A colocated pool does both, so its two figures rest on the same GPUs.

Knows nothing about requests or latency.
"""

from __future__ import annotations

import msgspec

from kvbaton.types import LocalError


class Fleet(msgspec.Struct, frozen=True):
    """GPUs and their hourly price. Colocated GPUs count in ``colocated_gpus`` only."""

    prefill_gpus: float = 0.0
    decode_gpus: float = 0.0
    colocated_gpus: float = 0.0
    prefill_price_per_hour: float = 0.0
    decode_price_per_hour: float = 0.0
    colocated_price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) < 0:
                raise LocalError(f"{name} must not be negative", field=name)
        if bool(self.prefill_gpus) != bool(self.decode_gpus):
            raise LocalError("a split fleet has GPUs in both pools", field="gpus")

    @property
    def total_gpus(self) -> float:
        return self.prefill_gpus + self.decode_gpus + self.colocated_gpus

    @property
    def price_per_hour(self) -> float:
        return (
            self.prefill_gpus * self.prefill_price_per_hour
            + self.decode_gpus * self.decode_price_per_hour
            + self.colocated_gpus * self.colocated_price_per_hour
        )


class Cost(msgspec.Struct, frozen=True):
    """None where the fleet has no such pool or no tokens came out. Money is in the unit of the given prices."""

    gpu_hours: float
    money: float
    blended_per_million_output_tokens: float | None
    prefill_pool_per_million_output_tokens: float | None
    decode_pool_per_million_output_tokens: float | None
    input_tokens_per_s_per_prefill_gpu: float | None
    output_tokens_per_s_per_decode_gpu: float | None
    total_tokens_per_s_per_gpu: float | None


def cost_of(fleet: Fleet, wall_s: float, input_tokens: float, output_tokens: float) -> Cost:
    """Cost of ``wall_s`` of this fleet, spread over the tokens that successes got."""
    hours = wall_s / 3600
    money = fleet.price_per_hour * hours
    prefill_money = fleet.prefill_gpus * fleet.prefill_price_per_hour * hours
    decode_money = fleet.decode_gpus * fleet.decode_price_per_hour * hours
    split = fleet.prefill_gpus > 0
    prefilling = fleet.prefill_gpus + fleet.colocated_gpus
    decoding = fleet.decode_gpus + fleet.colocated_gpus
    return Cost(
        gpu_hours=fleet.total_gpus * hours,
        money=money,
        blended_per_million_output_tokens=_per_million(money, output_tokens),
        prefill_pool_per_million_output_tokens=_per_million(prefill_money, output_tokens) if split else None,
        decode_pool_per_million_output_tokens=_per_million(decode_money, output_tokens) if split else None,
        input_tokens_per_s_per_prefill_gpu=_share(input_tokens, wall_s, prefilling),
        output_tokens_per_s_per_decode_gpu=_share(output_tokens, wall_s, decoding),
        total_tokens_per_s_per_gpu=_share(input_tokens + output_tokens, wall_s, fleet.total_gpus),
    )


def _per_million(money: float, output_tokens: float) -> float | None:
    return money / output_tokens * 1e6 if output_tokens > 0 else None


def _share(tokens: float, wall_s: float, gpus: float) -> float | None:
    return tokens / wall_s / gpus if wall_s > 0 and gpus > 0 else None
