"""Whether the traffic still is what the fleet was planned for: the prompt:output ratio of live rates against a band.

The ratio is computed prompt tokens (those no prefix cache had) for each output token, over a window of growing totals,
as in the alert rules. Leaving the band is told once, and so is coming back, each only when it lasts. Invariants: a
value in, a value out; too few tokens say nothing; totals that went back (the router restarted) begin a new window.
``scenario_text`` writes what was seen as the scenario file of a new plan. Knows nothing about who counts.
"""

from __future__ import annotations

import msgspec

from kvbaton.observe.ratio import Band, Place, Totals, ratio_of, window
from kvbaton.plan.advise import Window
from kvbaton.types import LocalError


class DriftState(msgspec.Struct, frozen=True):
    seen: tuple[Totals, ...] = ()  # oldest first, from just before the window on
    told: Place = "unknown"
    other_since_s: float | None = None  # from when on the ratio lies elsewhere than was told


class Drift(msgspec.Struct, frozen=True):
    ratio: float | None
    place: Place  # as it is told
    news: str  # what to tell now; empty: nothing new
    state: DriftState


def watch(
    totals: Totals, state: DriftState, band: Band, window_s: float = 300.0, lasts_s: float = 60.0
) -> Drift:  # fmt: skip
    """Take the totals of now, and say where the ratio of the last ``window_s`` lies."""
    seen = window(state.seen, totals, window_s)
    ratio = ratio_of(seen)
    place = band.place(ratio)
    if place in ("unknown", state.told):
        return Drift(ratio, state.told, "", DriftState(seen, state.told))
    since_s = state.other_since_s if state.other_since_s is not None else totals.at_s
    if totals.at_s - since_s < lasts_s:
        return Drift(ratio, state.told, "", DriftState(seen, state.told, since_s))
    news = f"{ratio:.1f} prompt tokens to compute for each output token"
    if place == "inside":
        news = f"{news}: within the plan's {band.low:g} to {band.high:g}" + (
            " again" if state.told != "unknown" else ""
        )
    else:
        news = f"{news}, {place} the plan's {band.low:g} to {band.high:g}: plan again"
    return Drift(ratio, place, news, DriftState(seen, place))


def scenario_text(seen: Window, name: str = "live", model: str = "") -> str:
    """A scenario file for the traffic of the window. What nobody can measure is left as a comment to fill in."""
    if not seen.requests or not seen.prompt_tokens or not seen.output_tokens:
        raise LocalError("no request ended between the scrapes, so there is no traffic to plan for", field="--interval",
                         fix="scrape for longer, or while there is traffic")  # fmt: skip
    cached = seen.cached_share or 0.0
    lines = [
        f"# The traffic of {seen.seconds:.0f} s, of {seen.requests:.0f} requests. Check model, hardware and limits.",
        f"name = {_quoted(name)}",
        "",
        "[workload]",
        f"prompt_tokens = {max(1, round(seen.prompt_tokens / seen.requests))}",
        f"output_tokens = {max(1, round(seen.output_tokens / seen.requests))}",
        f"rate = {seen.requests / seen.seconds:.4g}  # requests a second",
        f"shared_prefix = {min(0.99, max(0.0, cached)):.2f}  # the share of prompt tokens that caches had",
        "",
        "[slo]",
        "ttft_ms = 2000",
        "tpot_ms = 100",
        "attainment = 0.9",
        "",
        "[model]",
        f"preset = {_quoted(model or 'Llama-3.1-8B')}" + ("" if model else "  # which model was not said"),
        "",
        "[hardware]",
        'gpu = "H100-SXM"',
        f"max_gpus = {max(2, seen.workers)}",
        "",
    ]
    return "\n".join(lines)


def _quoted(text: str) -> str:
    """A TOML string: JSON's escapes are TOML's, too."""
    return msgspec.json.encode(text).decode()
