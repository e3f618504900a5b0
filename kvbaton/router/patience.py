"""How long an attempt may be silent before another worker is asked: gray failures, where a worker answers its health
checks and nothing else.

Three rules. The first token may take ``first_token_factor`` times what the policy estimated, and never less than
``first_token_min_s``. Between two tokens of a stream that could be continued elsewhere, ``stream_stall_s``. And nobody
waits for a worker that is known to be down, as far as others are up: that is all a whole answer has, which shows
nothing before its end.
Invariants: only a small share of all requests is ever given up for a slow first token, so that a fleet that is slow as
a whole is not made slower by asking twice; without another worker to ask, nobody loses patience.
Knows nothing about workers or requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

SHARE = 0.1  # of requests that may be asked twice for slowness alone; a usual retry budget
MOST_SAVED = 10.0  # so many at once after a quiet time
LOOK_S = 0.5  # between two looks at whether the worker is down; as often as it is polled


class SlownessBudget:
    """Each request adds a share, each impatience takes one."""

    def __init__(self) -> None:
        self._saved = MOST_SAVED

    def earn(self) -> None:
        self._saved = min(MOST_SAVED, self._saved + SHARE)

    def spend(self) -> bool:
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


class Looks:
    """Looks at all attempts that are under way, every ``LOOK_S``: a timer for each would cost every request one."""

    def __init__(self) -> None:
        self._at: set[Patience] = set()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, patience: Patience, loop: asyncio.AbstractEventLoop) -> None:
        self._at.add(patience)
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look, loop)

    def end(self, patience: Patience) -> None:
        self._at.discard(patience)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        for patience in list(self._at):
            patience.look()
        self._timer = loop.call_later(LOOK_S, self._look, loop) if self._at else None


class Patience:
    """``async with Patience(...)``: a TimeoutError when it is lost; ``cause`` then says which rule.

    Only a wait for the worker is ever broken off. While a part is being passed on (``passing_on``) the client is what
    is waited for: that is no fault of the worker, and a write that is cut in the middle would lose text.
    """

    def __init__(
        self,
        first_token_s: float | None,
        stall_s: float | None,
        may_give_up: Callable[[], bool],
        hopeless: Callable[[], bool] | None = None,
        looks: Looks | None = None,
    ) -> None:
        """None: that rule does not apply.

        ``may_give_up`` is asked once when a first token is late; ``hopeless`` again and again: whether the worker is
        down, and another could be asked. ``looks``: shared by all, for those that need not be looked at more often.
        """
        self.cause: str | None = None
        self.begun = False  # something came
        self._first_token_s = first_token_s
        self._stall_s = stall_s
        self._may_give_up = may_give_up
        self._hopeless = hopeless
        self._looks = looks
        self._passing_on = False
        self._heard_s = 0.0  # when the worker was heard of, or the client had what it said
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0  # requests to cancel the task that are not ours

    async def __aenter__(self) -> Self:
        self._loop = loop = asyncio.get_running_loop()
        self._task = asyncio.current_task()
        assert self._task is not None, "patience is a task's"
        self._cancelling = self._task.cancelling()
        self._heard_s = loop.time()
        if self._first_token_s is not None:
            self._timer = loop.call_later(self._first_token_s, self._too_slow)
        if self._hopeless is not None or self._stall_s is not None:
            if self._looks is not None and self._look_s >= LOOK_S:
                self._looks.begin(self, loop)
            else:
                self._look = loop.call_later(self._look_s, self._look_again)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._look is not None:
            self._look.cancel()
        elif self._looks is not None:
            self._looks.end(self)
        if self.cause is not None and self._task is not None:
            ours = self._task.uncancel() <= self._cancelling
            if ours and kind is asyncio.CancelledError:
                raise TimeoutError from error

    @property
    def _look_s(self) -> float:
        """Often enough that a stall is noticed after 1 to 1.5 times its limit."""
        return LOOK_S if self._stall_s is None else min(LOOK_S, self._stall_s / 2)

    def _lose(self, cause: str) -> None:
        """Break off the wait. The task stands in it: it cannot reach a write before it hears of this."""
        assert self._task is not None
        self.cause = cause
        self._task.cancel()

    def _too_slow(self) -> None:
        if self.cause is None and self._may_give_up():
            self._lose("slow_first_token")

    def _look_again(self) -> None:
        self.look()
        if self.cause is None:
            self._look = self._loop.call_later(self._look_s, self._look_again)

    def look(self) -> None:
        """Now and then: is there still reason to wait?"""
        if self.cause is not None or self._passing_on:
            return
        if self._hopeless is not None and self._hopeless():
            self._lose("down")
        elif self._silent_s(self._loop) > (self._stall_s or math.inf):
            self._lose("stalled")

    def _silent_s(self, loop: asyncio.AbstractEventLoop) -> float:
        """Between two tokens; a first token has a rule of its own."""
        return loop.time() - self._heard_s if self.begun else 0.0

    def waits_for_ever(self) -> None:
        """Between tokens."""
        self._stall_s = None

    def sign_of_life(self) -> None:
        """A part came."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.begun = True
        self._heard_s = self._loop.time()

    @contextlib.contextmanager
    def passing_on(self) -> Iterator[None]:
        """``with patience.passing_on(): await write(...)``, where the client has to be waited for."""
        self._passing_on = True
        try:
            yield
        finally:
            self._passing_on = False
            self._heard_s = asyncio.get_running_loop().time()
