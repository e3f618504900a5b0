"""The router as a process: members, monitor, gateway, drain.

Knows nothing about signals or command lines, nor about where its members come from: a fleet file, or ``kvbaton up``
that tells it while it runs.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable

import aiohttp

from kvbaton.clock import MonotonicClock
from kvbaton.config import MemberSettings, RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.api_keys import ApiKeys
from kvbaton.router.canary import Canary
from kvbaton.router.discovery import follow_pods
from kvbaton.router.dispatch import Dispatcher
from kvbaton.router.door import Door, check_reach
from kvbaton.router.gateway import Gateway, Served
from kvbaton.router.monitor import Monitor
from kvbaton.router.page import OpenPage
from kvbaton.router.prefix_index import PrefixIndex
from kvbaton.router.prior import learning_from
from kvbaton.router.registry import Registry
from kvbaton.workers.http import HttpServer, bind
from kvbaton.workers.http_client import HttpClient
from kvbaton.workers.process import first_of

log = logging.getLogger(__name__)
Report = Callable[..., None]


def open_client(settings: RouterSettings) -> HttpClient:
    """For requests."""
    return HttpClient(settings.connect_timeout_s, settings.stall_timeout_s)


def open_session(settings: RouterSettings) -> aiohttp.ClientSession:
    """For polls. Workers keep connections longer (75 s) than we do, so that none is reused while it closes."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.stall_timeout_s
        ),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )


async def run_router(
    served: Served,
    members: tuple[MemberSettings, ...],
    settings: RouterSettings,
    key: str,
    stop: asyncio.Event,
    report: Report,
    open_page: OpenPage | None = None,
    keys: ApiKeys | None = None,
) -> bool:
    """Serve until ``stop``, or until told to drain. True when no request had to be cut off."""
    check_reach(settings, keys, key)
    metrics, clock = Metrics("router"), MonotonicClock()
    index = PrefixIndex(settings.index_block_tokens, settings.index_blocks, settings.index_exact_blocks)
    registry = Registry(members, served.name, index, metrics, learning_from(settings.profile))
    listener = bind(settings.host, settings.port)
    async with open_session(settings) as session, open_client(settings) as client:
        dispatcher = Dispatcher(registry, index, client, settings, key, metrics, clock)
        gateway = Gateway(registry, dispatcher, served, settings, key, metrics, clock)
        anonymous = keys is None and not settings.allow_anonymous
        gateway.door = Door(keys, key.encode(), settings.open_metrics, own_pages_only=anonymous)
        server = HttpServer(gateway, settings.head_timeout_s, half_closes=True)
        host, port = listener.getsockname()[:2]
        async with asyncio.TaskGroup() as group:
            watching = [group.create_task(Monitor(registry, index, session, settings, key, metrics).run())]
            if keys is not None:
                watching.append(group.create_task(keys.follow()))
            if settings.canary_interval_s:
                canary = Canary(registry, session, served.tokenizer, key, metrics)
                watching.append(group.create_task(canary.run(settings.canary_interval_s)))
            if settings.discover:
                watching.append(group.create_task(follow_pods(settings, members, registry.set_members)))
            if open_page is not None:
                gateway.page = open_page(gateway.fleet, metrics, clock)
                watching.append(group.create_task(gateway.page.run()))
            serving = group.create_task(server.serve(sockets=[listener]))
            # What is here now stays: the collector need not walk through tokenizer and modules again and again.
            gc.collect()
            gc.freeze()
            gc.set_threshold(10_000, 20, 20)
            report("ready", host=host, port=port)
            await first_of(stop.wait(), gateway.drain_requested.wait(), serving)
            log.info("draining")
            clean = await gateway.drain(settings.drain_s)
            for task in watching:
                task.cancel()
            server.end()
        gateway.close()
    return clean
