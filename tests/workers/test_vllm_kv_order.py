"""Batches of KV events in order and once: live, replayed, lost, late, and of a publisher that is another one."""

from __future__ import annotations

from random import Random

import pytest

from kvbaton.workers.vllm_kv_order import MAX_KEPT, BatchOrder, Forget, Step


def payload(number: int) -> bytes:
    return b"%d" % number


def shown(steps: list[Step]) -> list[object]:
    return [step.why if isinstance(step, Forget) else step.number for step in steps]


def live(order: BatchOrder, *numbers: int) -> list[object]:
    return [one for number in numbers for one in shown(order.live(number, payload(number)))]


def replay(order: BatchOrder, *numbers: int) -> list[object]:
    found = [one for number in numbers for one in shown(order.replayed(number, payload(number)))]
    return found + shown(order.replay_ended())


@pytest.fixture
def order() -> BatchOrder:
    """One that knows all there was before it listened: nothing."""
    order = BatchOrder()
    assert order.wants_replay == 0
    assert replay(order) == [] and order.wants_replay is None
    return order


def test_in_order_is_applied_at_once(order: BatchOrder) -> None:
    assert live(order, 0, 1, 2) == [0, 1, 2]
    assert order.wants_replay is None


def test_a_hole_is_filled_by_a_replay_and_nothing_is_applied_twice(order: BatchOrder) -> None:
    assert live(order, 0, 3) == [0]
    assert order.wants_replay == 1 and live(order, 4) == []
    assert replay(order, 1, 2, 3, 4, 5) == [1, 2, 3, 4, 5]
    assert order.wants_replay is None and order.num_gaps == 1
    assert live(order, 5, 6) == [6], "what was replayed comes live too"


def test_a_hole_that_nothing_fills_is_forgotten_first(order: BatchOrder) -> None:
    live(order, 0, 5)
    assert replay(order, 3, 4, 5) == ["gap", 3, 4, 5]
    live(order, 9)
    assert replay(order) == ["gap", 9], "no replay at all"
    live(order, 12, 14)
    assert replay(order, 15) == ["gap", 12, "gap", 14, 15]


def test_who_comes_late_learns_what_is_still_there() -> None:
    order = BatchOrder()
    assert live(order, 7) == []
    assert replay(order, 5, 6, 7) == [5, 6, 7], "nothing was learnt before, so nothing is forgotten"


def test_another_publisher_starts_over(order: BatchOrder) -> None:
    live(order, 0, 1, 2)
    assert live(order, 0) == ["restart", 0]
    assert order.wants_replay == 0
    assert replay(order, 0, 1) == [1]
    assert shown(order.restarted()) == ["restart"] and order.wants_replay == 0
    assert shown(order.restarted()) == [], "nothing is known"


def test_silence_makes_it_ask_again(order: BatchOrder) -> None:
    live(order, 0)
    order.look_again()
    assert order.wants_replay == 1
    assert replay(order, 1) == [1]


def test_what_waits_for_a_replay_is_bounded(order: BatchOrder) -> None:
    live(order, 0, *range(2, MAX_KEPT + 100))
    found = replay(order)
    assert found[0] == "gap" and len(found) == MAX_KEPT + 1 and found[-1] == MAX_KEPT + 99


@pytest.mark.parametrize("seed", range(50))
def test_whatever_is_dropped_everything_comes_once_and_in_order(seed: int) -> None:
    random, order, found = Random(seed), BatchOrder(), []
    for number in range(100):
        if random.random() < 0.7:
            found += live(order, number)
        if order.wants_replay is not None and random.random() < 0.3:
            found += replay(order, *range(order.wants_replay, number + 1))
    order.look_again()
    assert order.wants_replay is not None
    found += replay(order, *range(order.wants_replay, 100))
    assert found == list(range(100))
