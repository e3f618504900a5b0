"""The ordered list of cheaper things to try before a split, those with the largest gain first.

Every gain is goodput of the single pool with and without the thing, from simulation, unless the line says otherwise.
Knows nothing about the split.
"""

from __future__ import annotations

import msgspec

from kvbaton.plan.answer import Suggestion
from kvbaton.plan.scenario import Engine
from kvbaton.plan.sim_spec import FleetSpec
from kvbaton.plan.sizing import Layout, Sizer
from kvbaton.plan.trace_stats import lru_curve
from kvbaton.router.policy import PolicyConfig
from kvbaton.types import LocalError

Ranked = list[tuple[float, Suggestion]]
LEAST_GAIN = 0.01  # below it a thing is listed, but not called a gain


def cheaper(sizer: Sizer, layout: Layout, goodput: float) -> tuple[Suggestion, ...]:
    """Things to try first. ``layout`` is the tuned single pool, ``goodput`` what it carries."""
    if goodput <= 0:
        what = "GPUs that keep both limits, or a looser limit"
        return (Suggestion(what, "no single pool of those given keeps them at any rate", "simulated"),)
    found: Ranked = [*_budget(sizer, layout), *_sharding(sizer, layout), *_tier(sizer, layout)]
    found += _eight_bits(sizer, layout, goodput)
    found += _affinity(sizer, layout, goodput)
    found.append((-1.0, Suggestion("raise the TTFT limit for long prompts", "lets chunks be smaller", "not evaluated")))
    return tuple(suggestion for _, suggestion in sorted(found, key=lambda each: -each[0]))


def _budget(sizer: Sizer, layout: Layout) -> Ranked:
    budgets = sizer.scenario.search.chunk_budgets
    alone = {budget: sizer.phase_goodput("colocated", layout.decode_sharding, budget) for budget in budgets}
    default = alone.get(2048) or min(alone.values())
    if default <= 0:
        return []
    gain = max(alone.values()) / default - 1.0
    best = max(alone, key=lambda budget: alone[budget])
    text = (
        f"{gain:+.0%} goodput of one worker with {best:,} instead of {2048 if 2048 in alone else min(alone):,}; "
        f"the whole pool, which is what is compared, did best with {layout.decode_budget:,}"
    )
    return [(gain, Suggestion("tune the chunk budget of the single pool", text, "simulated"))]


def _sharding(sizer: Sizer, layout: Layout) -> Ranked:
    """The best single-pool parallelism against the worst one that works."""
    per_gpu = {}
    for sharding in sizer.shardings():
        rates = [sizer.phase_goodput("colocated", sharding, budget) for budget in sizer.scenario.search.chunk_budgets]
        if max(rates) > 0:
            per_gpu[sharding] = max(rates) / sizer.gpus(sharding)
    if len(per_gpu) < 2:
        return []
    best, worst = max(per_gpu, key=lambda s: per_gpu[s]), min(per_gpu, key=lambda s: per_gpu[s])
    gain = per_gpu[best] / per_gpu[worst] - 1.0
    text = (
        f"{gain:+.0%} goodput a GPU, of one worker, with {best.label} over {worst.label}; "
        f"the pool that is compared has {layout.decode_sharding.label}"
    )
    return [(min(gain, 0.5), Suggestion("choose the parallelism of the single pool", text, "simulated"))]


def _tier(sizer: Sizer, layout: Layout) -> Ranked:
    """A larger cache: what fleets with a tier carried, and what the LRU curve of the whole trace says it would hold."""
    trace = sizer.trace
    if trace.block_tokens is None:
        return []
    what = "add a cache tier in host memory or on disk"
    try:
        where = layout.decode_gpus
        worker = sizer.engine.worker(layout.decode_sharding, layout.decode_budget, sizer.block_size, where)
    except LocalError as error:
        return [(0.0, Suggestion(what, str(error), "not evaluated"))]
    now = worker.num_blocks * worker.block_size
    curve = lru_curve(trace, (now, 4 * now, 16 * now))
    text = "hits " + ", ".join(f"{hit:.0%} of tokens at {size / 1e6:.1f} M" for size, hit in curve.items())
    bare = msgspec.structs.replace(layout, cache_gb=0.0)
    tried = [each for each in sizer.tried if each.cache_gb and msgspec.structs.replace(each, cache_gb=0.0) == bare]
    if not tried or not sizer.tried.get(bare):
        return [(curve[16 * now] - curve[now], Suggestion(what, text, "computed from the LRU curve"))]
    best = max(tried, key=lambda each: sizer.tried[each])
    gain = sizer.tried[best] / sizer.tried[bare] - 1.0
    return [(gain, Suggestion(what, f"{gain:+.0%} goodput with {best.cache_gb:g} GB a GPU; {text}", "simulated"))]


def _eight_bits(sizer: Sizer, layout: Layout, goodput: float) -> Ranked:
    if sizer.engine.profile is not None or sizer.engine.cost(layout.decode_sharding).form.data_bits <= 8:
        return []
    scenario = sizer.scenario
    model = msgspec.structs.replace(scenario.model, kv_dtype="fp8")
    other = sizer.with_engine(Engine(msgspec.structs.replace(scenario, model=model)))
    other.block_size = sizer.block_size
    gain = other.goodput(layout, goodput) / goodput - 1.0 if goodput else 0.0
    sizer.num_simulations += other.num_simulations
    text = f"{gain:+.0%} goodput; twice the running sequences, half the transfer; check quality"
    return [(gain, Suggestion("keep the cache in 8 bits", text, "simulated"))]


def _affinity(sizer: Sizer, layout: Layout, goodput: float) -> Ranked:
    """What routing by prefix is worth: the same pool with requests sent round in turn."""
    what = "route by prefix affinity over the single pool"
    if layout.decode < 2 or sizer.trace.block_tokens is None:
        why = "there is one worker" if layout.decode < 2 else "the trace does not say what prompts share"
        return [(-0.5, Suggestion(what, why, "not evaluated"))]

    def in_turn(fleet: FleetSpec) -> FleetSpec:
        return msgspec.structs.replace(fleet, policy=PolicyConfig(kind="round_robin"))

    blind = sizer.goodput_with(layout, goodput, in_turn)
    gain = goodput / blind - 1.0 if blind else 0.0
    text = f"{gain:+.0%} goodput over sending requests round in turn (the figures above have it)"
    return [(gain if gain > LEAST_GAIN else 0.0, Suggestion(what, text, "simulated"))]
