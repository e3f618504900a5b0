"""Worker and router processes of one fleet, for tests that kill them: each can be started again at its address."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

KEY = "p" * 20
FLAGS = ["--dtype", "float32", "--kv-blocks", "256"]


@dataclass
class Process:
    """One process. ``start`` again after ``kill`` keeps the ports of the first time."""

    name: str
    arguments: list[str]
    log: Path
    environ: dict[str, str] = field(default_factory=dict)
    port: int = 0
    kv_port: int = 0
    popen: subprocess.Popen[str] | None = None
    incarnation: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.popen is not None
        return self.popen.pid

    def start(self) -> dict[str, Any]:
        command = [sys.executable, "-m", "kvbaton.cli.main", *self.arguments, "--port", str(self.port), "--json"]
        errors: IO[bytes] = self.log.open("ab")
        with errors:
            self.popen = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "KVBATON_INTERNAL_KEY": KEY, **self.environ},
            )
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        assert line, self.log.read_text()
        ready: dict[str, Any] = json.loads(line)
        self.port = ready["port"]
        self.incarnation = ready.get("incarnation", "")
        return ready

    def stop_running(self) -> None:
        """It is there, its sockets are open, and it does nothing (SIGSTOP)."""
        os.kill(self.pid, signal.SIGSTOP)

    def kill(self) -> None:
        """kill -9."""
        if self.popen is None:
            return
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait(30)
        if self.popen.stdout is not None:
            self.popen.stdout.close()
        self.popen = None


class ProcessFleet:
    """One prefill worker, two decode workers and a router, as processes."""

    def __init__(self, model_dir: Path, folder: Path) -> None:
        self._folder = folder
        self._model_dir = model_dir
        self.workers = {name: self._worker(name) for name in ("p0", "d0", "d1")}
        self.router = Process("router", [], folder / "router.log")

    def _worker(self, name: str) -> Process:
        role = "prefill" if name.startswith("p") else "decode"
        arguments = ["worker", "--role", role, "--model", str(self._model_dir), "--name", "tiny", *FLAGS]
        # Small steps, so that a prompt is many of them and a death can fall between two.
        return Process(name, [*arguments, "--chunk-tokens", "16", "--max-running", "16"], self._folder / f"{name}.log")

    def start(self) -> None:
        for process in self.workers.values():
            process.start()
        members = "".join(
            f'[[workers]]\nname = "{name}"\nurl = "{process.url}"\nrole = "{process.arguments[2]}"\n'
            for name, process in self.workers.items()
        )
        config = self._folder / "fleet.toml"
        config.write_text(f"[router]\nthreshold_tokens = 0\npoll_interval_s = 0.1\npoll_timeout_s = 10.0\n{members}")
        self.router.arguments = ["router", "--config", str(config), "--model", str(self._model_dir), "--name", "tiny"]
        self.router.start()

    def end(self) -> None:
        for process in (self.router, *self.workers.values()):
            process.kill()
