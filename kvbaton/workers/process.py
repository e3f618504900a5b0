"""A worker as a process: load, serve, drain, stop.

Invariants: ``report`` says "ready" only when requests are served, with the port that was really bound; a drain refuses
new requests, lets open ones end, waits for peers that still read offered blocks, and only then lets the process end.
Knows nothing about signals or command lines.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from kvbaton.config import ModelSettings, WorkerSettings
from kvbaton.kv.shared_pool import sweep_stale
from kvbaton.kv.tier_directory import sweep_tiers
from kvbaton.transfer.reach import is_loopback, require_secret, why_not_reached
from kvbaton.types import LocalError
from kvbaton.workers.http import HttpServer, bind
from kvbaton.workers.server import ServerOptions, WorkerServer

log = logging.getLogger(__name__)
Report = Callable[..., None]
DEFAULT_KV_MIB = 1024


class StoppedEarly(Exception):
    """Told to stop while a thread was still loading the model. No thread can be ended: only the process can."""


def make_worker(model: ModelSettings, settings: WorkerSettings, key: str = "") -> Any:
    """Load the model and make the native worker. Imported late: it brings the engine with it."""
    from kvbaton.engine.engine import EngineConfig
    from kvbaton.engine.loader import LoadOptions
    from kvbaton.engine.scheduler import SchedulerConfig
    from kvbaton.kv.tier import tier_options
    from kvbaton.transfer.options import HandoffOptions
    from kvbaton.workers.native import NativeWorker, WorkerOptions

    load = LoadOptions(
        model_dir=Path(model.dir) if model.dir else None,
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        weights=model.weights,
        block_size=model.block_size,
        kv_memory_bytes=(model.kv_memory_mib or DEFAULT_KV_MIB) * 1024 * 1024,
        num_kv_blocks=model.kv_blocks or None,
        max_context=model.max_context or None,
        backend=model.backend,
        device=model.device,
        num_threads=max(1, (settings.threads or len(settings.cores)) // settings.tp),
        tp=settings.tp,
        tp_deadline_s=settings.tp_deadline_s,
    )
    scheduler = SchedulerConfig(
        max_batch_tokens=settings.chunk_tokens,
        max_running=settings.max_running,
        max_context=model.max_context or 1 << 30,
        max_waiting=settings.max_waiting,
    )
    return NativeWorker(
        load,
        EngineConfig(scheduler=scheduler, lease_s=settings.lease_s),
        WorkerOptions(
            role=settings.role,
            host=settings.kv_host or settings.host,
            kv_port=settings.kv_port,
            tier=tier_options(settings.kv_tier_memory_mib, settings.kv_tier_disk, settings.kv_tier_store, key),
            handoff=HandoffOptions(transport=settings.transport, lease_s=settings.lease_s, secret=key.encode()),
        ),
    )


async def start_over_server(model: ModelSettings, settings: WorkerSettings, key: str, stop: asyncio.Event) -> Any:
    """A worker over a server of another engine: a vLLM server of its own, unless ``engine_url`` names one that runs."""
    worker: Any
    if settings.tp > 1:
        fix = "for vLLM give --engine-args '--tensor-parallel-size N'"
        raise LocalError("tp is of the embedded engine", field="tp", fix=fix)
    for name in ("kv_tier_memory_mib", "kv_tier_disk", "kv_tier_store"):
        if getattr(settings, name):
            raise LocalError("the KV tier is one of the embedded engine", field=name, fix="leave it out")
    if settings.engine == "vllm":
        from kvbaton.workers.vllm_process import make_vllm_worker

        worker = make_vllm_worker(model, settings, key)
    else:
        from kvbaton.workers.engine_process import make_engine_worker

        worker = make_engine_worker(model, settings)
    starting = asyncio.ensure_future(worker.start())
    try:
        await first_of(starting, stop.wait())
        if not starting.done():
            raise StoppedEarly
        try:
            starting.result()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            if not settings.engine_url:
                what = str(error) or type(error).__name__
                raise LocalError(f"the worker's own server cannot be used: {what}", field="engine") from None
            why = why_not_reached(error)
            fix = "start it first, and see that it listens there"
            raise LocalError(
                f"no server answers at {settings.engine_url}: {why}", field="engine_url", fix=fix
            ) from None
    except BaseException:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await worker.stop()
        raise
    return worker


async def run_worker(
    model: ModelSettings, settings: WorkerSettings, key: str, stop: asyncio.Event, report: Report
) -> bool:
    """Serve until ``stop``, or until told to drain over HTTP. True when nothing had to be cut off and the engine lived.

    StoppedEarly when ``stop`` comes before the model is loaded: then nothing was served, and the process should end.
    """
    require_secret("the worker", settings.host, key.encode())
    bind(settings.host, settings.port).close()  # a port that is taken is known before the model is loaded
    if stale := sweep_stale():
        report("progress", message=f"removed {len(stale)} shared-memory segment(s) of processes that died")
    sweep_tiers()
    report("progress", message="loading the model")
    if settings.engine != "embedded":
        worker = await start_over_server(model, settings, key, stop)
    else:
        loading = asyncio.ensure_future(asyncio.to_thread(make_worker, model, settings, key))
        await first_of(loading, stop.wait())
        if not loading.done():
            raise StoppedEarly
        worker = loading.result()
        await worker.start()
    try:
        listener = bind(settings.host, settings.port)
        app = WorkerServer(
            worker,
            ServerOptions(
                block_size=model.block_size if settings.engine == "embedded" else worker.block_size,
                eos_token_ids=worker.eos_token_ids,
                model_name=model.name or worker.model_id,
                internal_key=key,
                closed=is_closed(settings),
                own_pages_only=settings.clients == "auto",
                kv_host=settings.kv_host or urlsplit(settings.engine_url).hostname or "",
                engine_bootstrap_port=settings.engine_bootstrap_port,
                engine_url=settings.engine_url,
                chunk_tokens=settings.chunk_tokens,
                max_running=settings.max_running,
                max_body_bytes=settings.max_body_bytes,
            ),
        )
        server = HttpServer(app)
        host, port = listener.getsockname()[:2]
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(server.serve(sockets=[listener]))
            about = {"backend": worker.backend, "incarnation": worker.incarnation, "kv_port": worker.kv_port}
            report("ready", host=host, port=port, **about)
            dying = group.create_task(engine_death(worker))
            await first_of(stop.wait(), app.drain_requested.wait(), serving, dying)
            died = dying.done()
            if died:
                log.error("the engine's thread has ended; so does this process")
            dying.cancel()
            drain_s = settings.drain_s if app.drain_deadline_s is None else app.drain_deadline_s
            clean = await app.drain(drain_s if worker.alive else 0.0)
            server.end()
        return clean and not died
    finally:
        await worker.stop()


def is_closed(settings: WorkerSettings) -> bool:
    """Whether it generates for its router alone: nobody asks clients of a worker for an API key."""
    return settings.clients == "refuse" or (settings.clients == "auto" and not is_loopback(settings.host))


async def engine_death(worker: Any) -> None:
    """Return when the engine's thread or process is no more: a process that cannot compute must not look healthy."""
    while worker.alive:  # noqa: ASYNC110 (a thread that dies sets no event)
        await asyncio.sleep(0.5)


async def first_of(*waits: Any) -> None:
    """Return when one of ``waits`` is done; those that were not tasks already are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task, wait in zip(tasks, waits, strict=True):
            if task is not wait:
                task.cancel()
