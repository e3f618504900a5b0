"""``kvbaton worker``: one worker process, for fleets and for ``kvbaton up``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import click

from kvbaton.cli import child, options
from kvbaton.config import internal_key
from kvbaton.transfer.reach import require_secret


@click.command("worker")
@options.flags(
    *(options.WORKER_FLAGS, options.MODEL_FLAGS, options.ENGINE_FLAGS, options.DRAIN_FLAG),
    *(options.SERVER_FLAGS, options.ENGINE_URL_FLAG),
)
@options.process_options(tied_help="End when the parent ends.")
def worker_command(
    settings: dict[str, dict[str, Any]],
    config: Path | None,
    log_level: str,
    as_json: bool,
    report_fd: int | None,
    tied: bool,
) -> int:
    """One worker: loads the model, serves OpenAI's API on its own port, and hands KV to its peers.

    Router and workers of a fleet share a key in the environment variable KVBATON_INTERNAL_KEY; without it the worker
    listens on this host alone, answers clients there, and takes no orders from a router. SIGTERM drains: open requests
    end, offered blocks are read.
    """
    fleet = options.read_settings(config, settings)
    require_secret("the worker", fleet.worker.host, internal_key().encode())
    child.stay_on(fleet.worker.cores)
    # Imported late: everything heavy comes after the cores are chosen.
    from kvbaton.observe.log import configure
    from kvbaton.observe.tracing import RECORDER
    from kvbaton.workers.process import StoppedEarly, run_worker

    configure(f"worker-{fleet.worker.role}", log_level)
    RECORDER.configure(f"kvbaton-{fleet.worker.role}")
    report = child.reporter(report_fd, as_json, f"{fleet.worker.role} worker")

    async def work(stop: asyncio.Event) -> bool:
        try:
            return await run_worker(fleet.model, fleet.worker, internal_key(), stop, report)
        except StoppedEarly:
            child.end_at_once(0)

    try:
        return child.run(work, tied)
    finally:
        RECORDER.close()
