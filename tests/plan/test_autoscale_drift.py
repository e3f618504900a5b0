"""Drift: told once when it lasts, silent about chance; and the traffic seen becomes a scenario that ``plan`` reads."""

from __future__ import annotations

import tomllib

import msgspec
import pytest

from kvbaton.observe.ratio import Band, Totals
from kvbaton.plan.advise import Window
from kvbaton.plan.autoscale_drift import DriftState, scenario_text, watch
from kvbaton.plan.scenario import parse
from kvbaton.types import LocalError

BAND = Band(2.0, 8.0)


def follow(ratios: list[float], step_s: float = 30.0, output: float = 500.0) -> list[str]:
    """What is told, look by look; half of the prompt tokens are cached, and do not count."""
    state, told, prompt, made = DriftState(), [], 0.0, 0.0
    for number, ratio in enumerate(ratios):
        prompt, made = prompt + 2 * ratio * output, made + output
        drift = watch(Totals(number * step_s, prompt, prompt / 2, made), state, BAND, window_s=60.0, lasts_s=60.0)
        state = drift.state
        assert len(state.seen) <= 4, "what is remembered is bounded by the window"
        told.append(drift.news)
    return told


def test_leaving_the_band_is_told_once_and_so_is_coming_back() -> None:
    told = [news for news in follow([4.0] * 8 + [20.0] * 10 + [4.0] * 10) if news]
    assert len(told) == 3
    assert "within the plan's 2 to 8" in told[0]
    assert "above the plan's 2 to 8" in told[1] and told[1].endswith("plan again")
    assert told[2].endswith("again")


def test_a_short_excursion_and_too_few_tokens_say_nothing() -> None:
    assert len([news for news in follow([4.0] * 8 + [12.0] + [4.0] * 8) if news]) == 1
    assert not any(follow([20.0] * 20, output=10.0))


def test_a_router_that_restarted_begins_anew() -> None:
    state = watch(Totals(0.0, 9e6, 0.0, 1e6), DriftState(), BAND).state
    drift = watch(Totals(30.0, 100.0, 0.0, 10.0), state, BAND)
    assert drift.ratio is None and drift.state.seen == (Totals(30.0, 100.0, 0.0, 10.0),)


SEEN = msgspec.structs.replace(
    Window(*[None] * len(Window.__struct_fields__)),  # type: ignore[arg-type]
    seconds=60.0, workers=3, requests=120.0, prompt_tokens=240_000.0, output_tokens=12_000.0, cached_share=0.25,
)  # fmt: skip


def test_the_scenario_file_is_one_that_plan_reads() -> None:
    scenario = parse(tomllib.loads(scenario_text(SEEN, 'odd "name"', "Llama-3.1-70B")))
    assert scenario.name == 'odd "name"' and scenario.model.preset == "Llama-3.1-70B"
    assert (scenario.workload.prompt_tokens, scenario.workload.output_tokens) == (2000, 100)
    assert scenario.workload.rate == 2.0 and scenario.workload.shared_prefix == 0.25
    with pytest.raises(LocalError, match="no request ended"):
        scenario_text(msgspec.structs.replace(SEEN, requests=0.0))
