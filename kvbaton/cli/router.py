"""``kvbaton router``: one router process, for fleets and for ``kvbaton up``."""

from __future__ import annotations

import asyncio
import functools
import signal
from pathlib import Path
from typing import Any

import click

from kvbaton.cli import child, options
from kvbaton.config import internal_key
from kvbaton.types import LocalError


@click.command("router")
@options.flags(options.ROUTER_FLAGS, options.DISCOVERY_FLAGS, options.MODEL_FLAGS[:2])
@options.process_options(tied_help="End when the parent ends, and take members from it.")
def router_command(
    settings: dict[str, dict[str, Any]],
    config: Path | None,
    log_level: str,
    as_json: bool,
    report_fd: int | None,
    tied: bool,
) -> int:
    """The router: one OpenAI-compatible address in front of the workers of a fleet file.

    \b
    fleet.toml:
        [model]
        dir = "/models/SmolLM2-135M-Instruct"
        [[workers]]
        url = "http://10.0.0.7:8101"
        role = "prefill"
        [[workers]]
        url = "http://10.0.0.8:8101"
        role = "decode"

    Router and workers share a key in the environment variable KVBATON_INTERNAL_KEY. Clients have API keys, in a file
    (--api-keys) or in KVBATON_API_KEYS; without any the router listens on this host alone, unless --allow-anonymous.
    SIGTERM drains; SIGHUP reads the file of API keys again, which a change of it does too.
    """
    fleet = options.read_settings(config, settings)
    key = internal_key()
    if not tied and not fleet.workers and not fleet.router.discover:
        fix = "list them as [[workers]] in --config, or give --discover"
        raise LocalError("the fleet has no workers", field="workers", fix=fix)
    if not key:
        fix = "set the same secret for the router and every worker"
        raise LocalError("there is no internal key", field="KVBATON_INTERNAL_KEY", fix=fix)
    child.stay_on(fleet.router.cores)
    from kvbaton.engine.tokenizer import Tokenizer
    from kvbaton.engine.weights import default_model_dir
    from kvbaton.observe.log import configure
    from kvbaton.observe.ratio import read_band
    from kvbaton.observe.tracing import RECORDER
    from kvbaton.router.api_keys import load as load_api_keys
    from kvbaton.router.door import check_reach
    from kvbaton.router.gateway import Served
    from kvbaton.router.process import run_router
    from kvbaton.ui.page import open_page
    from kvbaton.ui.state import Aims

    api_keys = load_api_keys(fleet.router.api_keys_file)
    check_reach(fleet.router, api_keys, key)
    configure("router", log_level)
    RECORDER.configure("kvbaton-router")
    model_dir = Path(fleet.model.dir) if fleet.model.dir else default_model_dir()
    served = Served(fleet.model.name or model_dir.name, Tokenizer.load(model_dir))
    report = child.reporter(report_fd, as_json, "router")
    page = None
    if fleet.router.ui:
        aims = Aims(fleet.router.ttft_slo_s, fleet.router.tpot_slo_s, read_band(fleet.router.plan_band))
        page = functools.partial(open_page, aims)

    async def work(stop: asyncio.Event) -> bool:
        if api_keys is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, api_keys.hurry)
        return await run_router(served, fleet.workers, fleet.router, key, stop, report, page, api_keys)

    try:
        return child.run(work, tied, uvloop=True)
    finally:
        RECORDER.close()
