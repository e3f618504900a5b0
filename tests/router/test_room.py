"""The queue of those that found no room: order, bounds, and no lost turn."""

from __future__ import annotations

import asyncio

from kvbaton.router.room import Room


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
    while room.num_waiting < 4:  # noqa: ASYNC110
        await asyncio.sleep(0)
    room.freed()
    await asyncio.gather(*tasks)
    assert order == ["urgent", "early", "late", "low"] and room.num_waiting == 0


async def test_time_runs_out() -> None:
    room = Room(10)
    assert await room.wait(0, 0.0, 0.0) is False
    assert room.num_waiting == 0


async def test_the_first_in_line_tries_even_when_nobody_calls() -> None:
    assert await Room(10).wait(0, 0.0, 60) is True


async def test_one_that_leaves_does_not_take_the_turn_with_it() -> None:
    room = Room(2)
    first, second = (asyncio.ensure_future(room.wait(0, at_s, 60)) for at_s in (1.0, 2.0))
    while room.num_waiting < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert room.full
    first.cancel()
    await asyncio.wait((first,))
    room.freed()
    assert await second is True
    assert not room.full
    room.freed()  # nobody waits: harmless
