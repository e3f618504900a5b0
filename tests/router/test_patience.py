"""Patience is lost with a silent worker, and only as often as there is a budget for it."""

from __future__ import annotations

import asyncio

import pytest

from kvbaton.router.patience import LOOK_S, MOST_SAVED, Patience, SlownessBudget


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


async def test_a_worker_that_is_down_is_not_waited_for() -> None:
    down = False
    with pytest.raises(TimeoutError):
        async with Patience(None, None, SlownessBudget().spend, lambda: down) as patience:
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
