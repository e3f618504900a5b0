"""An asyncio event loop whose clock is a number: it jumps to the next timer when nothing is ready to run.

Invariants: no socket, no thread, no wall clock; the same program makes the same steps, since callbacks run in the order
in which they were made and timers in the order of their times, those of one moment in the order they were made. An
exception that nobody takes is kept in ``errors`` and stops the loop, so that a broken invariant ends a run at the step
that broke it. Knows nothing about what runs on it.
"""

from __future__ import annotations

import asyncio
import heapq
from asyncio.events import TimerHandle
from collections.abc import Callable
from contextvars import Context
from itertools import count
from typing import Any


class NothingLeft(Exception):
    """No timer and no callback is left, but somebody still waits."""


class VirtualLoop(asyncio.BaseEventLoop):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.errors: list[BaseException] = []
        self.ending = False  # what still fails is of no interest any more
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self._numbers = count()
        self.set_exception_handler(self._keep)

    def time(self) -> float:
        return self.now_s

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> TimerHandle:  # type: ignore[override]
        timer = TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), timer))
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> TimerHandle:  # type: ignore[override]
        return self.call_at(self.now_s + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """It is passed over when its time comes."""

    def _run_once(self) -> None:
        """What is ready now; if nothing is, what comes next. The base class would wait for sockets in between."""
        timers, ready = self._timers, self._ready  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0][2].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise NothingLeft("nobody has anything to do any more, yet somebody waits")
            self.now_s = max(self.now_s, timers[0][0])
        while timers and timers[0][0] <= self.now_s:
            timer = heapq.heappop(timers)[2]
            if not timer.cancelled():
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _write_to_self(self) -> None: ...

    def _keep(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "never retrieved" in context["message"] or "destroyed" in context["message"]:
            return  # said by the garbage collector, at no certain time; whoever made the task looks at its end
        self.fail(context.get("exception") or AssertionError(context["message"]))

    def fail(self, error: BaseException) -> None:
        if not self.ending:
            self.errors.append(error)
            self.stop()

    def watch(self, task: asyncio.Task[Any]) -> None:
        """A task that ends with an exception ends the run."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """There are no threads: it is done here and now."""
        future = self.create_future()
        future.set_result(func(*args))
        return future

    async def create_connection(self, protocol_factory: Any, *args: Any, sock: Any = None, **_: Any) -> Any:  # type: ignore[override]
        return self._attach(protocol_factory, sock)

    async def connect_accepted_socket(self, protocol_factory: Any, sock: Any, **_: Any) -> Any:  # type: ignore[override]
        return self._attach(protocol_factory, sock)

    def _attach(self, protocol_factory: Any, end: Any) -> tuple[Any, Any]:
        protocol, transport = protocol_factory(), WireTransport(end)
        end.on_item = protocol.data_received
        end.on_closed = lambda: protocol.connection_lost(None)
        protocol.connection_made(transport)
        return transport, protocol

    def run(self, main: Any) -> None:
        """Until ``main`` has ended, or something broke; the first thing that broke is raised."""
        task = self.create_task(main)
        task.add_done_callback(lambda _: None if self.ending else self.stop())
        self.run_forever()
        if self.errors:
            raise self.errors[0]
        task.result()


class WireTransport(asyncio.Transport):
    """One end of a wire as protocols see it: each write is one frame."""

    def __init__(self, end: Any) -> None:
        super().__init__()
        self._end = end

    def write(self, data: Any) -> None:
        self._end.send(bytes(data))

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return bool(self._end.closed)

    def abort(self) -> None:
        self._end.close()

    close = abort
