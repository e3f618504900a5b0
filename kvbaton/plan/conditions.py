"""The decision matrix of nine conditions.

Every line carries the number it was filled in from. The matrix explains; the verdict itself comes from simulated
goodput per dollar. Knows nothing about searching.
"""

from __future__ import annotations

from kvbaton.plan.answer import Arm, Condition, Leaning
from kvbaton.plan.scenario import Engine, Scenario
from kvbaton.plan.trace_stats import describe
from kvbaton.plan.workload import Trace


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
        _scale(single, split),
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


def _scale(single: Arm, split: Arm | None) -> Condition:
    gpus = round(max(arm.cost.gpu_hours_per_hour for arm in (single, split) if arm is not None))
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
