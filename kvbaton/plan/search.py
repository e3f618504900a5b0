"""The search for the best fleet of either arm: most goodput for a dollar under a budget of GPUs, or the cheapest that
carries a wanted rate; every candidate at last simulated whole.

    parallelism of each phase, chunk budget, pool ratio    closed form from single workers, the best few simulated
    then one thing at a time, kept if it is better by more than the precision of goodput:
        single pool    cache tier
        split          routing threshold with the decode pool's chunk budget, cache tier, one worker moved either way

Both arms go through the same functions with the same tiers. Knows nothing about verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbaton.plan.answer import Dimension, DriftBand
from kvbaton.plan.scenario import Engine
from kvbaton.plan.sizing import Layout, Sizer
from kvbaton.types import LocalError

WIDEST_DRIFT = 16.0  # times the ratio of now; beyond it nobody asks
DRIFT_STEP = 1.1
MOST_GROWTH = 4  # workers that a fleet sized by closed forms may lack; beyond it they were no estimate


class Choice(msgspec.Struct, frozen=True):
    layout: Layout
    goodput: float
    usd_per_hour: float
    wanted: float | None = None  # the rate to carry, headroom included; more than that is worth nothing

    @property
    def carries(self) -> bool:
        return self.wanted is None or self.goodput >= self.wanted

    @property
    def per_dollar(self) -> float:
        """Goodput for a dollar an hour. Of fleets that carry a wanted rate it is largest for the cheapest."""
        return served(self.goodput, self.wanted) / self.usd_per_hour

    def better_than(self, other: Choice, by: float = 0.0) -> bool:
        if self.carries != other.carries:
            return self.carries
        return self.per_dollar > other.per_dollar * (1.0 + by)


def served(goodput: float, wanted: float | None) -> float:
    return goodput if wanted is None else min(goodput, wanted)


def usd_per_hour(engine: Engine, layout: Layout, sizer: Sizer) -> float:
    prefill = layout.prefill * sizer.gpus(layout.prefill_sharding) * engine.price()
    dear = engine.price(decode=layout.split or layout.decode_gpus)
    tiered = layout.prefill * sizer.gpus(layout.prefill_sharding) if layout.split else sizer.layout_gpus(layout)
    prefill += tiered * layout.cache_gb * engine.scenario.hardware.usd_per_host_gb_hour
    return prefill + layout.decode * sizer.gpus(layout.decode_sharding) * dear


def best_single(sizer: Sizer) -> Choice | None:
    best = _best(sizer, sorted(sizer.colocated_layouts(), key=lambda each: _order(sizer, each)))
    if best is None:
        return None
    return _shrunk(sizer, _refined(sizer, best, _tiers(sizer, best.layout)))


def best_split(sizer: Sizer) -> Choice | None:
    ranked = sorted(sizer.split_layouts(), key=lambda each: _order(sizer, each))
    ranked = _different(ranked, sizer.scenario.search.verify)
    best = _best(sizer, ranked)
    if best is None:
        return None
    best = _refined(sizer, best, _thresholds(sizer, best.layout))
    best = _refined(sizer, best, _tiers(sizer, best.layout))
    return _shrunk(sizer, _refined(sizer, best, _ratios(sizer, best.layout)))


def _order(sizer: Sizer, each: tuple[Layout, float]) -> tuple[bool, float, int]:
    """Most promising first, by closed forms: what carries the wanted rate before what does not."""
    layout, estimate = each
    choice = Choice(layout, estimate, usd_per_hour(sizer.engine, layout, sizer), sizer.wanted)
    return (not choice.carries, -choice.per_dollar, layout.num_gpus)


def _best(sizer: Sizer, ranked: list[tuple[Layout, float]]) -> Choice | None:
    """The best of the first few candidates, each simulated whole, and grown where it carries less than it should."""
    best = None
    for layout, estimate in ranked[: sizer.scenario.search.verify]:
        choice = _grown(sizer, _simulated(sizer, layout, estimate))
        if choice.goodput > 0 and (best is None or choice.better_than(best)):
            best = choice
    return best


def _simulated(sizer: Sizer, layout: Layout, guess: float) -> Choice:
    # Begun at the wanted rate, the search for goodput says for certain whether that rate is carried.
    goodput = sizer.goodput(layout, sizer.wanted or guess)
    return Choice(layout, goodput, usd_per_hour(sizer.engine, layout, sizer), sizer.wanted)


def _grown(sizer: Sizer, choice: Choice) -> Choice:
    """Worker by worker, until the wanted rate is carried: closed forms do not see how pools wait for each other."""
    for _ in range(MOST_GROWTH):
        if choice.carries:
            break
        layout = choice.layout
        more = [msgspec.structs.replace(layout, decode=layout.decode + 1)]
        if layout.split:
            more.append(msgspec.structs.replace(layout, prefill=layout.prefill + 1))
        more = [each for each in more if sizer.layout_gpus(each) <= sizer.scenario.hardware.max_gpus]
        if not more:
            break
        grown = [_simulated(sizer, each, choice.goodput) for each in more]
        choice = max(grown, key=lambda each: (each.carries, each.per_dollar if each.carries else each.goodput))
    return choice


def _refined(sizer: Sizer, best: Choice, layouts: Iterable[Layout]) -> Choice:
    """The best of it and its variants; a variant has to be better by more than goodput is known to.

    Where a rate is wanted the variants differ by what they cost, which is known exactly.
    """
    found, margin = best, sizer.scenario.search.precision if sizer.wanted is None else 0.0
    for layout in layouts:
        if layout in sizer.tried:
            continue
        choice = _simulated(sizer, layout, best.goodput)
        if choice.better_than(found, by=margin):
            found = choice
    return found


def _thresholds(sizer: Sizer, layout: Layout) -> Iterable[Layout]:
    """Short prompts stay where they decode; then the decode pool computes prompts too, and its budget matters."""
    budgets = sizer.scenario.search.chunk_budgets
    for threshold in sizer.scenario.search.thresholds:
        if threshold == layout.threshold:
            continue
        for budget in dict.fromkeys((max(budgets), min(budgets))):
            yield msgspec.structs.replace(layout, threshold=threshold, decode_budget=budget)


def _tiers(sizer: Sizer, layout: Layout) -> Iterable[Layout]:
    for size in sizer.tiers_gb():
        yield msgspec.structs.replace(layout, cache_gb=size)


def _ratios(sizer: Sizer, layout: Layout) -> Iterable[Layout]:
    """One worker more or fewer of each pool, within the GPUs: closed forms do not see how pools wait for each other."""
    for more in (1, -1):
        moved = msgspec.structs.replace(layout, prefill=layout.prefill + more, decode=layout.decode - more)
        if min(moved.prefill, moved.decode) >= 1 and sizer.layout_gpus(moved) <= sizer.scenario.hardware.max_gpus:
            yield moved


def _shrunk(sizer: Sizer, best: Choice) -> Choice:
    """Worker by worker, as long as the wanted rate is carried: workers together carry more than each alone."""
    while sizer.wanted is not None:
        less = _refined(sizer, best, _fewer(best.layout))
        if less.layout == best.layout:
            break
        best = less
    return best


def _fewer(layout: Layout) -> Iterable[Layout]:
    for prefill, decode in ((1, 0), (0, 1)):
        less = msgspec.structs.replace(layout, prefill=layout.prefill - prefill, decode=layout.decode - decode)
        if less.decode >= 1 and less.prefill >= (1 if layout.split else 0):
            yield less


def _different(ranked: list[tuple[Layout, float]], count: int) -> list[tuple[Layout, float]]:
    """The first few with different pools: budgets of equal pools differ little, pools differ much."""
    seen, chosen = set(), []
    for layout, estimate in ranked:
        pools = (layout.prefill, layout.decode, layout.prefill_sharding, layout.decode_sharding)
        if pools not in seen:
            seen.add(pools)
            chosen.append((layout, estimate))
        if len(chosen) == count:
            break
    return chosen


def drift_band(sizer: Sizer, pair: Choice, rate: float, ratio: float) -> DriftBand:
    """How far the prompt:output ratio may move, at that rate, before the chosen pools miss the limits.

    Longer prompts on one side, longer outputs on the other, each simulated.
    """
    rate = min(rate, pair.goodput)

    def furthest(prompt: bool) -> float:
        low, high = 1.0, 1.5
        while high <= WIDEST_DRIFT and _holds(sizer, pair.layout, rate, high, prompt):
            low, high = high, high * 1.5
        if high > WIDEST_DRIFT:
            return WIDEST_DRIFT
        while high / low > DRIFT_STEP:
            middle = (low * high) ** 0.5
            if _holds(sizer, pair.layout, rate, middle, prompt):
                low = middle
            else:
                high = middle
        return low

    return DriftBand(ratio, ratio / furthest(prompt=False), ratio * furthest(prompt=True))


def _holds(sizer: Sizer, layout: Layout, rate: float, factor: float, prompt: bool) -> bool:
    trace = sizer.trace.scaled(prompt=factor) if prompt else sizer.trace.scaled(output=factor)
    try:
        return sizer.with_engine(sizer.engine, trace).holds(layout, rate, trace)
    except LocalError:  # a prompt that long fits no worker
        return False


def dimensions(sizer: Sizer, single: Choice, pair: Choice | None) -> tuple[Dimension, ...]:
    """What was really tried, from the record of it."""
    whole, alone = list(sizer.tried), sizer.tried_alone
    split = [each for each in whole if each.split]
    other = pair.layout if pair is not None else None
    one = single.layout

    def row(name: str, tried: Iterable[str], of_single: str, of_split: str) -> Dimension:
        return Dimension(name, tuple(dict.fromkeys(tried)), of_single, of_split if other is not None else "")

    return (
        row("parallelism of the prefill phase", (key[1].label for key in alone if key[0] == "prefill"),
            one.decode_sharding.label, other.prefill_sharding.label if other else ""),
        row("parallelism of the decode phase", (key[1].label for key in alone if key[0] == "decode"),
            one.decode_sharding.label, other.decode_sharding.label if other else ""),
        row("chunk budget", (f"{key[2]:,}" for key in alone if key[0] != "decode"),
            f"{one.decode_budget:,}", f"{other.prefill_budget:,}" if other else ""),
        row("chunk budget of the decode pool", (f"{each.decode_budget:,}" for each in split), "",
            f"{other.decode_budget:,}" if other else ""),
        row("pool ratio", (f"{each.prefill}:{each.decode}" for each in split), f"0:{one.decode}",
            f"{other.prefill}:{other.decode}" if other else ""),
        row("routing threshold, uncached tokens", (f"{each.threshold:,}" for each in split), "",
            f"{other.threshold:,}" if other else ""),
        row("cache tier, GB a GPU", (f"{each.cache_gb:g}" for each in whole), f"{one.cache_gb:g}",
            f"{other.cache_gb:g}" if other else ""),
    )  # fmt: skip
