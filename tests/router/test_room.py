"""The queue of those that found no room: order, bounds, and no lost turn."""

from __future__ import annotations

import asyncio

import pytest

from kvbaton.config import RouterSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.line import Line
from kvbaton.router.room import Room
from kvbaton.workers.openai_errors import ApiError


async def all_wait(room: Room | Line, number: int) -> None:
    while room.num_waiting < number:  # noqa: ASYNC110 (tasks have no event for having begun)
        await asyncio.sleep(0)


async def test_priority_then_arrival() -> None:
    room, order = Room(10), []

    async def request(name: str, priority: int, received_s: float) -> None:
        assert await room.wait(priority, received_s, 60)
        order.append(name)
        room.freed()  # it got in: the next may try

    tasks = [
        asyncio.ensure_future(request(*arguments))
        for arguments in (("late", 0, 3.0), ("low", 1, 1.0), ("early", 0, 2.0), ("urgent", -1, 9.0))
    ]
    await all_wait(room, 4)
    room.freed()
    await asyncio.gather(*tasks)
    assert order == ["urgent", "early", "late", "low"] and room.num_waiting == 0


async def test_time_runs_out() -> None:
    room = Room(10)
    assert await room.wait(0, 0.0, 0.0) is False
    assert await asyncio.gather(*(room.wait(0, 0.0, 0.001) for _ in range(3))) == [False] * 3
    assert room.num_waiting == 0


async def test_the_first_in_line_tries_even_when_nobody_calls() -> None:
    assert await Room(10).wait(0, 0.0, 60) is True


async def test_one_that_leaves_does_not_take_the_turn_with_it() -> None:
    room = Room(2)
    first, second = (asyncio.ensure_future(room.wait(0, at_s, 60)) for at_s in (1.0, 2.0))
    await all_wait(room, 2)
    assert room.full
    first.cancel()
    await asyncio.wait((first,))
    room.freed()
    assert await second is True
    assert not room.full
    room.freed()  # nobody waits: harmless


async def test_one_that_is_woken_and_cancelled_passes_its_turn_on() -> None:
    room = Room(2)
    first, second = (asyncio.ensure_future(room.wait(0, at_s, 60)) for at_s in (1.0, 2.0))
    await all_wait(room, 2)
    room.freed()
    first.cancel()  # it was woken, but has not run since
    assert await second is True
    assert first.cancelled() or isinstance((await asyncio.gather(first, return_exceptions=True))[0], BaseException)


async def test_those_who_left_take_no_memory() -> None:
    room = Room(100)
    stays = asyncio.ensure_future(room.wait(-1, 0.0, 60))
    await all_wait(room, 1)
    for number in range(200):
        leaves = asyncio.ensure_future(room.wait(0, float(number), 60))
        await all_wait(room, 2)
        leaves.cancel()
        await asyncio.wait((leaves,))
    assert len(room._waiting) < 25
    room.freed()
    assert await stays is True


class Hand:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s


async def test_ten_times_overload_in_virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is served each tick and ten come, for 200 ticks: the queue stays short, nobody is served late, all
    others are told at once when to come back, and the line is empty soon after the load went away."""
    clock, loop = Hand(), asyncio.get_running_loop()
    stopped_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: stopped_s)  # no timer of the room's own goes off, however long this takes
    line = Line(RouterSettings(max_queued=500), Metrics("router"), clock)
    tick_s, patience_s = 0.1, 2.0
    served, refused, late = [], [], []

    async def request() -> None:
        received_s = clock.at_s
        try:
            await line.wait(0, received_s, patience_s, line.busy())
        except ApiError as error:
            assert error.status == 429 and error.retry_after_s is not None
            refused.append(clock.at_s - received_s)
        else:
            served.append(clock.at_s)
            late.append(clock.at_s - received_s)

    async def let_all_run() -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    longest = 0
    for _ in range(200):
        tasks += [asyncio.ensure_future(request()) for _ in range(10)]
        await let_all_run()
        line.freed()
        await let_all_run()
        longest = max(longest, line.num_waiting)
        clock.at_s += tick_s
    assert len(served) == 200  # every turn was used
    assert longest < 60  # as many as can be served in time and some, far below the bound of the class
    assert refused and max(refused) == 0.0
    assert max(late) <= 4 * patience_s  # without early refusal it is the whole bound of the class, 50 s
    while line.num_waiting:
        line.freed()
        await let_all_run()
    await asyncio.gather(*tasks)
    assert len(served) + len(refused) == 2000


async def test_a_better_class_is_not_refused_for_those_behind_it() -> None:
    clock = Hand()
    line = Line(RouterSettings(), Metrics("router"), clock)
    first = asyncio.ensure_future(line.wait(0, 0.0, 60, line.busy()))
    await all_wait(line, 1)
    clock.at_s = 100.0
    line.freed()
    await first  # a place in the line costs some seconds, as far as is known
    waits = asyncio.ensure_future(line.wait(0, 100.0, 60, line.busy()))
    await all_wait(line, 1)
    urgent = asyncio.ensure_future(line.wait(-1, 100.0, 1.0, line.busy()))
    await all_wait(line, 2)
    for priority in (0, 1):  # with 1 s of patience, behind others
        with pytest.raises(ApiError) as refused:
            await line.wait(priority, 101.0, 1.0, line.busy())
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
    line.freed()
    await urgent
    again = asyncio.ensure_future(line.wait(0, -1.0, 1.0, line.busy()))  # came before, was woken too early
    await all_wait(line, 2)
    line.freed()
    line.freed()
    await asyncio.gather(waits, again)
