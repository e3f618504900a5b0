"""Patience is lost with a silent worker, and only as often as there is a budget for it."""

from __future__ import annotations

import asyncio

import pytest

from kvbaton.router.patience import LOOK_S, MOST_SAVED, Looks, Patience, SlownessBudget


def test_the_budget_is_a_share_of_what_is_asked() -> None:
    budget = SlownessBudget()
    assert sum(budget.spend() for _ in range(100)) == MOST_SAVED
    for _ in range(50):
        budget.earn()
    assert 4 <= sum(budget.spend() for _ in range(100)) <= 5


async def test_no_first_token() -> None:
    with pytest.raises(TimeoutError):
        async with Patience(0.01, None, SlownessBudget().spend) as patience:
            await asyncio.Event().wait()
    assert patience.cause == "slow_first_token" and not patience.begun


async def test_no_next_token() -> None:
    with pytest.raises(TimeoutError):
        async with Patience(30.0, 0.01, SlownessBudget().spend) as patience:
            patience.sign_of_life()
            await asyncio.Event().wait()
    assert patience.cause == "stalled" and patience.begun


@pytest.mark.parametrize("looks", [None, Looks()])
async def test_a_worker_that_is_down_is_not_waited_for(looks: Looks | None) -> None:
    down = False
    with pytest.raises(TimeoutError):
        async with Patience(None, None, SlownessBudget().spend, lambda: down, looks) as patience:
            await asyncio.wait((asyncio.ensure_future(asyncio.Event().wait()),), timeout=1.5 * LOOK_S)
            assert patience.cause is None
            down = True
            await asyncio.Event().wait()
    assert patience.cause == "down"


async def test_without_budget_or_rule_it_waits() -> None:
    budget = SlownessBudget()
    while budget.spend():
        pass
    spend = budget.spend
    for patience in (Patience(0.001, None, spend), Patience(None, None, spend), Patience(0.001, 0.001, spend)):
        patience.waits_for_ever()
        async with patience:
            await asyncio.wait((asyncio.ensure_future(asyncio.Event().wait()),), timeout=0.02)
            patience.sign_of_life()
            await asyncio.wait((asyncio.ensure_future(asyncio.Event().wait()),), timeout=0.02)
        assert patience.cause is None


async def test_a_cancellation_from_elsewhere_stays_one() -> None:
    async def wait() -> None:
        async with Patience(30.0, 30.0, SlownessBudget().spend):
            await asyncio.Event().wait()

    task = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_waiting_for_the_client_is_no_silence_of_the_worker() -> None:
    async with Patience(None, 0.01, SlownessBudget().spend, lambda: True) as patience:
        patience.sign_of_life()
        with patience.passing_on():
            await asyncio.wait((asyncio.ensure_future(asyncio.Event().wait()),), timeout=2.5 * LOOK_S)
        assert patience.cause is None
    with pytest.raises(TimeoutError):
        async with Patience(None, 0.01, SlownessBudget().spend) as patience:
            with patience.passing_on():
                pass
            patience.sign_of_life()
            await asyncio.Event().wait()


async def test_a_write_is_never_cut_by_what_was_noticed_just_before() -> None:
    """The worker's next part and the loss of patience come in one round of the loop: the part is not half passed on."""
    written: list[str] = []
    for _ in range(50):
        arrived = asyncio.get_running_loop().create_future()
        with pytest.raises(TimeoutError):
            async with Patience(None, None, lambda: True) as patience:
                loop = asyncio.get_running_loop()
                loop.call_later(0.002, arrived.set_result, "part")
                loop.call_later(0.002, patience._lose, "down")
                part = await arrived
                with patience.passing_on():
                    written.append("begun")
                    await asyncio.sleep(0)
                    written.append(part)
                await asyncio.Event().wait()
    assert written.count("begun") == written.count("part")
