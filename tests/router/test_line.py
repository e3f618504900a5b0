"""The line before full workers: a bound for each class, turns by priority, and an honest Retry-After."""

from __future__ import annotations

import asyncio

import pytest

from kvbaton.clock import MonotonicClock
from kvbaton.config import RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.line import LONGEST_RETRY_AFTER_S, Line, class_of
from kvbaton.workers.openai_errors import ApiError


class HandClock(MonotonicClock):
    """Moved by the test."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


def make_line(clock: MonotonicClock, **bounds: int) -> Line:
    return Line(RouterSettings(**{"max_queued": 2, "max_queued_high": 1, "max_queued_low": 1, **bounds}),
                Metrics("router"), clock)  # fmt: skip


def test_classes() -> None:
    assert [class_of(p) for p in (-7, -1, 0, 1, 99)] == ["high", "high", "normal", "low", "low"]


async def test_each_class_is_bounded_and_counted() -> None:
    line = make_line(HandClock())
    waiting = [asyncio.ensure_future(line.wait(p, 0.0, 60.0, line.busy())) for p in (0, 0, -1, 1)]
    await asyncio.sleep(0)
    assert line.num_waiting == 4
    for priority in (0, -3, 5):
        with pytest.raises(ApiError) as caught:
            await line.wait(priority, 0.0, 60.0, line.busy())
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
    exempt = asyncio.ensure_future(line.wait(0, 0.0, 60.0, line.busy(), False))
    await asyncio.sleep(0)
    assert line.num_waiting == 5, "a stream that goes on is not refused"
    for task in (*waiting, exempt):
        task.cancel()
    await asyncio.gather(*waiting, exempt, return_exceptions=True)
    assert line.num_waiting == 0


async def test_time_runs_out_with_the_error_given() -> None:
    line = make_line(HandClock())
    error = ApiError(503, "said by the worker")
    with pytest.raises(ApiError) as caught:
        await line.wait(0, 0.0, 0.0, error)
    assert caught.value is error and line.num_waiting == 0


async def test_retry_after_follows_what_requests_waited() -> None:
    clock = HandClock()
    line = make_line(clock)
    assert line.retry_after_s == 1
    for _ in range(60):
        task = asyncio.ensure_future(line.wait(0, 0.0, 60.0, line.busy()))
        await asyncio.sleep(0)
        clock.at_s += 4.0
        line.freed()
        assert await task == 4.0
    assert line.retry_after_s == 4
    for _ in range(60):
        task = asyncio.ensure_future(line.wait(0, 0.0, 60.0, line.busy()))
        await asyncio.sleep(0)
        clock.at_s += 900.0
        line.freed()
        await task
    assert line.retry_after_s == LONGEST_RETRY_AFTER_S


async def test_who_would_wait_in_vain_is_refused_at_once_even_when_others_did() -> None:
    """One is served each tick and five come, each with ten ticks of patience: those that get a place get a turn."""
    clock = HandClock()
    line = make_line(clock, max_queued=500)
    served, timed_out, refused = [], [], []

    async def request() -> None:
        came_s = clock.at_s
        try:
            await line.wait(0, came_s, 10.0, line.busy())
            served.append(came_s)
        except ApiError as error:
            (refused if error.code == "queue_full" else timed_out).append(came_s)

    waiting: list[tuple[float, asyncio.Task[None]]] = []
    for _ in range(400):
        waiting += [(clock.at_s + 10.0, asyncio.ensure_future(request())) for _ in range(5)]
        await asyncio.sleep(0)
        for due_s, task in waiting:  # time is the test's: it tells whose patience has ended
            if due_s <= clock.at_s and not task.done():
                line._room._waiting.sort()
                entry = next(e for e in line._room._waiting if e[1] == due_s - 10.0 and not e[-1].done())
                entry[-1].set_result(False)
        line.freed()
        for _ in range(4):
            await asyncio.sleep(0)
        clock.at_s += 1.0
    late = [came_s for came_s in timed_out if came_s > 200.0]
    assert len([came_s for came_s in served if came_s > 200.0]) > 150
    assert len(refused) > 1000 and len(late) < 40
    for _, task in waiting:
        task.cancel()
    await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
