"""``kvbaton up --engine vllm`` as a process, with the real vLLM servers behind its workers in reach."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_S = 1200  # not a bound on speed: only so that what is broken ends
PEERS = Path(os.environ.get("KVBATON_PEERS") or Path.home() / ".cache" / "kvbaton" / "peers")
PYTHON = PEERS / "vllm" / "bin" / "python"
MAX_CONTEXT = 2048
BLOCK = 128  # tokens, of vLLM on a CPU
KV_BYTES = 30 * 2 * 3 * 64 * 4  # of one token: layers, K and V, heads, dimension, float32
TEXTS = [
    f"{topic} has a long history, and people have told it in many ways. " * 20
    for topic in ("The river", "A small engine", "Every library", "The night train")
]
# Chunks, so that a long prompt takes several steps: vLLM tells nobody of a request that came and went in one.
ENGINE_ARGS = "--enforce-eager --max-num-batched-tokens 256 --max-num-seqs 64"
# float32, so that what is computed in another batch or chunk does not flip a greedy token.
FLAGS = (
    *("--engine", "vllm", "--engine-python", str(PYTHON), "--engine-args", ENGINE_ARGS, "--dtype", "float32"),
    *("--max-context", str(MAX_CONTEXT), "--kv-memory", "1024", "--name", "m", "--threshold-tokens", "0"),
)


def text_of(answer: httpx.Response) -> str:
    return str(answer.json()["choices"][0]["text"])


def until(what: str, condition: Callable[[], Any], timeout_s: float = START_S) -> Any:
    """Poll, as an operator would."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        with contextlib.suppress(httpx.HTTPError):
            if found := condition():
                return found
        time.sleep(0.1)
    raise AssertionError(f"never: {what}")


@dataclass
class Server:
    """One vLLM server, the child of a worker."""

    process: psutil.Process
    url: str

    def figure(self, name: str, **labels: str) -> float:
        """Summed over what matches."""
        text = httpx.get(self.url + "/metrics", timeout=60).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())


@dataclass
class VllmFleet:
    process: subprocess.Popen[bytes]
    url: str
    urls: dict[str, str]  # of the workers
    http: httpx.Client

    def complete(self, where: str = "", **body: Any) -> httpx.Response:
        """By the router, or by the worker of that name alone."""
        url = self.urls[where] if where else self.url
        body = {"model": "m", "temperature": 0, "max_tokens": 12, **body}
        return self.http.post(url + "/v1/completions", json=body)

    @contextlib.contextmanager
    def leaving(self, body: dict[str, Any]) -> Iterator[None]:
        """A client that sent ``body`` and is gone behind the block, whatever came back until then."""
        raw = json.dumps({"temperature": 0, **body}).encode()
        host, port = self.url.removeprefix("http://").split(":")
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
            yield

    def members(self) -> dict[str, dict[str, Any]]:
        return {member["name"]: member for member in self.http.get(self.url + "/fleet").json()["members"]}

    def refresh(self) -> None:
        """Addresses of workers that were started again."""
        command = [
            sys.executable,
            "-m",
            "kvbaton.cli.main",
            "fleet",
            "status",
            "--json",
            "--pid",
            str(self.process.pid),
        ]
        found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout)
        self.urls = {member["name"]: member["url"] for member in found["members"]}

    def server(self, name: str) -> Server:
        """The worker's vLLM, found as what it started."""
        for worker in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if worker.environ().get("KVBATON_WORKER_ENGINE_LOG", "").endswith(f"/{name}-engine.log"):
                    for child in worker.children():
                        words = child.cmdline()
                        if "vllm.entrypoints.openai.api_server" in words:
                            return Server(child, "http://127.0.0.1:" + words[words.index("--port") + 1])
        raise AssertionError(f"{name} has no server")


def family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


@contextlib.contextmanager
def running(model_dir: Path, directory: Path, *flags: str) -> Iterator[VllmFleet]:
    """Ends with nothing of it left, or an AssertionError that says what is."""
    command = [sys.executable, "-m", "kvbaton.cli.main", "up", "--json", "--port", "0", "--model", str(model_dir)]
    command += ["--log-dir", str(directory / "logs"), *FLAGS, *flags]
    with (directory / "up.err").open("wb") as stderr:
        # What is slow here is the machine, not a server that hangs: nothing is asked twice for it.
        environ = {**os.environ, "KVBATON_ROUTER_FIRST_TOKEN_FACTOR": "0"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, env=environ)
    started: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # `up` has a deadline of its own
        assert line, (directory / "up.err").read_text()
        ready = json.loads(line)
        started = family(psutil.Process(process.pid))
        urls = {one["name"]: one["url"] for one in ready["processes"]}
        with httpx.Client(timeout=600) as http:
            yield VllmFleet(process, ready["url"], urls, http)
    finally:
        if process.poll() is None:
            started += family(psutil.Process(process.pid))
            process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(180)
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    _, left = psutil.wait_procs(set(started), timeout=60)
    for one in left:
        one.kill()
    assert not left, f"left behind: {left}"
