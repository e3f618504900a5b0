"""How the processes of a fleet are killed, frozen and thawed: by signals on this machine, by deleting pods elsewhere.

Invariants: a signal is sent only to a process that is still the one it was meant for; a pod is deleted without grace,
which is what a lost node looks like. Knows nothing about why.
"""

from __future__ import annotations

import os
import signal
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp
import psutil

from kvbaton.types import LocalError, RemoteError

API_S = 20.0
_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


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

    async def kill(self, name: str) -> str:
        return await self._signal(name, signal.SIGKILL)

    async def freeze(self, name: str) -> str:
        return await self._signal(name, signal.SIGSTOP)

    async def thaw(self, name: str) -> str:
        return await self._signal(name, signal.SIGCONT)

    async def _signal(self, name: str, number: signal.Signals) -> str:
        pid = await self.pid_of(name)
        if pid is None:
            raise RemoteError(f"{name} has no process now", field="name")
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


@dataclass(frozen=True)
class KubernetesAccess:
    """Where the API is and who we are there. ``pod_name`` makes a pod's name of a member's."""

    url: str
    namespace: str
    token: str = ""
    ca_file: Path | None = None
    pod_name: str = "{name}"

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise LocalError(f"{self.url!r} is no address of an API server", field="kube_api", fix="https://host:port")
        if "{name}" not in self.pod_name:
            raise LocalError(f"{self.pod_name!r} names every pod alike", field="pod_name", fix="put {name} into it")

    @classmethod
    def from_inside(cls, pod_name: str) -> KubernetesAccess:
        """From the service account that a pod finds mounted."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        try:
            token = (_SERVICE_ACCOUNT / "token").read_text().strip()
            namespace = (_SERVICE_ACCOUNT / "namespace").read_text().strip()
        except OSError:
            host = None
        if host is None:
            raise LocalError("this is no pod with a service account", field="kube_api", fix="give --kube-api and more")
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", namespace, token, _SERVICE_ACCOUNT / "ca.crt", pod_name)


class Kubernetes:
    """Deletes pods through the API server: ``DELETE /api/v1/namespaces/NS/pods/NAME`` with no grace period.

    Its controller makes another; the fleet page shows when that one serves. Signals do not reach into pods, so nothing
    is frozen.
    """

    can_freeze = False

    def __init__(self, access: KubernetesAccess) -> None:
        self._access = access

    async def kill(self, name: str) -> str:
        pod = self._access.pod_name.format(name=name)
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "gracePeriodSeconds": 0}
        status, answer = await self._call("DELETE", pod, options)
        if status not in (200, 202):
            raise RemoteError(
                f"deleting pod {pod} was answered {status}: {answer.get('message', '')}", field="pod_name"
            )
        uid = answer.get("metadata", {}).get("uid") or answer.get("details", {}).get("uid", "unknown")
        return f"deleted pod {pod}, uid {uid}"

    async def freeze(self, name: str) -> str:
        raise LocalError("a pod cannot be frozen through the API", field="only", fix="leave out the frozen scenarios")

    async def thaw(self, name: str) -> str:
        raise LocalError("a pod cannot be thawed through the API", field="only")

    async def check(self, names: list[str]) -> None:
        """Every member has a pod that we may see. LocalError names the first that has none."""
        for name in names:
            pod = self._access.pod_name.format(name=name)
            status, answer = await self._call("GET", pod)
            if status != 200:
                fix = "set --pod-name so that {name} gives the pod, and allow get and delete on pods"
                raise LocalError(f"pod {pod}: {status} {answer.get('message', '')}", field="pod_name", fix=fix)

    async def _call(self, method: str, pod: str, body: object = None) -> tuple[int, dict]:
        access = self._access
        url = f"{access.url.rstrip('/')}/api/v1/namespaces/{access.namespace}/pods/{pod}"
        headers = {"authorization": f"Bearer {access.token}"} if access.token else {}
        context: ssl.SSLContext | bool = True
        if access.ca_file is not None:
            context = ssl.create_default_context(cafile=str(access.ca_file))
        timeout = aiohttp.ClientTimeout(total=API_S)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, url, json=body, headers=headers, ssl=context) as response,
            ):
                return response.status, await response.json()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise RemoteError(
                f"no answer from the API server: {error or type(error).__name__}", field="kube_api"
            ) from None
