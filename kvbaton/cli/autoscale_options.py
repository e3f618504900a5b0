"""The flags of ``kvbaton up --autoscale`` and what they amount to.

Knows nothing about what is done with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from kvbaton.types import LocalError, Role

if TYPE_CHECKING:
    from kvbaton.observe.ratio import Band
    from kvbaton.plan.autoscale_demand import PoolPolicy
    from kvbaton.plan.control import ScalingPolicy

LEAST_MAXIMUM = 4  # of a pool, where no maximum was given


@dataclass(frozen=True)
class AutoscaleOptions:
    policy: ScalingPolicy
    interval_s: float = 5.0
    band: Band | None = None  # that the plan was made for: says when traffic leaves it


_POSITIVE = click.FloatRange(0, min_open=True)
_FLAGS = (
    click.option("--autoscale", is_flag=True, help="Add and drain workers as queues, sequences and blocks ask for."),
    click.option("--prefill-max", type=click.IntRange(1), help="At most so many prefill workers.  [default: 4]"),
    click.option("--decode-max", type=click.IntRange(1), help="The same of those that decode.  [default: 4]"),
    click.option("--scale-interval-s", type=_POSITIVE, default=5.0, show_default=True, help="Time between two looks."),
    click.option("--scale-queue-delay-s", type=_POSITIVE, default=0.5, show_default=True,
                 help="A prompt may wait so long for its first step."),
    click.option("--scale-sequences", type=click.IntRange(1), default=32, show_default=True,
                 help="Sequences a decode worker is to hold."),
    click.option("--scale-shrink-after-s", type=_POSITIVE, default=300.0, show_default=True,
                 help="Fewer workers must have been enough for so long before one drains."),
    click.option("--scale-start-s", type=_POSITIVE, default=20.0, show_default=True, help="How long a start takes."),
    click.option("--scale-ratio", default="", help="LOW,HIGH: prefill workers for each decode worker to stay within."),
)  # fmt: skip


def flags(command: Callable[..., Any]) -> Callable[..., Any]:
    for flag in reversed(_FLAGS):
        command = flag(command)
    return command


def read(roles: list[Role], given: Mapping[str, Any], plan_band: str = "") -> AutoscaleOptions | None:
    """The pools begin as large as they were asked for, which is not their minimum. None: nobody wants scaling."""
    if not given["autoscale"]:
        for name in ("prefill_max", "decode_max"):
            if given[name] is not None:
                raise LocalError(f"--{name.replace('_', '-')} is for --autoscale", field=name, fix="give both")
        return None
    from kvbaton.observe.ratio import read_band
    from kvbaton.plan.autoscale_demand import PoolPolicy
    from kvbaton.plan.control import ScalingPolicy

    pools: dict[Role, PoolPolicy] = {}
    for role in dict.fromkeys(roles):
        name, begin = "prefill_max" if role == "prefill" else "decode_max", roles.count(role)
        most = given[name] or max(LEAST_MAXIMUM, begin)
        if most < begin:
            raise LocalError(f"{most} is less than the {begin} to begin with", field=name)
        pools[role] = PoolPolicy(
            maximum=most,
            max_queue_delay_s=given["scale_queue_delay_s"],
            sequences_per_worker=given["scale_sequences"],
        )
    policy = ScalingPolicy(
        pools,
        shrink_after_s=given["scale_shrink_after_s"],
        drain_pause_s=given["scale_shrink_after_s"] / 10,
        start_s=given["scale_start_s"],
        ratio_band=_ratio(given["scale_ratio"], pools),
    )
    return AutoscaleOptions(policy, given["scale_interval_s"], read_band(plan_band))


def _ratio(text: str, pools: Mapping[Role, PoolPolicy]) -> tuple[float, float] | None:
    if not text:
        return None
    if "prefill" not in pools:
        raise LocalError("one pool has no ratio", field="scale_ratio", fix="leave it out, or start two pools")
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        fix = "give two numbers such as 0.5,2"
        raise LocalError(f"scale_ratio {text!r} is not LOW,HIGH", field="scale_ratio", fix=fix) from None
    return low, high  # which of them makes no sense the policy says
