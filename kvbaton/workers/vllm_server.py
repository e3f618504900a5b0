"""A vLLM server as a child of this process: its flags, its environment, its start and its end.

Invariants: the server listens where we say and takes only calls with the fleet's key; it never outlives us; that it
ended is known at once. Knows nothing about requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import json
import logging
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from kvbaton.transfer.reach import in_url
from kvbaton.types import LocalError, RemoteError, Role
from kvbaton.workers.socket_directory import SocketDirectory
from kvbaton.workers.vllm_kv_follow import EventEndpoints

log = logging.getLogger(__name__)
_KV_ROLES: dict[Role, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}
_POLL_S = 0.25
_END_S = 20.0
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class ServerSpec:
    """What is started, and how."""

    python: str  # of the environment that has vLLM; empty: ours
    model_dir: Path
    model_name: str
    role: Role
    host: str
    port: int
    side_channel_port: int
    dtype: str
    max_context: int
    kv_memory_mib: int
    cores: tuple[int, ...]
    api_key: str
    log_path: Path
    arguments: tuple[str, ...] = ()  # more flags of vLLM's, as they are
    events_dir: Path | None = None  # a private directory for the sockets of its KV events; None: it publishes none

    def command(self) -> list[str]:
        transfer = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[self.role]}
        # What fails is told, counted and tried elsewhere by the router; unasked, versions differ in what they do.
        transfer["kv_load_failure_policy"] = "fail"
        if not _has_cuda():
            transfer["kv_buffer_device"] = "cpu"
        events = [] if self.endpoints is None else ["--kv-events-config", json.dumps(self._events(self.endpoints))]
        return [
            self.python or sys.executable,
            *("-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(self.model_dir), "--served-model-name", self.model_name),
            *("--dtype", self.dtype, "--max-model-len", str(self.max_context)),
            *("--host", self.host, "--port", str(self.port)),
            *("--kv-transfer-config", json.dumps(transfer)),
            "--enable-prompt-tokens-details",  # without it nobody says how much of a prompt was cached
            *events,
            *self.arguments,
        ]

    @property
    def endpoints(self) -> EventEndpoints | None:
        """Sockets in the file system: nothing of what is cached can be read over the network."""
        if self.events_dir is None:
            return None
        return EventEndpoints(f"ipc://{self.events_dir}/live", f"ipc://{self.events_dir}/replay")

    @staticmethod
    def _events(endpoints: EventEndpoints) -> dict[str, object]:
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoints.live,
            "replay_endpoint": endpoints.replay,
        }

    def environ(self) -> dict[str, str]:
        extra = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": self.host,  # its default, localhost, fails between hosts without a word
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_channel_port),
            "VLLM_CPU_KVCACHE_SPACE": str(max(1, self.kv_memory_mib // 1024)),
        }
        if self.cores:
            extra["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, self.cores))
        if self.api_key:
            extra["VLLM_API_KEY"] = self.api_key
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVBATON_")}
        return {**kept, **extra}


def key_for_servers(internal_key: str) -> str:
    """The key of the fleet's vLLM servers: made from the fleet's own, which is never given to another program."""
    return hashlib.blake2b(b"vllm", key=internal_key.encode()[:64], digest_size=24).hexdigest() if internal_key else ""


def free_port(host: str) -> int:
    """A port that nobody has now. Somebody may take it before it is used: then the server says so, and ends."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        port: int = sock.getsockname()[1]
        return port


class VllmServer:
    """``sockets``: the directory that ``spec`` names, which goes with the server."""

    def __init__(self, spec: ServerSpec, sockets: SocketDirectory | None = None) -> None:
        self.spec = spec
        self._sockets = sockets
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        host = in_url(self.spec.host)
        return f"http://{host}:{self.spec.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self, timeout_s: float) -> None:
        """Until it answers. LocalError with the last lines of its log when it ends before, or does not come up."""
        command = self.spec.command()
        if shutil.which(command[0]) is None:
            raise LocalError(f"there is no {command[0]}", field="engine_python", fix="name the python that has vLLM")
        out = os.open(self.spec.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=self.spec.environ(),
                start_new_session=True,  # it starts processes of its own, which must end with it
                preexec_fn=_die_with_parent,
            )
        finally:
            os.close(out)
        try:
            async with asyncio.timeout(timeout_s):
                await self._answers()
            if not _has_cuda() and (moved := back_on_their_cores(self._process.pid, self.spec.cores)):
                log.info("%d processes of vLLM had left their cores, and are back on them", len(moved))
        except TimeoutError:
            await self.stop()
            raise LocalError(f"vLLM did not come up in {timeout_s:.0f} s: {self._tail()}", field="engine") from None
        except BaseException:
            await self.stop()
            raise

    async def _answers(self) -> None:
        async with aiohttp.ClientSession(trust_env=False) as session:
            while True:
                if not self.alive:
                    raise LocalError(f"vLLM ended while it started: {self._tail()}", field="engine")
                with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
                    async with asyncio.timeout(5), session.get(self.url + "/health") as response:
                        if response.status == 200:
                            return
                await asyncio.sleep(_POLL_S)

    def _tail(self) -> str:
        try:
            lines = self.spec.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return "it left no log"
        errors = [line for line in lines if "rror" in line] or lines
        return f"{errors[-1].strip() if errors else 'its log is empty'} (log: {self.spec.log_path})"

    async def wait(self) -> None:
        """Returns when it has ended."""
        assert self._process is not None
        await self._process.wait()

    async def stop(self) -> None:
        if self._process is not None:
            await self._end(self._process)
        if self._sockets is not None:
            self._sockets.close()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_S):
                    await process.wait()
        if process.returncode is None:
            raise RemoteError("vLLM does not end")


def back_on_their_cores(pid: int, cores: Sequence[int]) -> list[int]:
    """The main thread of each process of that family which may run anywhere else may not any more; whose they are.

    vLLM 0.32 with NixlConnector on a CPU binds every server's main thread, which computes, to the last core of each
    NUMA node, whatever cores it was given: all servers of a machine would share that one.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        return []
    moved = []
    with contextlib.suppress(psutil.NoSuchProcess):
        first = psutil.Process(pid)
        for process in (first, *first.children(recursive=True)):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if not os.sched_getaffinity(process.pid) <= set(cores):
                    os.sched_setaffinity(process.pid, cores)
                    moved.append(process.pid)
    return moved


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _has_cuda() -> bool:
    return os.path.exists("/dev/nvidiactl")


def split_arguments(given: Sequence[str]) -> tuple[str, ...]:
    """Flags of vLLM's. Those that are ours to set are refused by name."""
    ours = (
        *("--model", "--served-model-name", "--dtype", "--max-model-len", "--host", "--port"),
        *("--kv-transfer-config", "--kv-events-config"),
    )
    for word in given:
        if word.split("=")[0] in ours:
            raise LocalError(f"{word} is set by kvbaton", field="engine_args", fix="leave it out")
    return tuple(given)
