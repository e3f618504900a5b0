"""The answer in a terminal. Knows nothing about how it was found."""

from __future__ import annotations

from kvbaton.plan.answer import Answer, Arm


def render(answer: Answer) -> str:
    lines = [f"{answer.name}: {answer.verdict.upper()}", f"  {answer.reason}"]
    if answer.measure_next:
        lines.append(f"  measure next: {'; '.join(answer.measure_next)}")
    lines.append(f"  {answer.num_gpus} GPUs; {answer.slo}; {answer.num_simulations} simulations")
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
    ttft, tpot, cost = arm.ttft, arm.tpot, arm.cost
    return [
        f"  {name}: {arm.label}",
        f"    goodput {arm.goodput_per_s:.2f} requests/s, {arm.goodput_per_gpu:.3f} a GPU, "
        f"{arm.goodput_per_usd_hour:.3f} for $1/h",
        f"    at {arm.at_rate_per_s:.2f}/s: TTFT p50 {ttft.p50 * 1e3:,.0f} p90 {ttft.p90 * 1e3:,.0f} "
        f"({arm.ttft_p90_band.low * 1e3:,.0f} to {arm.ttft_p90_band.high * 1e3:,.0f}) p99 {ttft.p99 * 1e3:,.0f} ms; "
        f"TPOT p50 {tpot.p50 * 1e3:,.0f} p90 {tpot.p90 * 1e3:,.0f} "
        f"({arm.tpot_p90_band.low * 1e3:,.0f} to {arm.tpot_p90_band.high * 1e3:,.0f}) ms",
        f"    ${cost.usd_per_hour:.2f}/h, ${cost.usd_per_million_output:.3f} per million output tokens",
    ]
