"""How the processes of a fleet are killed, frozen and thawed: by signals on this machine, by deleting pods elsewhere.

Invariants: a signal is sent only to a process that is still the one it was meant for; a pod is deleted without grace,
which is what a lost node looks like. Knows nothing about why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import psutil

from kvbaton.router.discovery import ROLE_LABEL, open_api
from kvbaton.types import LocalError, RemoteError

API_S = 20.0
ROUTERS = f"{ROLE_LABEL}=router"  # as `kvbaton deploy` labels them


class Killer(Protocol):
    """Names are those of the fleet page; ``router`` is the router."""

    can_freeze: bool

    async def kill(self, name: str) -> str:
        """At once and without a farewell. What was killed, in words."""
        ...

    async def freeze(self, name: str) -> str: ...

    async def thaw(self, name: str) -> str: ...


@dataclass
class LocalProcesses:
    """By signals. ``pid_of`` tells who it is at that moment; None while it is being started."""

    pid_of: Callable[[str], Awaitable[int | None]]
    can_freeze: bool = True
    _frozen: dict[str, int] = field(default_factory=dict)  # who cannot tell its own process id now

    async def kill(self, name: str) -> str:
        return self._signal(name, await self._pid(name), signal.SIGKILL)

    async def freeze(self, name: str) -> str:
        """With the processes it started: ranks, or the server of another engine. Else that would serve on."""
        pid = await self._pid(name)
        self._frozen[name] = pid
        told = self._signal(name, pid, signal.SIGSTOP)
        return told + self._others(pid, signal.SIGSTOP)

    async def thaw(self, name: str) -> str:
        pid = self._frozen.pop(name, 0) or await self._pid(name)
        others = self._others(pid, signal.SIGCONT)
        return self._signal(name, pid, signal.SIGCONT) + others

    @staticmethod
    def _others(pid: int, number: signal.Signals) -> str:
        count = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.send_signal(number)
                    count += 1
        return f" and {count} of its own" if count else ""

    async def _pid(self, name: str) -> int:
        pid = await self.pid_of(name)
        if pid is None:
            raise RemoteError(f"{name} has no process now", field="name")
        return pid

    @staticmethod
    def _signal(name: str, pid: int, number: signal.Signals) -> str:
        try:
            words = psutil.Process(pid).cmdline()
            if not any("kvbaton" in word for word in words):
                raise RemoteError(f"process {pid} of {name} is something else now: {' '.join(words)[:80]}")
            os.kill(pid, number)
        except (psutil.NoSuchProcess, ProcessLookupError):
            raise RemoteError(f"process {pid} of {name} is gone", field="name") from None
        except (psutil.AccessDenied, PermissionError):
            raise LocalError(f"process {pid} of {name} is another user's", field="name") from None
        return f"{number.name} to {name}, process {pid}"


class Kubernetes:
    """Deletes pods through the API server, of the cluster we run in or of the kubeconfig, with no grace period.

    Members are called as their pods are (``kvbaton router --discover``). The pod's controller makes another, under
    another name; the fleet page shows when that one serves. Signals do not reach into pods: nothing is frozen.
    """

    can_freeze = False

    def __init__(self, namespace: str, router_selector: str) -> None:
        self._namespace = namespace
        self._router_selector = router_selector

    async def kill(self, name: str) -> str:
        async with self._core() as core:
            pod = await self._router(core) if name == "router" else name
            deleted = await core.delete_namespaced_pod(pod, self._namespace, grace_period_seconds=0)
        uid = getattr(getattr(deleted, "metadata", None), "uid", None)
        return f"deleted pod {pod}" + (f", uid {uid}" if uid else "")

    async def freeze(self, name: str) -> str:
        raise LocalError("a pod cannot be frozen through the API", field="only", fix="leave out the frozen scenarios")

    async def thaw(self, name: str) -> str:
        raise LocalError("a pod cannot be thawed through the API", field="only")

    async def check(self, names: list[str]) -> None:
        """Every member is a pod that we may see. LocalError names the first that is not."""
        for name in names:
            try:
                async with self._core() as core:
                    await core.read_namespaced_pod(name, self._namespace)
            except RemoteError as error:
                fix = "give the namespace of the fleet, and allow get, list and delete on pods"
                raise LocalError(f"member {name} is no pod that we see: {error}", field="kubernetes", fix=fix) from None

    async def _router(self, core: Any) -> str:
        found = await core.list_namespaced_pod(self._namespace, label_selector=self._router_selector)
        running = sorted(pod.metadata.name for pod in found.items if pod.status.phase == "Running")
        if not running:
            raise RemoteError(f"no pod of {self._router_selector} runs in {self._namespace}", field="router_selector")
        return str(running[0])

    @asynccontextmanager
    async def _core(self) -> AsyncIterator[Any]:
        """The API, with every way it can fail as a RemoteError."""
        async with open_api() as core:
            from kubernetes_asyncio.client import ApiException

            try:
                async with asyncio.timeout(API_S):
                    yield core
            except ApiException as error:
                raise RemoteError(f"the API server answers {error.status} {error.reason}") from None
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                raise RemoteError(f"no answer from the API server: {error or type(error).__name__}") from None
