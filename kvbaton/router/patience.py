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
from collections.abc import Callable
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


class Patience:
    """``async with Patience(...)``: a TimeoutError when it is lost; ``cause`` then says which rule."""

    def __init__(
        self,
        first_token_s: float | None,
        stall_s: float | None,
        may_give_up: Callable[[], bool],
        hopeless: Callable[[], bool] | None = None,
    ) -> None:
        """None: that rule does not apply.

        ``may_give_up`` is asked once when a first token is late; ``hopeless`` again and again: whether the worker is
        down, and another could be asked.
        """
        self.cause: str | None = None
        self.begun = False  # something came
        self._first_token_s = first_token_s
        self._stall_s = stall_s
        self._may_give_up = may_give_up
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._armed_s = 0.0
        self._hopeless = hopeless
        self._look: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        if self._first_token_s is not None:
            self._timer = asyncio.get_running_loop().call_later(self._first_token_s, self._too_slow)
        if self._hopeless is not None:
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._look_again)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for timer in (self._timer, self._look):
            if timer is not None:
                timer.cancel()
        if self._timeout.expired() and self.cause is None:
            self.cause = "stalled"
        await self._timeout.__aexit__(kind, error, trace)

    def _too_slow(self) -> None:
        if self._may_give_up():
            self.cause = "slow_first_token"
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        if self._hopeless is not None and self._hopeless():
            self.cause = "down"
            self._timeout.reschedule(loop.time())
        else:
            self._look = loop.call_later(LOOK_S, self._look_again)

    def waits_for_ever(self) -> None:
        """Between tokens."""
        self._stall_s = None

    def sign_of_life(self) -> None:
        """A part came. Sets a timer only now and then: a stall is noticed after 1 to 1.5 times its limit."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.begun = True
        if self._stall_s is None:
            return
        now_s = asyncio.get_running_loop().time()
        if now_s - self._armed_s > self._stall_s / 2:
            self._armed_s = now_s
            self._timeout.reschedule(now_s + 1.5 * self._stall_s)
