"""From a scenario to an answer: size both arms under one budget, turn every uncertain constant for both alike, decide.

    split                 the split carries at least ``margin`` more for each dollar, however the constants are off
    stay                  it does not, however they are off
    not enough evidence   the answer depends on a constant that was not measured: that constant is what to measure next

The single pool is tuned first (parallelism and chunk budget), so the split has to beat the best rival, not a default.
Knows nothing about files or how answers look.
"""

from __future__ import annotations

from math import ceil
from random import Random

import msgspec
import numpy as np

from kvbaton.plan import conditions, suggestions
from kvbaton.plan.answer import Answer, Arm, Band, Cost, Sensitivity, Spread, Uncertain, VerdictWord
from kvbaton.plan.closed_forms import cost_per_million_usd, workers_for
from kvbaton.plan.scenario import Engine, Knob, Scenario, trace_of, with_prefixes
from kvbaton.plan.search import Choice, best_single, best_split, dimensions, drift_band, served, usd_per_hour
from kvbaton.plan.sim_result import Percentiles, SimResult
from kvbaton.plan.sizing import Layout, Progress, Sizer, settled_attainment
from kvbaton.plan.trace_stats import describe
from kvbaton.plan.workload import Trace
from kvbaton.types import LocalError

MOST_ADVANTAGE = 10.0
KNOBS: tuple[tuple[Knob, str], ...] = (
    ("compute", "time of a token (prefill speed)"),
    ("memory", "time to read cached tokens (decode speed at long contexts)"),
    ("fixed", "fixed time of a step (launch, reading weights) and of a sequence"),
    ("link", "link start-up and bandwidth"),
)


class Decision(msgspec.Struct, frozen=True):
    """The verdict and what it rests on, before anything is described."""

    single: Choice
    pair: Choice | None
    ratio: float | None  # goodput for a dollar, split over single pool
    uncertain: tuple[Uncertain, ...]
    verdict: VerdictWord
    reason: str
    measure_next: tuple[str, ...]


def decide(sizer: Sizer) -> Decision:
    """The best of each arm, held against each other, with every uncertain constant turned."""
    single, pair = best_single(sizer), best_split(sizer)
    if single is None and pair is None:
        raise LocalError("no fleet of either kind meets the limits", field="slo", fix="looser limits or other GPUs")
    if single is None:
        assert pair is not None
        single = _closest_single(sizer, pair)
    uncertain = _turn_knobs(sizer, single, pair) if pair is not None else ()
    ratio = _ratio(pair.per_dollar, single.per_dollar) if pair is not None else None
    return Decision(single, pair, ratio, uncertain, *_decide(sizer.scenario, sizer.engine, ratio, uncertain))


def plan(scenario: Scenario, progress: Progress = lambda line: None) -> Answer:
    """Everything ``kvbaton plan`` says."""
    engine, trace = Engine(scenario), trace_of(scenario)
    sizer = Sizer(scenario, trace, engine, progress)
    decision = decide(sizer)
    single, pair, ratio, uncertain = decision.single, decision.pair, decision.ratio, decision.uncertain
    most = max(single.goodput, pair.goodput if pair else 0.0)
    rate = scenario.workload.rate or 0.8 * most
    # One that carries nothing is shown at the rate that the other carries.
    arms = [_arm(sizer, each, min(rate, each.goodput or most)) for each in (single, pair) if each is not None]
    values = [each.advantage for each in uncertain] + ([ratio] if ratio is not None else [])
    split = arms[1] if pair is not None else None
    stats = describe(trace)
    searched = dimensions(sizer, single, pair)
    lines = _sensitivity(sizer, single, pair) if scenario.search.sensitivity and pair is not None else ()
    used = max(sizer.layout_gpus(each.layout) for each in (single, pair) if each is not None)
    return Answer(
        name=scenario.name,
        verdict=decision.verdict,
        reason=decision.reason,
        measure_next=decision.measure_next,
        advantage=ratio,
        advantage_band=Band(min(values), max(values)) if values else None,
        margin=scenario.search.margin,
        num_gpus=scenario.hardware.max_gpus if sizer.wanted is None else used,
        slo=_slo_text(scenario),
        ttft_s=scenario.slo.ttft_ms / 1e3,
        tpot_s=scenario.slo.tpot_ms / 1e3,
        colocated=arms[0],
        split=split,
        threshold_tokens=pair.layout.threshold if pair is not None and decision.verdict == "split" else None,
        matrix=conditions.matrix(scenario, engine, trace, arms[0], split),
        cheaper=suggestions.cheaper(sizer, single.layout, single.goodput),
        sensitivity=lines,
        uncertainty=uncertain,
        drift=drift_band(sizer, pair, rate, stats.prompt_per_output) if pair is not None else None,
        searched=searched,
        trace=stats,
        prompt_buckets=_buckets(trace),
        step_source=engine.source,
        link_source=engine.handoff().link.source,
        warnings=engine.warnings + trace.notes + _warnings(scenario, single, pair),
        num_simulations=sizer.num_simulations,
    )


def _slo_text(scenario: Scenario) -> str:
    if not scenario.workload.online:
        return "offline batch: throughput only"
    slo = scenario.slo
    return f"{slo.attainment:.0%} of requests: TTFT <= {slo.ttft_ms:g} ms and TPOT <= {slo.tpot_ms:g} ms"


def _closest_single(sizer: Sizer, pair: Choice) -> Choice:
    """The single pool that comes closest to the limits, where none meets them at any rate."""
    layouts = list(sizer.fitting_singles())
    if not layouts:
        raise LocalError("the model fits no worker", field="search.tp", fix="more tensor parallel ranks, or fewer bits")
    slo = sizer.scenario.slo
    best = max(layouts, key=lambda each: settled_attainment(sizer.run(each, pair.goodput), slo))
    return Choice(best, 0.0, usd_per_hour(sizer.engine, best, sizer), sizer.wanted)


def gpus_needed(sizer: Sizer, rate: float, split: bool) -> int | None:
    """Fewest GPUs of one arm for the rate, from phase goodputs; None when no layout works."""
    budgets, needs = sizer.scenario.search.chunk_budgets, []
    for sharding in sizer.shardings():
        for budget in budgets:
            if not split:
                alone = sizer.phase_goodput("colocated", sharding, budget)
                needs += [workers_for(rate, alone) * sizer.gpus(sharding)] if alone > 0 else []
                continue
            prefill = sizer.phase_goodput("prefill", sharding, budget)
            for other in sizer.shardings(decode=True):
                decode = sizer.phase_goodput("decode", other, max(budgets))
                if prefill > 0 and decode > 0:
                    gpus = workers_for(rate, prefill) * sizer.gpus(sharding)
                    needs.append(gpus + workers_for(rate, decode) * sizer.gpus(other))
    return min(needs, default=None)


# -- deciding ------------------------------------------------------------------------------------------------------


def _ratio(split: float, single: float) -> float:
    """Capped: next to a rival that carries nothing, or hardly anything, no ratio means more."""
    if single <= 0:
        return MOST_ADVANTAGE if split > 0 else 1.0
    return min(MOST_ADVANTAGE, split / single)


def _advantage(sizer: Sizer, single: Choice, pair: Choice) -> float:
    """Goodput per dollar of the split over the single pool's, for the same layouts under another engine or trace."""
    alone = sizer.goodput(single.layout, single.goodput or pair.goodput)
    both = sizer.goodput(pair.layout, pair.goodput)
    return _ratio(served(both, sizer.wanted) / pair.usd_per_hour, served(alone, sizer.wanted) / single.usd_per_hour)


def _turn_knobs(sizer: Sizer, single: Choice, pair: Choice) -> tuple[Uncertain, ...]:
    doubt = sizer.scenario.engine.uncertainty
    if doubt <= 0:
        return ()
    turned = []
    for knob, name in KNOBS:
        for factor in (1.0 + doubt, 1.0 / (1.0 + doubt)):
            other = sizer.with_engine(sizer.engine.with_knob(knob, factor))
            turned.append(Uncertain(name, factor, _advantage(other, single, pair)))
            sizer.num_simulations += other.num_simulations
    return tuple(turned)


def _decide(scenario: Scenario, engine: Engine, ratio: float | None, uncertain: tuple[Uncertain, ...]) -> tuple[
    VerdictWord, str, tuple[str, ...]
]:  # fmt: skip
    bar = 1.0 + scenario.search.margin
    if ratio is None:
        return "stay", "no split fits the GPUs or meets the limits", ()
    of = "" if scenario.workload.rate is None else f" of {scenario.workload.rate:g} requests/s with headroom,"
    text = f"the split carries{of} {ratio:.2f} times the tuned single pool's goodput for a dollar"
    if ratio >= MOST_ADVANTAGE:
        text = "the single pool carries next to nothing within the limits"
    crossing = [each for each in uncertain if (each.advantage >= bar) != (ratio >= bar)]
    if crossing:
        worst = sorted(crossing, key=lambda each: abs(each.advantage - bar), reverse=True)
        measure = tuple(dict.fromkeys(each.what for each in worst))
        how = f"but {worst[0].advantage:.2f} if the {worst[0].what} is {worst[0].factor - 1:+.0%}"
        kind = "measured" if engine.measured else "assumed"
        return "not enough evidence", f"{text}, {how} ({kind}); the bar is {bar:.2f}", measure
    if ratio >= bar:
        return "split", f"{text}, and at least {bar:.2f} whichever constant is off", ()
    return "stay", f"{text}, below the bar of {bar:.2f} whichever constant is off", ()


def _sensitivity(sizer: Sizer, single: Choice, pair: Choice) -> tuple[Sensitivity, ...]:
    """The same two layouts under another workload, link or price."""
    bar = 1.0 + sizer.scenario.search.margin
    cases: list[tuple[str, Sizer]] = [
        ("prompts half as long", sizer.with_engine(sizer.engine, sizer.trace.scaled(prompt=0.5))),
        ("prompts twice as long", sizer.with_engine(sizer.engine, sizer.trace.scaled(prompt=2.0))),
        ("bandwidth a quarter", sizer.with_engine(sizer.engine.with_bandwidth(0.25))),
    ]
    if sizer.trace.block_tokens is not None:
        bare = tuple(msgspec.structs.replace(each, block_ids=()) for each in sizer.trace.requests)
        cases.append(("no prefix cache hits", sizer.with_engine(sizer.engine,
                      msgspec.structs.replace(sizer.trace, requests=bare, block_tokens=None))))  # fmt: skip
    else:
        shared = with_prefixes(sizer.trace, 0.5, Random(sizer.scenario.workload.seed))
        cases.append(("half of each prompt in the prefix cache", sizer.with_engine(sizer.engine, shared)))
    lines = []
    for change, other in cases:
        other.block_size = sizer.block_size
        value = _advantage(other, single, pair)
        sizer.num_simulations += other.num_simulations
        lines.append(Sensitivity(change, value, "split" if value >= bar else "stay"))
    base = _ratio(pair.per_dollar, single.per_dollar)
    prefill = pair.layout.prefill * sizer.gpus(pair.layout.prefill_sharding) * sizer.engine.price()
    dearer = base * pair.usd_per_hour / (pair.usd_per_hour + 0.5 * prefill)
    lines.append(Sensitivity("prefill GPUs half as dear again", dearer, "split" if dearer >= bar else "stay"))
    return tuple(lines)


# -- describing ----------------------------------------------------------------------------------------------------


def _arm(sizer: Sizer, choice: Choice, rate: float) -> Arm:
    layout, doubt = choice.layout, sizer.scenario.engine.uncertainty
    result = sizer.run(layout, rate)
    runs = [result]
    knobs: tuple[Knob, ...] = ("compute", "memory", "fixed", "link") if layout.split else ("compute", "memory", "fixed")
    for knob in knobs if doubt > 0 else ():
        for factor in (1.0 + doubt, 1.0 / (1.0 + doubt)):
            runs.append(sizer.with_engine(sizer.engine.with_knob(knob, factor)).run(layout, rate))
            sizer.num_simulations += 1
    wanted = sizer.scenario.workload.rate
    return Arm(
        layout=layout,
        label=layout.label,
        goodput_per_s=choice.goodput,
        goodput_per_gpu=choice.goodput / sizer.layout_gpus(layout),
        goodput_per_usd_hour=choice.per_dollar,
        gpus_for_rate=None if wanted is None else gpus_needed(sizer, wanted, layout.split),
        at_rate_per_s=rate,
        attainment=settled_attainment(result, sizer.scenario.slo),
        ttft=result.ttft,
        tpot=result.tpot,
        ttft_band=_spread([each.ttft for each in runs]),
        tpot_band=_spread([each.tpot for each in runs]),
        p99_gap_s=result.p99_gap_s,
        p90_exposed_s=float(np.percentile(result.exposed_s, 90)) if result.exposed_s else 0.0,
        token_hit=result.token_hit,
        pools=result.pools,
        cost=_cost(sizer, layout, result),
    )


def _spread(seen: list[Percentiles]) -> Spread:
    low, high = (
        Percentiles(**{name: end(getattr(each, name) for each in seen) for name in Percentiles.__struct_fields__})
        for end in (min, max)
    )
    return Spread(low, high)


def _cost(sizer: Sizer, layout: Layout, result: SimResult) -> Cost:
    engine = sizer.engine
    hourly = usd_per_hour(engine, layout, sizer)
    prompt = decode = None
    if layout.split:
        prefill_gpus = layout.prefill * sizer.gpus(layout.prefill_sharding)
        decode_gpus = layout.decode * sizer.gpus(layout.decode_sharding)
        prompt = cost_per_million_usd(prefill_gpus, engine.price(), result.prompt_tokens / result.span_s)
        decode = cost_per_million_usd(decode_gpus, engine.price(decode=True), result.output_tokens_per_s)
    blended = cost_per_million_usd(1, hourly, result.output_tokens_per_s)
    return Cost(hourly, float(sizer.layout_gpus(layout)), blended, prompt, decode)


def _buckets(trace: Trace) -> tuple[tuple[int, int], ...]:
    """Requests by prompt length, edges doubling."""
    counts: dict[int, int] = {}
    for each in trace.requests:
        edge = 1 << max(6, ceil(np.log2(max(1, each.prompt_tokens))))
        counts[edge] = counts.get(edge, 0) + 1
    return tuple(sorted(counts.items()))


def _warnings(scenario: Scenario, single: Choice, pair: Choice | None) -> tuple[str, ...]:
    rate, found = scenario.workload.rate, []
    if rate is not None and max(single.goodput, pair.goodput if pair else 0.0) < rate:
        found.append(f"neither arm serves {rate:g} requests/s with {scenario.hardware.max_gpus} GPUs")
    if pair is not None and min(pair.layout.prefill, pair.layout.decode) < 2:
        found.append("a pool of one worker: its failure stops the split until the router falls back")
    return tuple(found)
