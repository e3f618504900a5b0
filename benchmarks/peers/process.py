"""The benchmark's side of a driver: starts it on one CPU, sends a command, waits for the reply with a deadline."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOAD_DEADLINE_S = 900.0  # a compiled model may take minutes
CALL_DEADLINE_S = 300.0
REALTIME_PRIORITY = 10
# One thread in every library that keeps a pool of its own.
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), "1"
)


class DriverFailed(Exception):
    """The engine could not do what was asked; carries the end of its log."""


class DriverProcess:
    """One engine, one process, one CPU."""

    def __init__(self, python: Path, module: str, cpu: int) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._buffer = b""
        self._process = subprocess.Popen(
            [python, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, "KVBATON_BENCH_CPU": str(cpu), "TOKENIZERS_PARALLELISM": "false"},
        )

    def __enter__(self) -> DriverProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def load(self, options: dict[str, Any]) -> dict[str, Any]:
        return self.call({"command": "load", **options}, LOAD_DEADLINE_S)["info"]

    def raise_priority(self) -> None:
        """Real time for every thread of the driver: nothing ordinary runs on its CPU while it computes."""
        for thread in Path(f"/proc/{self._process.pid}/task").iterdir():
            os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(REALTIME_PRIORITY))

    def call(self, request: dict[str, Any], deadline_s: float = CALL_DEADLINE_S) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise DriverFailed(f"the engine's process is gone\n{self._log_tail()}") from error
        reply = json.loads(self._read_line(deadline_s))
        if "error" in reply:
            raise DriverFailed(f"{reply['error']}\n{self._log_tail()}")
        return reply

    def _read_line(self, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([descriptor], [], [], deadline_s)
            if not ready:
                raise DriverFailed(f"no reply within {deadline_s:.0f} s\n{self._log_tail()}")
            chunk = os.read(descriptor, 1 << 20)
            if not chunk:
                raise DriverFailed(f"the engine's process ended\n{self._log_tail()}")
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        return line

    def _log_tail(self) -> str:
        self._log.seek(max(0, self._log.seek(0, os.SEEK_END) - 2000))
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """End of stdin ends a driver; one that does not listen is killed."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()
