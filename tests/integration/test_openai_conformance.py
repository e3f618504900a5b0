"""The embedded engine keeps every promise of ``openai_conformance``; real vLLM workers in test_vllm_fleet.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from integration.openai_conformance import PROMISES, Service
from router.test_real_fleet import real_fleet

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tiny_model_dir: Path) -> AsyncIterator[Service]:
    async with real_fleet(tiny_model_dir, {"p0": "prefill", "d0": "decode"}) as fleet:
        yield Service(fleet.fleet.url, "tiny")


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_a_split_fleet_keeps_the_promise(service: Service, promise: Callable[[Service], None]) -> None:
    await asyncio.to_thread(promise, service)
