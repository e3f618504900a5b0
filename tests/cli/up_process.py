"""``kvbaton up`` as a process, for tests that need a whole fleet."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

START_S = 240  # not a bound on speed: only so that what is broken ends


@dataclass
class Up:
    process: asyncio.subprocess.Process
    url: str
    pids: dict[str, int]
    http: aiohttp.ClientSession

    async def post(self, **body: Any) -> tuple[int, Any, Any]:
        async with self.http.post(self.url + "/v1/completions", json={"temperature": 0, **body}) as response:
            return response.status, await response.json(), response.headers

    async def members(self) -> dict[str, dict[str, Any]]:
        async with self.http.get(self.url + "/fleet") as response:
            return {member["name"]: member for member in (await response.json())["members"]}

    async def until(self, condition: Callable[[dict[str, dict[str, Any]]], bool]) -> None:
        """Poll the fleet page, as an operator would."""
        async with asyncio.timeout(START_S):
            while True:
                try:
                    if condition(await self.members()):
                        return
                except aiohttp.ClientError:
                    pass  # the router itself is being started again
                await asyncio.sleep(0.05)


@asynccontextmanager
async def up(model_dir: Path, tmp_path: Path, *flags: str) -> AsyncIterator[Up]:
    errors = tmp_path / "up.err"
    with errors.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvbaton.cli.main", "up", "--model", str(model_dir), "--dtype", "float32",
            "--kv-blocks", "64", "--port", "0", "--json", "--log-dir", str(tmp_path / "logs"), *flags,
            stdout=asyncio.subprocess.PIPE, stderr=stderr,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(START_S):
                line = await process.stdout.readline()
            assert line, errors.read_text()
            ready = json.loads(line)
            yield Up(process, ready["url"], {p["name"]: p["pid"] for p in ready["processes"]}, http)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
