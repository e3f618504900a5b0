"""Decisions: which reason, which worker, and that load, prefix and turn all count."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace

from kvbaton.router.policy import REASONS, Decision, MemberView, NoWorker, PolicyConfig, RequestView, decide
from kvbaton.types import Role

CONFIG = PolicyConfig(threshold_tokens=64, request_cost_tokens=256)


def member(name: str, role: Role, **changes: Any) -> MemberView:
    return replace(MemberView(name, role, num_requests=0, queued_tokens=0, max_context=8192), **changes)


def request(tokens: int, num_prompts: int = 1) -> RequestView:
    return RequestView(tokens, num_prompts, tokens // num_prompts, tokens // num_prompts + 16)


P, D, B = member("p", "prefill"), member("d", "decode"), member("b", "both")


def choose(tokens: int, *members: MemberView, **changes: Any) -> Decision:
    arguments: dict[str, Any] = {"config": CONFIG, "turn": 0, "has_prefill_pool": True, **changes}
    return decide(request(tokens), members, **arguments)


@pytest.mark.parametrize(
    ("tokens", "members", "changes", "reason", "prefill", "decode"),
    [
        (500, (P, D), {}, "remote", "p", "d"),
        (64, (P, D), {}, "remote", "p", "d"),
        (63, (P, D), {}, "local_short", None, "d"),
        (1, (P, D), {"config": PolicyConfig(0)}, "remote", "p", "d"),  # 0 always splits
        (8000, (P, D), {"config": PolicyConfig(10**9)}, "local_short", None, "d"),
        (500, (P, replace(D, cached_tokens=480)), {}, "local_cached", None, "d"),
        (500, (P, replace(D, cached_tokens=400)), {}, "remote", "p", "d"),
        (500, (B,), {"has_prefill_pool": False}, "local_colocated", None, "b"),
        (500, (D,), {}, "fallback_no_prefill", None, "d"),
        (500, (D,), {"prefill_failed": True}, "fallback_prefill_failed", None, "d"),
        (500, (replace(P, max_context=400), D), {}, "fallback_prompt_too_long", None, "d"),
        (500, (P,), {}, "fallback_no_decode", None, "p"),
        (500, (P, B), {}, "local_colocated", None, "b"),
    ],
)
def test_reasons(
    tokens: int, members: tuple[MemberView, ...], changes: Any, reason: str, prefill: str | None, decode: str
) -> None:
    decision = choose(tokens, *members, **changes)
    assert (decision.reason, decision.prefill, decision.decode) == (reason, prefill, decode)
    assert decision.reason in REASONS
    assert decision.terms, "what was compared is kept"


@pytest.mark.parametrize("members", [(), (replace(D, max_context=10),), (replace(P, max_context=10),)])
def test_nobody_can_take_it(members: tuple[MemberView, ...]) -> None:
    with pytest.raises(NoWorker):
        choose(500, *members)


def half(member: MemberView) -> MemberView:
    return replace(member, serves_alone=False)


ALL_KINDS = pytest.mark.parametrize(
    "config",
    [
        PolicyConfig(),
        PolicyConfig(disagg_percent=0.0),
        PolicyConfig(10**6),
        PolicyConfig(10**6, kind="static", disagg_percent=0.0),
        PolicyConfig(10**6, kind="least_load"),
        PolicyConfig(10**6, kind="round_robin"),
    ],
    ids=lambda config: f"{config.kind}-{config.threshold_tokens}-{config.disagg_percent:.0f}",
)


@ALL_KINDS
@pytest.mark.parametrize("tokens", [1, 40, 4_000])
def test_workers_that_do_half_of_it_serve_in_pairs_only(config: PolicyConfig, tokens: int) -> None:
    decision = choose(tokens, half(P), half(D), config=config)
    assert (decision.reason, decision.prefill, decision.decode, decision.arm) == ("remote", "p", "d", "none")


@ALL_KINDS
def test_where_somebody_serves_alone_those_that_cannot_are_left_out(config: PolicyConfig) -> None:
    near = replace(half(D), cached_tokens=40)  # it would be the best if it could
    decision = choose(40, half(P), near, B, config=config)
    assert (decision.prefill, decision.decode) == (None, "b")
    long = choose(4_000, half(P), half(D), replace(B, num_requests=60), config=PolicyConfig())
    assert (long.prefill, long.decode) == ("p", "d")


@ALL_KINDS
@pytest.mark.parametrize(
    ("members", "changes", "why"),
    [
        ((half(D),), {}, "no prefill worker takes this prompt"),
        ((half(D),), {"prefill_failed": True}, "no prefill worker takes this prompt"),
        ((replace(half(P), max_context=400), half(D)), {}, "no prefill worker takes this prompt"),
        ((half(P),), {}, "no decode worker"),
        ((), {}, "no worker takes requests now"),
    ],
)
def test_without_a_pair_they_serve_nobody(
    config: PolicyConfig, members: tuple[MemberView, ...], changes: Any, why: str
) -> None:
    with pytest.raises(NoWorker, match=why):
        choose(500, *members, config=config, **changes)


POLICIES = pytest.mark.parametrize("config", [CONFIG, PolicyConfig()], ids=["static", "cost"])


def routed(tokens: int, members: list[MemberView], count: int, config: PolicyConfig = CONFIG) -> Counter[str]:
    """Send ``count`` requests, each one adding to its worker's load, as the registry does."""
    sent: Counter[str] = Counter()
    for turn in range(count):
        decision = choose(tokens, *members, turn=turn, has_prefill_pool=False, config=config)
        sent[decision.decode] += 1
        members = [
            replace(m, num_requests=m.num_requests + 1, queued_tokens=m.queued_tokens + tokens)
            if m.name == decision.decode
            else m
            for m in members
        ]
    return sent


@POLICIES
def test_a_burst_is_spread_whatever_the_poll_said(config: PolicyConfig) -> None:
    """Case RT-01."""
    sent = routed(100, [member("a", "both"), member("b", "both", num_requests=1)], 8, config)
    assert abs(sent["a"] - sent["b"]) <= 2


@POLICIES
def test_short_prompts_are_spread(config: PolicyConfig) -> None:
    """Case RT-08."""
    sent = routed(20, [member("a", "both"), member("b", "both")], 12, config)
    assert sent == {"a": 6, "b": 6}


@POLICIES
def test_a_miss_goes_to_the_idle_worker_not_to_the_small_cache(config: PolicyConfig) -> None:
    """Case RT-04."""
    sent = routed(100, [member("a", "both", num_requests=50), member("b", "both")], 20, config)
    assert sent["b"] >= 18


@POLICIES
def test_a_hot_prefix_spreads_when_its_holder_is_busy(config: PolicyConfig) -> None:
    """Case RT-09; with everything else as it is, it goes to its holder."""
    members = [member(str(i), "both", cached_tokens=2000 if i == 0 else 0) for i in range(4)]
    assert choose(2048, *members, turn=1, has_prefill_pool=False, config=config).decode == "0"
    sent = routed(2048, members, 200, config)
    assert max(sent.values()) / (200 / 4) <= 1.5


def test_ties_take_turns() -> None:
    members = (member("a", "both"), member("b", "both"), member("c", "both"))
    chosen = [choose(10, *members, turn=turn, has_prefill_pool=False).decode for turn in range(6)]
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_the_same_arguments_give_the_same_decision() -> None:
    assert choose(500, P, D, turn=3) == choose(500, P, D, turn=3)


def test_many_short_prompts_in_one_request_are_not_a_long_one() -> None:
    decision = decide(request(400, num_prompts=20), (P, D), CONFIG, 0, True)
    assert decision.reason == "local_short"


def test_cost_never_splits_a_request_that_is_better_alone() -> None:
    """Case RT-15 is about what a threshold of 0 means: always. None means as measured, and says so."""
    assert choose(40, P, D, config=PolicyConfig(0)).reason == "remote"
    assert choose(40, P, D, config=PolicyConfig()).reason == "local_cheaper"
    assert choose(4_000, P, replace(D, num_requests=30), config=PolicyConfig()).reason == "remote"


@pytest.mark.parametrize("kind", ["least_load", "round_robin"])
def test_the_rivals_look_at_load_or_at_nothing(kind: Any) -> None:
    config = PolicyConfig(kind=kind)
    decodes = [replace(D, num_requests=3, cached_tokens=400), replace(D, name="e"), replace(D, name="f")]
    placed = [choose(500, P, *decodes, config=config, turn=turn) for turn in range(6)]
    assert all(each.reason == "remote" for each in placed), "without a threshold everything is handed over"
    expected = "efefef" if kind == "least_load" else "defdef"
    assert sorted(each.decode for each in placed) == sorted(expected) or kind == "least_load"
    assert {each.decode for each in placed} == set(expected)
    short = PolicyConfig(64, kind=kind)
    assert choose(63, P, *decodes, config=short).reason == "local_short"


@pytest.mark.parametrize(
    ("members", "changes", "reason"),
    [
        ((B,), {"has_prefill_pool": False}, "local_colocated"),
        ((D,), {}, "fallback_no_prefill"),
        ((D,), {"prefill_failed": True}, "fallback_prefill_failed"),
        ((replace(P, max_context=400), D), {}, "fallback_prompt_too_long"),
        ((P,), {}, "fallback_no_decode"),
        ((P, B), {}, "local_colocated"),
    ],
)
def test_reasons_of_cost_where_there_is_no_choice(members: tuple[MemberView, ...], changes: Any, reason: str) -> None:
    decision = choose(500, *members, config=PolicyConfig(), **changes)
    assert (decision.reason, decision.prefill) == (reason, None)
    assert decision.ttft_s is not None and decision.terms["violation"] == 0.0
