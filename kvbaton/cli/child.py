"""What a worker or router process needs besides its work: signals, reports, cores, and dying with its parent.

Invariants: the first SIGTERM or SIGINT starts a drain, the second ends at once; a process started by ``kvbaton up``
never outlives it: the kernel sends SIGTERM when the parent dies, its stdin ends, and a timer ends what then lingers.
Knows nothing about what the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import click

_PR_SET_PDEATHSIG = 1
ORPHAN_GRACE_S = 5.0  # from the parent's death to our end, whatever is still running
Report = Callable[..., None]


def stay_on(cores: tuple[int, ...]) -> None:
    """Before threads are made: they inherit it."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def reporter(report_fd: int | None, as_json: bool, what: str) -> Report:
    """How the process says what happens to it: lines for a parent on ``report_fd``, or for people."""
    pipe = os.fdopen(report_fd, "w") if report_fd is not None else None

    def report(event: str, **fields: Any) -> None:
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                print(json.dumps({"event": event, "pid": os.getpid(), **fields}), file=pipe, flush=True)
        elif event != "ready":
            click.echo(f"{what}: {fields.get('message', event)}", err=True)
        elif as_json:
            click.echo(json.dumps({"event": event, "pid": os.getpid(), **fields}))
        else:
            click.echo(f"{what} ready at http://{fields['host']}:{fields['port']}")

    return report


def run(work: Callable[[asyncio.Event], Coroutine[Any, Any, bool]], tied: bool, uvloop: bool = False) -> int:
    """Run ``work`` until it ends; it is told to stop by the event. Exit code 1 when something had to be cut off."""

    async def main() -> bool:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_signal() -> None:
            if stop.is_set():
                end_at_once(130)
            stop.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        if tied:
            tie_to_parent(loop, lambda: _end_orphaned(stop))
        return await work(stop)

    if uvloop:
        from uvloop import new_event_loop

        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            return 0 if runner.run(main()) else 1
    return 0 if asyncio.run(main()) else 1


def end_at_once(code: int) -> NoReturn:
    """Without waiting for any thread; only the names of our shared memory go first, for nobody else would know them."""
    from kvbaton.kv.shared_pool import unlink_own

    unlink_own()
    os._exit(code)


def tie_to_parent(loop: asyncio.AbstractEventLoop, on_gone: Callable[[], None]) -> None:
    """The parent holds our standard input and never writes: readable means that it is gone, however it went."""

    def on_stdin() -> None:
        loop.remove_reader(sys.stdin.fileno())
        on_gone()

    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    loop.add_reader(sys.stdin.fileno(), on_stdin)


def _end_orphaned(stop: asyncio.Event) -> None:
    stop.set()
    timer = threading.Timer(ORPHAN_GRACE_S, end_at_once, (1,))
    timer.daemon = True
    timer.start()
