"""Cases about KV layouts: the size in use is the one that is told; a format with scales beside it is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.kv.layout import DTYPE_BYTES, KVLayout
from kvbaton.types import LocalError
from kvbaton.workers.process import make_worker


@pytest.mark.parametrize("name", ["fp8_block32", "mxfp8", "nvfp4", "int8", "float8_e4m3+scales"])
def test_kv_15_a_format_whose_scales_would_stay_behind_is_refused(name: str) -> None:
    """Every format that there is has its whole content in the block: nothing beside it could be forgotten."""
    with pytest.raises(LocalError, match="unknown KV dtype") as caught:
        KVLayout(2, 2, 8, 16, name)
    assert caught.value.field == "dtype"
    for dtype, itemsize in DTYPE_BYTES.items():
        layout = KVLayout(2, 2, 8, 16, dtype)
        assert layout.block_bytes == 2 * 2 * 2 * 8 * 16 * itemsize


@pytest.mark.parametrize("block_size", [16, 32])
def test_kv_02_the_block_size_in_use_is_the_one_that_is_advertised(tiny_model_dir: Path, block_size: int) -> None:
    """Pool, engine, handshake and the page for routers speak of one number, which is the layout's."""

    async def look() -> None:
        model = ModelSettings(dir=str(tiny_model_dir), name="tiny", dtype="float32", kv_blocks=8, block_size=block_size)
        worker = make_worker(model, WorkerSettings(role="prefill", chunk_tokens=64))
        await worker.start()
        try:
            identity = worker.identity
            assert identity.layout.block_size == worker.engine._blocks.block_size == block_size
            assert worker.kv_events is not None and worker.kv_events.block_size == block_size
            assert msgspec.msgpack.decode(msgspec.msgpack.encode(identity.layout), type=KVLayout) == identity.layout
            assert worker.loaded.pool.shared.buffer.nbytes == identity.layout.block_bytes * identity.num_blocks
        finally:
            await worker.stop()

    asyncio.run(look())
