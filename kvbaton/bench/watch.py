"""A progress bar on stderr while a load runs. Draws only on a terminal; knows nothing about the numbers' meaning."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from kvbaton.bench.client import Progress

T = TypeVar("T")
# Twice a second: seldom enough to cost the measured loop nothing that its lag would show.
EVERY_S = 0.5


class Watch:
    """Call it with a ``Progress`` when the load starts; ``during`` draws while a coroutine runs."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet or not sys.stderr.isatty()
        self._progress: Progress | None = None

    def __call__(self, progress: Progress) -> None:
        self._progress = progress

    async def during(self, work: Coroutine[Any, Any, T], title: str) -> T:
        if self._quiet:
            return await work
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[live]}"),
        )
        with Bar(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
            row = bar.add_task(title, total=None, live="")
            task = asyncio.ensure_future(work)
            try:
                while not task.done():
                    await asyncio.wait([task], timeout=EVERY_S)
                    seen = self._progress
                    if seen is not None:
                        live = f"{seen.in_flight} in flight, {seen.chunks} chunks, {seen.failed} failed"
                        bar.update(row, total=seen.planned, completed=seen.finished, live=live)
                        bar.refresh()
            finally:
                if not task.done():
                    task.cancel()
                    await asyncio.wait([task])
            return task.result()
