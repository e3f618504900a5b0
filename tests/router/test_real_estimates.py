"""Real engines behind a router that routes by cost: estimates are made, held against what happened, and exported."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from router.fleet import Fleet
from router.gates import gate_of
from router.test_real_fleet import PROMPT, real_fleet
from workers.scripted import until

from kvbaton.router.cost import TERMS
from kvbaton.router.explain import read_record, replay


class Lines(logging.Handler):
    """The fields of the router's request lines."""

    def __init__(self) -> None:
        super().__init__()
        self.fields: list[dict[str, Any]] = []

    def emit(self, line: logging.LogRecord) -> None:
        if line.getMessage() == "request":
            self.fields.append(line.__dict__["fields"])


@pytest.fixture
def lines() -> Any:
    logger, handler = logging.getLogger("kvbaton.router.gateway"), Lines()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield handler.fields
    logger.removeHandler(handler)
    logger.setLevel(before)


async def stream(fleet: Fleet, prompt: str, max_tokens: int = 8) -> str:
    body = {"prompt": prompt, "temperature": 0, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    status, _, headers = await fleet.post(body)
    assert status == 200
    return str(headers["x-kvbaton-decision"])


async def test_estimates_are_made_checked_and_exported(tiny_model_dir: Path, lines: list[dict[str, Any]]) -> None:
    settings = {"threshold_tokens": None, "ttft_slo_s": 1_000.0, "tpot_slo_s": 1.0}  # streams are dear
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}, **settings) as real:
        fleet = real.fleet
        decode = fleet.registry.get("d0")
        assert decode is not None
        # Short prompts stay; beside their streams a long one would hold up many, so it goes to the prefill worker.
        gated = gate_of(real.workers["d0"])
        gated.gate.clear()
        streams = [asyncio.ensure_future(stream(fleet, str(number), 60)) for number in range(10)]
        await until(lambda: decode.own_requests == 10)
        long = asyncio.ensure_future(stream(fleet, "first " + PROMPT * 8))
        await until(lambda: decode.own_requests == 11)
        gated.gate.set()
        assert await long == "remote"
        assert "local_cheaper" in await asyncio.gather(*streams)
        await fleet.poll()
        for number in range(6):
            await stream(fleet, f"{number} " + PROMPT * 4)
        await real.check_empty()

        fleet.registry.export()
        for path in ("local", "remote"):
            assert fleet.counter(f'kvbaton_router_ttft_estimate_error_ratio_count{{path="{path}"}}') > 0
        for member in ("p0", "d0"):
            name = f'kvbaton_router_model_samples{{member="{member}",model="prefill"}}'
            assert fleet.counter(name) > 0, name
        assert fleet.counter('kvbaton_router_model_samples{member="d0",model="step"}') > 0
        token_s = fleet.counter('kvbaton_router_model_parameter{member="d0",parameter="prefill_token_s"}')
        assert 0 < token_s < 0.1
        assert fleet.counter('kvbaton_router_link_parameter{decode="d0",parameter="byte_s",prefill="p0"}') > 0

        first = [each for each in lines if each["report"] is not None]
        assert len(first) == 10 + 1 + 6
        for fields in first:
            assert fields["terms"].keys() >= TERMS.keys(), "the terms of what was chosen"
            assert fields["report"]["prefill_s"] > 0
            again = replay(read_record(msgspec.json.encode(fields)))
            assert again.agrees, again.differences
            assert {each.prefill is None for each in again.record.placements} == {True, False}


async def test_estimates_become_what_was_measured(tiny_model_dir: Path, lines: list[dict[str, Any]]) -> None:
    """Whatever the cold start believes of this machine; after a few prompts the router knows it."""
    async with real_fleet(tiny_model_dir, {"b0": "both"}, threshold_tokens=None) as real:
        for number in range(20):
            await stream(real.fleet, f"{number} " + PROMPT * (1 + number % 8))
            await real.fleet.settled()  # or the next one would seem to have run beside it
        await real.check_empty()
        model = real.fleet.registry.measured.learning.workers["b0"].prefill
        assert 3 < model.count <= 20, "each counts; a machine that changes its speed meanwhile starts it over at three"
        ratios = []
        for report in (fields["report"] for fields in lines):
            tokens = report["num_prompt_tokens"] - report["num_cached_tokens"]
            features = (-(-tokens // 64), tokens, tokens * (report["num_prompt_tokens"] - tokens / 2))
            ratios.append(model.expect(features) / report["prefill_s"])
        assert 0.2 < median(ratios) < 5, "single ones may be anything on a busy machine"
