"""A fleet of scripted workers whose router shows the live page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from router.fleet import Fleet, running_fleet

from kvbaton.clock import ManualClock
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.observe.ratio import Band
from kvbaton.ui.assets import library_path
from kvbaton.ui.page import LivePage
from kvbaton.ui.state import Aims


@dataclass
class Shown:
    fleet: Fleet
    page: LivePage
    clock: ManualClock  # the page's own, so that a second passes when a test says so

    def next_second(self) -> None:
        self.clock.advance(1.0)
        self.page.look()


@pytest.fixture
async def shown(tiny_model_dir: Path) -> AsyncIterator[Shown]:
    async with running_fleet(Tokenizer.load(tiny_model_dir), {"p0": "prefill", "d0": "decode"}) as fleet:
        clock = ManualClock()
        aims = Aims(2.0, 0.1, Band(2.0, 8.0))
        page = LivePage(aims, fleet.gateway.fleet, fleet.metrics, clock, library_path())
        fleet.gateway.page = page
        yield Shown(fleet, page, clock)
