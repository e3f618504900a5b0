"""Fleets of scripted workers for the router's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from router.fleet import Fleet, running_fleet
from workers.scripted import ScriptedWorker

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.workers.server import ServerOptions, WorkerServer


@pytest.fixture
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture
async def split(tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    async with running_fleet(tokenizer, {"p0": "prefill", "d0": "decode"}) as fleet:
        yield fleet


@pytest.fixture
async def pairs(tokenizer: Tokenizer) -> AsyncIterator[Fleet]:
    roles: Any = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    async with running_fleet(tokenizer, roles) as fleet:
        yield fleet


@pytest.fixture
async def info(tokenizer: Tokenizer) -> bytes:
    return msgspec.json.encode(WorkerServer(ScriptedWorker(tokenizer), ServerOptions(block_size=16)).info())
