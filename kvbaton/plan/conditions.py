"""The decision matrix of nine conditions, and the ordered list of cheaper things to try before a split.

Every line carries the number it was filled in from. The matrix explains; the verdict itself comes from simulated
goodput per dollar. Knows nothing about searching.
"""

from __future__ import annotations

from kvbaton.plan.answer import Arm, Condition, Leaning, Suggestion
from kvbaton.plan.scenario import Engine, Scenario
from kvbaton.plan.sizing import Layout, Sizer
from kvbaton.plan.trace_stats import describe, lru_curve
from kvbaton.plan.workload import Trace
from kvbaton.types import LocalError


def matrix(scenario: Scenario, engine: Engine, trace: Trace, single: Arm, split: Arm | None) -> tuple[Condition, ...]:
    """Nine conditions, each with what was measured and which way it leans."""
    stats = describe(trace)
    uncached = stats.prompt.mean * (1.0 - single.token_hit)
    pool = single.pools[0]
    busy = max(1e-9, pool.prefill_share + pool.decode_share)
    share = pool.prefill_share / busy
    step_s = single.tpot.p50 or 1e-9
    return (
        _line("Are uncached prompts long?", f"{uncached:,.0f} uncached tokens a prompt (hit {single.token_hit:.0%})",
              (uncached >= 2_000, uncached < 512),
              "short prompts cost little beside decodes, and a hand-off costs each of them a round trip"),
        _line("Do both phases need whole GPUs?", f"prefill takes {share:.0%} of busy GPU time",
              (0.25 <= share <= 0.75, share < 0.1 or share > 0.9), "a pool for a sliver of the work stands idle"),
        _line("Does prefill hurt decode?",
              f"p99 gap {single.p99_gap_s * 1e3:.0f} ms, median TPOT {step_s * 1e3:.0f} ms",
              (single.p99_gap_s > 3 * step_s and single.p99_gap_s * 1e3 > scenario.slo.tpot_ms,
               single.p99_gap_s < 1.5 * step_s), "gaps that chunking does not remove are what a split removes"),
        _line("Are both latencies promised?", scenario.name if not scenario.workload.online else
              f"TTFT {scenario.slo.ttft_ms:g} ms, TPOT {scenario.slo.tpot_ms:g} ms",
              (scenario.workload.online and scenario.slo.tpot_ms <= 100, not scenario.workload.online),
              "without limits only throughput counts, and one pool mixes phases best"),
        _network(engine, stats.prompt.mean, split),
        _line("Is the cache hit low?", f"{single.token_hit:.0%} of prompt tokens are found in the cache",
              (single.token_hit < 0.3, single.token_hit > 0.7), "cached prompts leave little prefill to move away"),
        _scale(scenario, split),
        _stability(stats.gap_cv, stats.max_minute_rate_per_s, stats.rate_per_s),
        _memory(single, split),
    )  # fmt: skip


def _line(question: str, measured: str, leans: tuple[bool, bool], why: str) -> Condition:
    leaning: Leaning = "split" if leans[0] else "stay" if leans[1] else "neutral"
    return Condition(question, measured, leaning, why)


def _network(engine: Engine, prompt_tokens: float, split: Arm | None) -> Condition:
    handoff = engine.handoff()
    carry_s = handoff.link.transfer_s(prompt_tokens * handoff.token_bytes)
    if split is None:
        return Condition("Is the network fast enough?", f"{carry_s * 1e3:.1f} ms to move a mean prompt", "neutral",
                         "no split was found to compare it with")  # fmt: skip
    share = split.p90_exposed_s / max(1e-9, split.ttft.p90)
    text = f"{carry_s * 1e3:.1f} ms to move a mean prompt; p90 exposed {split.p90_exposed_s * 1e3:.1f} ms"
    return _line("Is the network fast enough?", text, (share <= 0.1, share > 0.3),
                 "what the transfer adds after prefill is paid by every request")  # fmt: skip


def _scale(scenario: Scenario, split: Arm | None) -> Condition:
    gpus = scenario.hardware.max_gpus
    spare = split is not None and min(split.layout.prefill, split.layout.decode) >= 2
    pools = "no split fits" if split is None else f"{split.layout.prefill} prefill, {split.layout.decode} decode"
    return _line("Is the fleet large enough?", f"{gpus} GPUs: {pools}", (spare, split is None or gpus < 4),
                 "pools of one worker have no spare, and small pools cannot be balanced")  # fmt: skip


def _stability(burstiness: float, peak: float, mean: float) -> Condition:
    ratio = peak / mean if mean else 1.0
    return _line("Is the traffic steady?", f"gap CV {burstiness:.2f}, busiest minute {ratio:.1f} times the mean",
                 (burstiness <= 1.5 and ratio <= 2.0, burstiness > 5.0 or ratio > 4.0),
                 "a shared pool lends idle GPUs to whichever phase bursts; fixed pools cannot")  # fmt: skip


def _memory(single: Arm, split: Arm | None) -> Condition:
    peak = max((pool.peak_block_share for pool in (split or single).pools if pool.role != "prefill"), default=0.0)
    preempted = sum(pool.preemptions for pool in (split or single).pools)
    text = f"at most {peak:.0%} of its blocks in use, {preempted} preempted"
    return _line("Does the cache fit the decode pool?", text,
                 (peak < 0.8 and not preempted, peak >= 0.99 or preempted > 0),
                 "weights are held twice, so fewer GPUs hold the same running sequences")  # fmt: skip


def cheaper(sizer: Sizer, layout: Layout, goodput: float) -> tuple[Suggestion, ...]:
    """Things to try first, those with the largest gain first."""
    found: list[tuple[float, Suggestion]] = []
    budgets = sizer.scenario.search.chunk_budgets
    alone = {budget: sizer.phase_goodput("colocated", layout.decode_sharding, budget) for budget in budgets}
    default = alone.get(2048) or min(alone.values())
    if default > 0:
        gain = max(alone.values()) / default - 1.0
        best = max(alone, key=lambda budget: alone[budget])
        text = f"{gain:+.0%} goodput with {best:,} instead of {2048 if 2048 in alone else min(alone):,}"
        found.append((gain, Suggestion("tune the chunk budget of the single pool", text, "simulated")))
    found += _sharding(sizer, layout)
    found += _cache(sizer)
    if sizer.engine.profile is None and sizer.engine.cost(layout.decode_sharding).form.data_bits > 8:
        text = "halves KV bytes: twice the running sequences, half the transfer; check quality"
        found.append((0.0, Suggestion("keep the cache in 8 bits", text, "computed")))
    found.append((0.0, Suggestion("route by prefix affinity over the single pool", "keeps hits on one worker",
                                  "not evaluated")))  # fmt: skip
    found.append((-1.0, Suggestion("raise the TTFT limit for long prompts", "lets chunks be smaller", "not evaluated")))
    return tuple(suggestion for _, suggestion in sorted(found, key=lambda each: -each[0]))


def _sharding(sizer: Sizer, layout: Layout) -> list[tuple[float, Suggestion]]:
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
    text = f"{gain:+.0%} goodput a GPU with {best.label} over {worst.label}"
    return [(min(gain, 0.5), Suggestion("choose the parallelism of the single pool", text, "simulated"))]


def _cache(sizer: Sizer) -> list[tuple[float, Suggestion]]:
    """What a larger cache tier would hold, from the LRU curve of the whole trace."""
    trace = sizer.trace
    if trace.block_tokens is None:
        return []
    try:
        worker = sizer.engine.worker(sizer.shardings()[-1], 2048, sizer.block_size)
    except LocalError as error:
        return [(0.0, Suggestion("add a cache tier", str(error), "not evaluated"))]
    now = worker.num_blocks * worker.block_size
    sizes = (now, 4 * now, 16 * now)
    curve = lru_curve(trace, sizes)
    gain = curve[sizes[-1]] - curve[now]
    text = ", ".join(f"{hit:.0%} of tokens at {size / 1e6:.1f} M" for size, hit in curve.items())
    return [(gain, Suggestion("add a cache tier in host memory or on disk", f"hits {text}", "computed"))]
