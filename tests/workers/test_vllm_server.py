"""A vLLM server as the child of a worker: what it is started with, where it runs, and when it is ready."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from workers.scripted import until
from workers.test_vllm import FakeVllm, start

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.engine.model_config import ModelConfig
from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.types import LocalError, RemoteError
from kvbaton.workers import vllm_server
from kvbaton.workers.vllm import VllmOptions, VllmWorker
from kvbaton.workers.vllm_process import make_vllm_worker
from kvbaton.workers.vllm_server import ServerSpec, VllmServer, key_for_servers, split_arguments


def make_spec(tmp_path: Path, python: str = "") -> ServerSpec:
    return ServerSpec(
        python=python,
        model_dir=tmp_path,
        model_name="m",
        role="prefill",
        host="127.0.0.1",
        port=1,
        side_channel_port=2,
        dtype="bfloat16",
        max_context=64,
        kv_memory_mib=2048,
        cores=(1, 2),
        api_key="secret",
        log_path=tmp_path / "log",
        arguments=("--enforce-eager",),
    )


def test_the_key_of_the_fleet_is_in_no_command_line_and_no_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVBATON_INTERNAL_KEY", "fleet")
    spec = make_spec(tmp_path)
    environ = spec.environ()
    assert "secret" not in " ".join(spec.command()) and environ["VLLM_API_KEY"] == "secret"
    assert "KVBATON_INTERNAL_KEY" not in environ
    assert environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "127.0.0.1" and environ["VLLM_CPU_OMP_THREADS_BIND"] == "1,2"
    transfer = json.loads(spec.command()[spec.command().index("--kv-transfer-config") + 1])
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_producer", "fail")
    assert key_for_servers("fleet") not in ("", "fleet") and key_for_servers("") == ""


async def test_a_server_that_ends_early_says_why(tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 'ValueError: no such model'\nexit 3\n")
    program.chmod(0o755)
    server = VllmServer(make_spec(tmp_path, str(program)))
    with pytest.raises(LocalError, match="no such model") as caught:
        await server.start(60)
    assert caught.value.field == "engine" and not server.alive
    with pytest.raises(LocalError, match="there is no"):
        await VllmServer(make_spec(tmp_path, "/no/python")).start(60)


STRAY_SERVER = """#!{python}
import http.server, os, subprocess, sys
program = "import os, sys; os.sched_setaffinity(0, {{{stray}}}); print(flush=True); sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()  # it is where vLLM would put it
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core is the only one")
async def test_a_server_that_leaves_its_cores_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_server, "_has_cuda", lambda: False)
    own, stray = sorted(os.sched_getaffinity(0))[:2]
    program = tmp_path / "python"
    program.write_text(STRAY_SERVER.format(python=sys.executable, stray=stray))
    program.chmod(0o755)
    spec = replace(make_spec(tmp_path, str(program)), cores=(own,), port=vllm_server.free_port("127.0.0.1"))
    server = VllmServer(spec)
    try:
        await server.start(60)
        assert server._process is not None
        family = psutil.Process(server._process.pid).children(recursive=True)
        assert [os.sched_getaffinity(process.pid) for process in family] == [{own}]
    finally:
        await server.stop()


def test_settings_of_the_other_engine_are_refused_by_name(tiny_model_dir: Path) -> None:
    good = ModelSettings(dir=str(tiny_model_dir))
    assert make_vllm_worker(good, WorkerSettings(engine="vllm"), "key").alive is False
    for model, worker, field in (
        (ModelSettings(dir=str(tiny_model_dir), weights="int8"), WorkerSettings(), "weights"),
        (ModelSettings(dir=str(tiny_model_dir), kv_blocks=5), WorkerSettings(), "kv_blocks"),
        (good, WorkerSettings(engine_url="ftp://x:1"), "engine_url"),
        (good, WorkerSettings(engine_args="--port 5"), "engine_args"),
        (good, WorkerSettings(engine="vllm", role="prefill", host="0.0.0.0"), "kv_host"),
        (good, WorkerSettings(engine="vllm", role="prefill", host="[::]"), "kv_host"),
    ):
        with pytest.raises(LocalError) as caught:
            make_vllm_worker(model, worker, "key")
        assert caught.value.field == field
    reached = WorkerSettings(engine="vllm", role="prefill", host="0.0.0.0", kv_host="127.0.0.1")
    assert make_vllm_worker(good, reached, "key").alive is False
    assert split_arguments(["--enforce-eager"]) == ("--enforce-eager",)


class StartedServer(VllmServer):
    """One of ours, as far as a worker can tell; what answers is the fake."""

    started = False
    ended = False

    async def start(self, timeout_s: float) -> None:
        self.started = True

    async def stop(self) -> None:
        self.ended = True

    @property
    def alive(self) -> bool:
        return self.started and not self.ended


async def test_a_server_of_ours_serves_when_it_has_answered_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        fake = FakeVllm()
        fake.hold.clear()
        host, port = await start(stack, fake)
        options = VllmOptions(f"http://{host}:{port}", "decode", "m", api_key="k")
        server = StartedServer(make_spec(tmp_path))
        worker = VllmWorker(options, ModelConfig.from_dir(tiny_model_dir), Tokenizer.load(tiny_model_dir), server)
        starting = asyncio.ensure_future(worker.start())
        stack.push_async_callback(worker.stop)
        await until(lambda: bool(fake.bodies))
        assert not starting.done()
        assert (fake.bodies[0]["stream"], fake.bodies[0]["logprobs"]) == (False, 1)
        fake.hold.set()
        await starting
        fake.status = 500
        again = VllmWorker(options, worker.config, worker.tokenizer, server)
        stack.push_async_callback(again.stop)
        with pytest.raises(RemoteError, match="vLLM answers 500"):
            await again.start()
