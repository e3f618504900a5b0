"""The answer in a terminal. Knows nothing about how it was found."""

from __future__ import annotations

from kvbaton.plan.answer import Answer, Arm, Spread
from kvbaton.plan.sim_result import Percentiles


def render(answer: Answer) -> str:
    lines = [f"{answer.name}: {answer.verdict.upper()}", f"  {answer.reason}"]
    if answer.measure_next:
        lines.append(f"  measure next: {'; '.join(answer.measure_next)}")
    lines.append(f"  at most {answer.num_gpus} GPUs; {answer.slo}; {answer.num_simulations} simulations")
    lines += [f"  steps: {answer.step_source}", f"  link: {answer.link_source}"]
    lines += [f"  note: {text}" for text in answer.warnings]
    lines += _arm("single pool", answer.colocated)
    if answer.split is not None:
        lines += _arm("split", answer.split)
    if answer.threshold_tokens is not None:
        lines.append(f"  threshold: {answer.threshold_tokens:,} uncached tokens")
    if answer.drift is not None:
        lines.append(
            f"  drift band: {answer.drift.low:.1f} to {answer.drift.high:.1f} prompt tokens for each output token "
            f"(now {answer.drift.now:.1f})"
        )
    lines.append("  searched:")
    for each in answer.searched:
        split = f", split {each.split}" if each.split else ""
        single = f", single pool {each.single}" if each.single else ""
        lines.append(f"    {each.name}: {', '.join(each.tried) or 'nothing'}{single}{split}")
    lines.append("  conditions:")
    lines += [f"    {each.leaning:<8} {each.question} {each.measured}" for each in answer.matrix]
    lines.append("  cheaper things first:")
    lines += [
        f"    {number}. {each.what}: {each.gain} ({each.source})" for number, each in enumerate(answer.cheaper, 1)
    ]
    if answer.sensitivity:
        lines.append("  sensitivity of the advantage:")
        lines += [f"    {each.change}: {each.advantage:.2f} -> {each.verdict}" for each in answer.sensitivity]
    return "\n".join(lines)


def _arm(name: str, arm: Arm) -> list[str]:
    cost = arm.cost
    pools = [
        f"{pool.role} prefill {pool.prefill_share:.0%} decode {pool.decode_share:.0%} of the time, "
        f"cache at most {pool.peak_block_share:.0%}" + (f", link {pool.link_share:.0%}" if pool.link_share else "")
        for pool in arm.pools
    ]
    by_pool = ""
    if cost.usd_per_million_prompt is not None and cost.usd_per_million_output_decode_pool is not None:
        by_pool = (
            f"; by pool ${cost.usd_per_million_prompt:.3f} per million prompt, "
            f"${cost.usd_per_million_output_decode_pool:.3f} per million output tokens"
        )
    return [
        f"  {name}: {arm.label}",
        f"    goodput {arm.goodput_per_s:.2f} requests/s, {arm.goodput_per_gpu:.3f} a GPU, "
        f"{arm.goodput_per_usd_hour:.3f} for $1/h",
        f"    at {arm.at_rate_per_s:.2f}/s: TTFT {_figures(arm.ttft, arm.ttft_band)} ms",
        f"    TPOT {_figures(arm.tpot, arm.tpot_band)} ms",
        f"    busy: {'; '.join(pools)}",
        f"    {cost.gpu_hours_per_hour:g} GPU-hours and ${cost.usd_per_hour:.2f} an hour, "
        f"${cost.usd_per_million_output:.3f} per million output tokens{by_pool}",
    ]


def _figures(seen: Percentiles, band: Spread) -> str:
    return ", ".join(
        f"{name} {getattr(seen, name) * 1e3:,.0f} ({getattr(band.low, name) * 1e3:,.0f} to "
        f"{getattr(band.high, name) * 1e3:,.0f})"
        for name in ("p50", "p90", "p99")
    )
