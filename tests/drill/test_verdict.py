"""What passes and what does not, from stories written by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.drill.samples import FleetSeen, Mark, MemberSeen, Outcome, Sample, Story
from kvbaton.drill.verdict import Promise, Result, computed_tokens, judge, moved_bytes


def canary(sent_s: float, outcome: Outcome = "right", **fields: Any) -> Sample:
    return Sample("canary", 0, sent_s, sent_s + 0.1, outcome, **{"status": 200, "uncached_tokens": 10, **fields})


def seen(at_s: float, life: str = "a", state: str = "up", computed: int = 0, failures: int = 0) -> FleetSeen:
    return FleetSeen(at_s, {"decode-0": MemberSeen("decode", state, life, failures, computed, {})})


def story(**changes: Any) -> Story:
    good = Story(
        begun_s=100.0,
        fault_s=101.0,
        samples=[canary(100.2), canary(101.2), canary(102.0)],
        looks=[seen(100.0), seen(101.4, state="down"), seen(103.0, life="b", computed=30)],
        marks=[Mark(101.0, "SIGKILL to decode-0")],
        whole_s=103.0,
        left_over=[],
    )
    return msgspec.structs.replace(good, **changes)


def result(promise: Promise | None = None, **changes: Any) -> Result:
    return judge("some", 0, "0-0-some", promise or Promise("nobody notices"), story(**changes))


def test_patience_is_for_service_to_come_back_and_for_nothing_else() -> None:
    late = story(samples=[canary(100.2), canary(101.2, "error", code="x"), canary(111.4)])
    promise = Promise("back in five seconds", ("x",), recover_s=5.0)
    assert not judge("some", 0, "0-0-some", promise, late).passed
    assert judge("some", 0, "0-0-some", promise, late, patience=3.0).passed
    wrong = story(samples=[canary(100.2), canary(101.2, "wrong")])
    assert not judge("some", 0, "0-0-some", promise, wrong, patience=100.0).passed


def test_a_good_story_passes_with_its_numbers() -> None:
    found = result()
    assert found.passed and found.reasons == []
    assert (found.requests, found.right, found.wrong, found.lost) == (3, 3, 0, 0)
    assert found.detect_s == 0.4 and found.whole_s == 2.0
    assert found.recover_s == 0.3, "the end of the first canary that was sent after the fault"
    assert (found.computed_tokens, found.wasted_tokens) == (30, 0)
    assert found.evidence == ["   1.00 s  SIGKILL to decode-0"]


def test_bytes_count_for_each_life_by_itself() -> None:
    def look(at_s: float, life: str, received: int) -> FleetSeen:
        return FleetSeen(at_s, {"decode-0": MemberSeen("decode", "up", life, 0, 0, {}, received)})

    looks = [look(0.0, "a", 1000), look(1.0, "a", 1300), FleetSeen(2.0, None), look(3.0, "b", 40), look(4.0, "b", 70)]
    assert moved_bytes(looks) == 370 and judge("some", 0, "", Promise(""), story(looks=looks)).moved_bytes == 370


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"fault_s": None}, "did not strike"),
        (
            {"samples": [canary(101.2), canary(101.3, "wrong", message="'x' instead of 'y'")]},
            "wrong answer to prompt 0",
        ),
        ({"samples": [canary(101.2), canary(101.3, "lost", message="no end within 90 s")]}, "lost a canary request"),
        ({"samples": [canary(101.2), canary(101.3, "error", code="worker_error")]}, "error worker_error"),
        ({"samples": [canary(100.2)]}, "did not recover"),
        ({"samples": []}, "no canary was right"),
        ({"samples": [canary(100.2), canary(170.0)]}, "recovered after 69.1 s"),
        ({"whole_s": None}, "not whole"),
        ({"left_over": ["decode-0: num_leases 1"]}, "left over: decode-0: num_leases 1"),
        ({"problem": "not carried out: no such thing"}, "not carried out"),
    ],
)
def test_each_of_these_fails_and_says_why(changes: dict[str, Any], told: str) -> None:
    found = result(**changes)
    assert not found.passed and any(told in reason for reason in found.reasons), found.reasons


def test_errors_that_the_table_foresees_are_counted_and_pass() -> None:
    samples = [canary(101.1, "error", code="no_workers"), canary(101.2, "error", status=429, code=""), canary(102.0)]
    promise = Promise("some end with an error", ("no_workers", "429"))
    found = result(promise, samples=[msgspec.structs.replace(samples[0], status=503), *samples[1:]])
    assert found.passed and found.errors == {"429": 1, "no_workers": 1}
    assert found.recover_s == pytest.approx(1.1), "not before the last failure"


def test_connections_may_break_only_while_the_fault_lasts() -> None:
    promise = Promise("the router goes away", may_break=True)
    assert result(promise, samples=[canary(101.0, "lost"), canary(102.0)]).passed
    late = result(promise, samples=[canary(101.2), canary(103.5, "lost"), canary(104.0)])
    assert not late.passed, "the fleet was whole when it was sent"
    early = result(promise, samples=[canary(100.2, "lost"), canary(102.0)])
    assert not early.passed, "it was over before the fault"


def test_a_wrong_answer_is_never_foreseen() -> None:
    promise = Promise("anything goes", ("worker_error",), may_break=True)
    assert not result(promise, samples=[canary(101.0, "wrong"), canary(102.0)]).passed


def test_computed_tokens_count_each_life_by_itself() -> None:
    looks = [seen(0, "a", computed=1000), seen(1, "a", computed=1040), seen(2, "b", computed=7), FleetSeen(3, None)]
    assert computed_tokens(looks) == 40 + 7
    assert computed_tokens([*looks, seen(4, "b", computed=9)]) == 40 + 9


def test_prefill_for_nothing_is_what_no_answer_accounts_for() -> None:
    looks = [seen(100.0, computed=500), seen(103.0, computed=590)]
    found = result(looks=looks, samples=[canary(101.2), canary(102.0, "error", code="x", uncached_tokens=0)])
    assert (found.computed_tokens, found.wasted_tokens) == (90, 80)
