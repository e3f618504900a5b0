"""Members of a fleet on Kubernetes: the pods that carry our labels, listed once and then watched.

Invariants: what the cluster says is taken whole at each listing (a missed event never lasts) and in order between two;
an API server that cannot be reached changes nothing, for the workers are still there; a pod leaves only when it is gone
or has ended, so that one that drains is still seen draining. Knows nothing about whether a worker is well.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, get_args

from kvbaton.config import MemberSettings, RouterSettings
from kvbaton.transfer.reach import in_url
from kvbaton.types import LocalError, RemoteError, Role

log = logging.getLogger(__name__)
ROLE_LABEL = "kvbaton.dev/role"
PREFIX = "kubernetes:"
_WATCH_S = 60  # a watch is renewed by a listing after so long, whatever happened
_LIST_S = 30
_PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
_NAMESPACE_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
Tell = Callable[[Sequence[MemberSettings]], None]


def selector_of(discover: str) -> str:
    """The label selector in ``kubernetes:SELECTOR``."""
    if not discover.startswith(PREFIX) or "=" not in discover:
        fix = "write kubernetes:app.kubernetes.io/instance=NAME"
        raise LocalError(f"{discover!r} is no way to find workers", field="discover", fix=fix)
    return discover.removeprefix(PREFIX)


def namespace() -> str:
    """Where we run: told by the environment or by the service account; else `default`."""
    if named := os.environ.get("POD_NAMESPACE"):
        return named
    try:
        with open(_NAMESPACE_FILE) as file:
            return file.read().strip()
    except OSError:
        return "default"


@asynccontextmanager
async def open_api() -> AsyncIterator[Any]:
    """The cluster we run in, or the one of the kubeconfig."""
    try:
        from kubernetes_asyncio import client, config
    except ImportError:
        fix = "pip install 'kvbaton[kubernetes]'"
        raise LocalError("finding workers on Kubernetes needs its client", field="discover", fix=fix) from None
    try:
        config.load_incluster_config()
    except config.ConfigException:
        try:
            await config.load_kube_config()
        except (config.ConfigException, OSError) as error:
            raise LocalError(f"no cluster is configured: {error}", field="discover") from None
    async with client.ApiClient() as api:
        yield client.CoreV1Api(api)


async def follow_pods(settings: RouterSettings, listed: Sequence[MemberSettings], tell: Tell) -> None:
    """Until cancelled: the members are those that were ``listed`` and the cluster's."""
    selector = selector_of(settings.discover)
    async with open_api() as core:
        follower = PodFollower(selector, namespace(), settings.worker_port, lambda found: tell([*listed, *found]))
        await follower.run(core)


class PodFollower:
    """Tells the members whenever they changed."""

    def __init__(self, selector: str, where: str, worker_port: int, tell: Tell) -> None:
        self._query: dict[str, Any] = {"namespace": where, "label_selector": selector}
        self._worker_port = worker_port
        self._tell = tell
        self._members: dict[str, MemberSettings] = {}
        self._told: dict[str, MemberSettings] | None = None

    async def run(self, core: Any) -> None:
        """Until cancelled."""
        num_failures = 0
        while True:
            try:
                await self._list_and_watch(core)
                num_failures = 0
            except RemoteError as error:
                num_failures += 1
                log.warning("pods cannot be followed: %s", error)
                await asyncio.sleep(_PAUSES_S[min(num_failures, len(_PAUSES_S)) - 1])

    async def _list_and_watch(self, core: Any) -> None:
        """Returns when it is time to list again; RemoteError when that should wait a little."""
        from kubernetes_asyncio import client, watch

        try:
            async with asyncio.timeout(_LIST_S):
                listed = await core.list_namespaced_pod(**self._query)
            self._members = {}
            for pod in listed.items:
                self._take(pod)
            self._say()
            query = {**self._query, "resource_version": listed.metadata.resource_version}
            async with (
                asyncio.timeout(_WATCH_S + _LIST_S),  # the server ends it before, unless the connection is dead
                watch.Watch().stream(core.list_namespaced_pod, **query, timeout_seconds=_WATCH_S) as events,
            ):
                async for event in events:
                    if event["type"] != "BOOKMARK":
                        self._take(event["object"], gone=event["type"] == "DELETED")
                        self._say()
        except client.ApiException as error:
            if error.status != 410:  # 410: what we know is too old, so it is listed anew at once
                raise RemoteError(f"the API server answers {error.status} {error.reason}") from None
        except Exception as error:  # the client raises bare ones for what it cannot parse
            raise RemoteError(f"{type(error).__name__}: {error}") from None

    def _take(self, pod: Any, gone: bool = False) -> None:
        name = pod.metadata.name
        member = None if gone else self._member(pod)
        if member is None:
            self._members.pop(name, None)
        else:
            self._members[name] = member

    def _member(self, pod: Any) -> MemberSettings | None:
        role: Any = (pod.metadata.labels or {}).get(ROLE_LABEL)
        address = pod.status.pod_ip
        if role not in get_args(Role) or not address or pod.status.phase != "Running":
            return None
        host = in_url(address)
        return MemberSettings(f"http://{host}:{self._worker_port}", role, pod.metadata.name)

    def _say(self) -> None:
        if self._members != self._told:
            self._told = dict(self._members)
            log.info("the cluster has %d workers", len(self._told))
            self._tell([self._told[name] for name in sorted(self._told)])
