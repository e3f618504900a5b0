"""A router as a process: its keys, what its log holds, what others on the host can see of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from router.processes import KEY, Process
from workers.scripted import ScriptedWorker, serving

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.workers.server import ServerOptions, WorkerServer

ALICE, CAROL = "alice-key-0123456789", "carol-key-0123456789"
MARK = "zq-what-was-said-in-confidence-zq"


@asynccontextmanager
async def router(model_dir: Path, folder: Path, worker_url: str) -> AsyncIterator[Process]:
    keys, config = folder / "keys", folder / "fleet.toml"
    keys.write_text(f"alice {ALICE}\n")
    keys.chmod(0o600)
    config.write_text(f'[router]\npoll_interval_s = 0.1\n[[workers]]\nurl = "{worker_url}"\nrole = "both"\n')
    arguments = ["router", "--config", str(config), "--model", str(model_dir), "--name", "tiny",
                 "--api-keys", str(keys), "--log-level", "debug"]  # fmt: skip
    process = Process("router", arguments, folder / "router.log")
    try:
        await asyncio.to_thread(process.start)
        yield process
    finally:
        process.kill()


async def status_of(http: aiohttp.ClientSession, url: str, key: str, path: str = "/v1/models") -> int:
    async with http.get(url + path, headers={"authorization": f"Bearer {key}"}) as response:
        return response.status


async def say(http: aiohttp.ClientSession, url: str, body: Any, path: str = "/v1/completions") -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http.post(url + path, data=data, headers={"authorization": f"Bearer {ALICE}"}) as response:
        await response.read()
        return response.status


def seen_by_others(pid: int) -> tuple[bytes, int]:
    """A command line, which every user of a host can read, and who can read the environment."""
    return Path(f"/proc/{pid}/cmdline").read_bytes(), Path(f"/proc/{pid}/environ").stat().st_mode


async def test_the_keys_of_a_running_router_change_and_its_log_keeps_confidence(
    tiny_model_dir: Path, tmp_path: Path, caplog: Any
) -> None:
    """SIGHUP reads the keys again. Whatever is sent, well-formed or not, neither prompts nor keys are in any log, at
    any level; neither are they, nor the fleet's secret, in what a host shows of its processes."""
    worker = ScriptedWorker(Tokenizer.load(tiny_model_dir), text=f"so {MARK} it is")
    app = WorkerServer(worker, ServerOptions(block_size=16, model_name="tiny", internal_key=KEY))
    caplog.set_level("DEBUG")
    async with serving(app) as worker_url, router(tiny_model_dir, tmp_path, worker_url) as process:
        url = process.url
        async with aiohttp.ClientSession() as http:
            async with asyncio.timeout(120):
                while await status_of(http, url, "", "/ready") != 200:  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.02)
            assert await status_of(http, url, ALICE) == 200 and await status_of(http, url, CAROL) == 401
            chat = {"messages": [{"role": "user", "content": MARK, "name": MARK}], "stop": MARK, "user": MARK}
            assert await say(http, url, {"prompt": MARK, "metadata": {"a": MARK}, "cache_salt": MARK}) == 200
            assert await say(http, url, {"prompt": MARK, "stream": True}) == 200
            assert await say(http, url, chat, "/v1/chat/completions") == 200
            bad: list[Any] = [
                {"prompt": MARK, "temperature": 9}, {"prompt": [MARK, 1]}, {"prompt": {"a": MARK}},
                {"prompt": MARK * 999},
                f'{{"prompt": "{MARK}'.encode(), f'{{"prompt": "{MARK}\\ud800"}}'.encode(), MARK.encode(),
                {"prompt": MARK, "model": "another"}, {"prompt": MARK, "suffix": MARK}, {"prompt": MARK, "n": 10**6},
            ]  # fmt: skip
            for body in bad:
                assert 400 <= await say(http, url, body) < 500, body
            worker.error = RuntimeError("the engine broke")
            assert await say(http, url, {"prompt": MARK}) >= 500
            worker.error = None
            (tmp_path / "fresh").write_text(f"carol {CAROL}\n")
            (tmp_path / "fresh").chmod(0o600)
            os.replace(tmp_path / "fresh", tmp_path / "keys")
            os.kill(process.pid, signal.SIGHUP)
            async with asyncio.timeout(60):
                while await status_of(http, url, CAROL) != 200:  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.01)
            assert await status_of(http, url, ALICE) == 401, "the key that was taken away"
        command, environment_mode = seen_by_others(process.pid)
        assert not any(secret.encode() in command for secret in (KEY, ALICE, CAROL))
        assert environment_mode & 0o077 == 0, "its user's alone"
        process.popen.terminate()  # type: ignore[union-attr]
        await asyncio.to_thread(process.popen.wait, 60)  # type: ignore[union-attr]
    log = (tmp_path / "router.log").read_text()
    assert log.count('"message":"request"') >= 4 and '"tenant":"alice"' in log
    for secret in (MARK, KEY, ALICE, CAROL):
        assert secret not in log and secret not in caplog.text, secret
