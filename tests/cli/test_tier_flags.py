"""The flags of the shared KV tier reach the workers, and its memory lives as long as the fleet."""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import pytest
from kv.tier_memory import assert_goes

from kvbaton.cli.up import tier_held
from kvbaton.config import FleetSettings, ModelSettings, WorkerSettings, load
from kvbaton.kv.tier import memory_name
from kvbaton.kv.tier_directory import memory_directory
from kvbaton.types import LocalError
from kvbaton.workers.process import make_worker, start_over_server


def test_the_memory_outlives_a_worker_and_goes_with_the_fleet(tiny_model_dir: Path) -> None:
    key = secrets.token_urlsafe(32)
    settings = WorkerSettings(kv_tier_memory_mib=4)
    memory = memory_directory(memory_name(key, ""))
    model = ModelSettings(dir=str(tiny_model_dir), dtype="float32", kv_blocks=16)

    async def live_once() -> None:
        worker = make_worker(model, settings, key)
        await worker.start()
        assert worker.stats().tier_memory_bytes == 0 and memory.exists()
        await worker.stop()

    with tier_held(FleetSettings(worker=settings), key):
        assert memory.exists()
        asyncio.run(live_once())
        assert memory.exists()
    assert_goes(memory)
    with tier_held(FleetSettings(), key):
        assert not memory.exists(), "nobody asked for it"


def test_without_a_fleet_it_goes_with_the_last_worker(tiny_model_dir: Path, tmp_path: Path) -> None:
    key = secrets.token_urlsafe(32)
    settings = WorkerSettings(kv_tier_memory_mib=4, kv_tier_disk=f"{tmp_path}:0.01")
    model = ModelSettings(dir=str(tiny_model_dir), dtype="float32", kv_blocks=16)

    async def live_once() -> None:
        worker = make_worker(model, settings, key)
        await worker.start()
        await worker.stop()

    asyncio.run(live_once())
    assert_goes(memory_directory(memory_name(key, settings.kv_tier_disk)))
    assert (tmp_path / "kvbaton-tier" / "index.sqlite").exists()


async def test_other_engines_have_none() -> None:
    for settings, field in (
        (WorkerSettings(engine="vllm", kv_tier_memory_mib=1), "kv_tier_memory_mib"),
        (WorkerSettings(engine="sglang", kv_tier_disk="/d:1"), "kv_tier_disk"),
        (WorkerSettings(engine="vllm", kv_tier_store="mooncake://h:1"), "kv_tier_store"),
    ):
        with pytest.raises(LocalError, match="embedded engine") as refused:
            await start_over_server(ModelSettings(), settings, "", asyncio.Event())
        assert refused.value.field == field


def test_what_makes_no_sense_is_named(tiny_model_dir: Path) -> None:
    with pytest.raises(LocalError, match="kv_tier_memory_mib"):
        load(flags={"worker": {"kv_tier_memory_mib": -1}})
    with pytest.raises(LocalError, match="DIR:GiB"):
        make_worker(ModelSettings(dir=str(tiny_model_dir)), WorkerSettings(kv_tier_disk="/no/size"))
