"""What is left of the prompts on their way to a worker, against sums over their tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.router.sent import RECENT_HALF_S, Sent, pool_shares


def test_what_queued_tokens_look_at_is_the_end_of_what_was_sent() -> None:
    sent = Sent()
    sent.prompt("first", 1_000, 0, 1, 0.0)  # its tokens look at 500 on average
    sent.prompt("second", 100, 2_000, 1, 0.0)  # at 2,050
    assert sent.queued_pairs(1_100) == pytest.approx(1_000 * 500 + 100 * 2_050)
    assert sent.queued_pairs(500) == pytest.approx(400 * 800 + 100 * 2_050), "600 of the first are computed"
    assert sent.queued_pairs(50) == pytest.approx(50 * 2_075)
    assert sent.queued_pairs(0) == 0.0


def test_tokens_that_others_sent_count_as_like_ours() -> None:
    sent = Sent()
    assert sent.queued_pairs(5_000) == 0.0, "nothing is known of them"
    sent.prompt("ours", 1_000, 0, 1, 0.0)
    assert sent.queued_pairs(3_000) == pytest.approx(3 * 1_000 * 500)


def test_prompts_of_one_request_do_not_look_at_each_other() -> None:
    sent = Sent()
    sent.prompt("batch", 1_000, 0, 10, 0.0)
    assert sent.queued_pairs(1_000) == pytest.approx(10 * 100 * 50)


def test_what_is_computed_is_gone_and_is_gone_once() -> None:
    sent = Sent()
    sent.prompt("first", 1_000, 0, 1, 0.0)
    sent.prompt("second", 100, 0, 1, 0.0)
    sent.computed("first")
    sent.computed("first")
    sent.computed("never sent")
    assert sent.queued_pairs(100) == pytest.approx(100 * 50)
    sent.computed("second")
    assert sent.queued_pairs(1_000) == 0.0


def test_what_was_lately_fades_and_what_was_found_is_lost_with_the_cache() -> None:
    sent = Sent()
    assert (sent.work_share(5.0), sent.found_tokens_per_s(5.0)) == (0.0, 0.0)
    sent.prompt("miss", 1_000, 0, 1, 5.0, 0.1)
    assert sent.found_tokens_per_s(5.0) == 0.0, "nothing was found there"
    sent.prompt("hit", 10, 6_000, 1, 10.0, 0.01)
    share, found = sent.work_share(10.0), sent.found_tokens_per_s(10.0)
    assert share > 0.0 and found > 0.0
    assert sent.work_share(10.0 + RECENT_HALF_S) == pytest.approx(share / 2)
    assert sent.found_tokens_per_s(10.0 + RECENT_HALF_S) == pytest.approx(found / 2)
    sent.lost_cache()
    assert (sent.work_share(10.0), sent.found_tokens_per_s(10.0)) == (share, 0.0)


def test_a_steady_stream_shows_as_its_rates() -> None:
    sent = Sent()
    for second in range(1_000):
        sent.prompt(second, 10, 300, 1, float(second), 0.4)
        sent.computed(second)
    assert sent.work_share(999.0) == pytest.approx(0.4, rel=0.02)
    assert sent.found_tokens_per_s(999.0) == pytest.approx(300.0, rel=0.02)
    shares = pool_shares([("prefill", sent), ("prefill", Sent()), ("decode", Sent())], 999.0)
    assert shares == {"prefill": sent.work_share(999.0) / 2, "decode": 0.0}


def test_a_clock_that_steps_back_makes_nothing_grow() -> None:
    sent = Sent()
    sent.prompt("hit", 10, 6_000, 1, 10.0, 0.01)
    assert sent.work_share(3.0) == sent.work_share(10.0)


@given(
    st.lists(st.tuples(st.integers(1, 100_000), st.integers(0, 100_000), st.integers(1, 9)), max_size=8),
    st.integers(0, 500_000),
    st.integers(0, 1_000),
)
def test_more_that_is_queued_never_looks_at_less(
    prompts: list[tuple[int, int, int]], queued_tokens: int, more: int
) -> None:  # fmt: skip
    sent = Sent()
    for key, (num_tokens, cached_tokens, num_prompts) in enumerate(prompts):
        sent.prompt(key, num_tokens, cached_tokens, num_prompts, 0.0)
    less = sent.queued_pairs(queued_tokens)
    assert 0.0 <= less <= sent.queued_pairs(queued_tokens + more) * (1 + 1e-9) + 1e-3
