"""``kvbaton timeline``: what a fleet does for some seconds, as a file for Perfetto.

Asks every process for the spans that end meanwhile; nothing has to be switched on before, and nothing stays on.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import aiohttp
import click
import msgspec

from kvbaton.config import INTERNAL_KEY_VARIABLE
from kvbaton.observe.timeline import render
from kvbaton.observe.tracing import LONGEST_WINDOW_S, TRACE_PATH, Span, Watched
from kvbaton.router import control
from kvbaton.types import UNREADABLE, LocalError, RemoteError
from kvbaton.workers.protocol import INTERNAL_KEY_HEADER

_ANSWER_S = 20.0  # beyond the window


@click.command("timeline")
@click.argument("urls", nargs=-1)
@click.option("--seconds", type=click.FloatRange(0, LONGEST_WINDOW_S, min_open=True), default=10.0, show_default=True,
              help="How long to watch.")  # fmt: skip
@click.option("--output", "-o", type=click.Path(dir_okay=False, path_type=Path), default=Path("timeline.json"),
              show_default=True, help="The file to write.")  # fmt: skip
@click.option("--pid", type=int, help="Which fleet of `up`, when several run here.")
def timeline_command(urls: tuple[str, ...], seconds: float, output: Path, pid: int | None) -> int:
    """Watch a fleet for some seconds, and write what every request did in every process.

    URLS are the router and the workers, with KVBATON_INTERNAL_KEY in the environment; without them it is the fleet that
    `kvbaton up` keeps on this machine. Open the file at ui.perfetto.dev or in chrome://tracing.
    """
    processes = asyncio.run(_watch(urls, seconds, pid))
    num = sum(len(spans) for spans in processes.values())
    try:
        output.write_text(json.dumps(render(processes)))
    except OSError as error:
        raise LocalError(f"cannot write {output}: {error.strerror}", field="--output") from error
    click.echo(f"wrote {output}: {num} spans of {len(processes)} processes")
    if not num:
        click.echo("no request ended meanwhile", err=True)
    return 0 if num else 1


async def _watch(urls: tuple[str, ...], seconds: float, pid: int | None) -> dict[str, list[Span]]:
    """Spans by process, in the order they were named."""
    if urls:
        key, named = os.environ.get(INTERNAL_KEY_VARIABLE, ""), {url.rstrip("/"): "" for url in urls}
        if not key:
            raise LocalError("there is no internal key", field=INTERNAL_KEY_VARIABLE, fix="set it as the fleet has it")
    else:
        _, status = await control.the_one(pid)
        key, named = status.key, {each.url: each.name for each in status.processes if each.url}
    timeout = aiohttp.ClientTimeout(total=seconds + _ANSWER_S)
    async with aiohttp.ClientSession(timeout=timeout, headers={INTERNAL_KEY_HEADER.decode(): key}) as http:
        answers = await asyncio.gather(*(_one(http, url, seconds) for url in named))
    return {
        name or f"{answer.service} {url.partition('://')[2]}": answer.spans
        for (url, name), answer in zip(named.items(), answers, strict=True)
    }


async def _one(http: aiohttp.ClientSession, url: str, seconds: float) -> Watched:
    try:
        async with http.get(url + TRACE_PATH, params={"seconds": f"{seconds:g}"}) as answer:
            raw = await answer.read()
            if answer.status == 403:
                raise LocalError(f"{url} has another key", field=INTERNAL_KEY_VARIABLE, fix="set the fleet's own")
            if answer.status != 200:
                raise RemoteError(f"{url} answered {answer.status}", field="urls", fix="name routers and workers")
            return msgspec.json.decode(raw, type=Watched)
    except (aiohttp.ClientError, TimeoutError, *UNREADABLE, ValueError) as error:
        raise RemoteError(f"{url} did not answer: {error or type(error).__name__}", field="urls") from None
