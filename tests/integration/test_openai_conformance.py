"""The embedded engine keeps every promise of ``openai_conformance``; real vLLM workers in test_vllm_fleet.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from integration.openai_conformance import PROMISES, Service, the_model_is_listed, what_is_wrong_is_named
from router.test_real_fleet import RealFleet, real_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tiny_model_dir: Path) -> AsyncIterator[RealFleet]:
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as found:
        yield found


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_a_split_fleet_keeps_the_promise(fleet: RealFleet, promise: Callable[[Service], None]) -> None:
    before = fleet.workers["d0"].stats().transfer_bytes_received
    await asyncio.to_thread(promise, Service(fleet.fleet.url, "tiny"))
    if promise not in (the_model_is_listed, what_is_wrong_is_named):
        assert fleet.workers["d0"].stats().transfer_bytes_received > before, "it is kept by a fleet that hands over"
