"""Samples files: written as they come, whole at the end, the same from JSON lines and from Parquet."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton.bench.runner import run_load
from kvbaton.bench.samples import Run, read_run, recover, write_run
from kvbaton.bench.scripted import Script, ScriptedServer, even_script
from kvbaton.bench.summary import summarize_run
from kvbaton.bench.workload import LoadSpec
from kvbaton.types import LocalError

LOAD = LoadSpec("", model="scripted", tokenizer="none", rate_per_s=40, steady_s=0.5, input="4", warmup_requests=1,
                max_lag_ms=1e6)  # fmt: skip


async def measured(path: Path | None = None) -> Run:
    async with ScriptedServer(lambda number, body: even_script(0.01, 0.005, 5)) as server:
        return await run_load(msgspec.structs.replace(LOAD, url=server.url), samples_path=path)


async def test_a_client_that_is_ended_leaves_what_it_saw(tmp_path: Path) -> None:
    """Most answers end, one never does: what ended is in the file before the run is over."""
    path, hung = tmp_path / "run.jsonl.gz", asyncio.Event()

    def choose(number: int, body: dict[str, Any]) -> Script:
        if number == 8:
            hung.set()
            return Script(even_script(0.01, 0.005, 5).steps[:2], hang=True)
        return even_script(0.01, 0.005, 5)

    async with ScriptedServer(choose) as server:
        task = asyncio.create_task(run_load(msgspec.structs.replace(LOAD, url=server.url), samples_path=path))
        await hung.wait()
        part = tmp_path / "run.jsonl.gz.part"
        async with asyncio.timeout(60):
            while len(recover(part).samples) < 5:  # noqa: ASYNC110 - a file: nothing tells when a line is added
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not path.exists()
    left = recover(part)
    assert left.header.config["rate_per_s"] == 40
    finished = [sample for sample in left.samples if sample.ok]
    assert len(finished) >= 5
    assert all(len(sample.visible()) == 5 for sample in finished)
    assert not summarize_run(left).valid
    torn = tmp_path / "torn.part"
    torn.write_bytes(part.read_bytes()[:-7])
    assert len(recover(torn).samples) == len(left.samples) - 1
    with pytest.raises(LocalError, match="does not begin"):
        recover(Path(__file__))


async def test_a_whole_run_leaves_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    run = await measured(path)
    assert os.listdir(tmp_path) == ["run.jsonl"]
    assert read_run(path) == run


async def test_parquet_is_the_same_run(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    run = await measured()
    run.samples[0].error = "HTTP 503: busy"
    write_run(tmp_path / "run.parquet", run)
    assert read_run(tmp_path / "run.parquet") == run
    table = parquet.read_table(tmp_path / "run.parquet")
    assert table.num_rows == len(run.samples)
    assert table.column("chunk_time_s")[1].as_py() == [time for time, _, _ in run.samples[1].chunks]
    (tmp_path / "other.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(LocalError, match="not a samples file"):
        read_run(tmp_path / "other.parquet")


async def test_without_pyarrow_parquet_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    asked = []

    def choose(number: int, body: dict[str, Any]) -> Script:
        asked.append(number)
        return even_script(0.01, 0.005, 5)

    async with ScriptedServer(choose) as server:
        with pytest.raises(LocalError, match="needs pyarrow"):
            await run_load(msgspec.structs.replace(LOAD, url=server.url), samples_path=tmp_path / "run.parquet")
    assert asked == []
