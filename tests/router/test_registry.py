"""Members: load between polls, restarts, quarantine and recovery, joining and leaving."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.config import MemberSettings
from kvbaton.observe.metrics import Metrics
from kvbaton.router.policy import PolicyConfig, decide
from kvbaton.router.prefix_index import PrefixIndex, PromptChains
from kvbaton.router.registry import Registry
from kvbaton.router.views import MemberView, RequestView
from kvbaton.types import Fingerprint, LocalError
from kvbaton.workers.protocol import WorkerInfo, WorkerStats

PREFILL = MemberSettings("http://10.0.0.1:1", "prefill", "p")
DECODE = MemberSettings("http://10.0.0.2:1", "decode", "d")


def info(role: str = "decode", **changes: Any) -> WorkerInfo:
    fields: dict[str, Any] = {
        "state": "serving",
        "role": role,
        "model_id": "m",
        "incarnation": "1",
        "fingerprint": Fingerprint(1, "r", 1, 1, 8, "float32", ""),
        "max_context": 512,
        "block_size": 16,
        "kv_host": "",
        "kv_port": 7,
        "stats": WorkerStats(),
    }
    return WorkerInfo(**{**fields, **changes})


@pytest.fixture
def index() -> PrefixIndex:
    return PrefixIndex(4, 100)


@pytest.fixture
def registry(index: PrefixIndex) -> Registry:
    registry = Registry((PREFILL, DECODE), "m", index, Metrics("router"))
    registry.answered(registry.members[0], info("prefill"))
    registry.answered(registry.members[1], info())
    return registry


def test_load_is_the_report_plus_what_was_sent_since(registry: Registry) -> None:
    member = registry.members[1]
    with registry.hold(member, 2, 100) as hold:
        assert (member.num_requests, member.queued_tokens) == (2, 100)
        registry.answered(member, info(stats=WorkerStats(num_active=5, waiting_prompt_tokens=300)))  # ours among them
        assert (member.num_requests, member.queued_tokens) == (5, 300)
        with registry.hold(member, 1, 50):
            assert (member.num_requests, member.queued_tokens) == (6, 350)
        hold.first_token()
        assert (member.num_requests, member.queued_tokens) == (5, 200)
        registry.check()
    assert (member.num_requests, member.own_sequences, member.own_tokens) == (3, 0, 0)


def test_a_view_tells_what_the_router_sent_there(registry: Registry) -> None:
    """What queued tokens look at until the first token, and for a while how busy that made it and what was found."""
    member = registry.members[1]
    views = [MemberView("d0", "decode", 0, 0, 9_000, cached_tokens=1_000)]
    decision = decide(RequestView(1_300, 1, 1_300, 1_400), views, PolicyConfig(), 0, False)
    with registry.hold(member, 1, 300, decision=decision) as hold:
        view = registry.views({}, 0.0)[1]
        assert view.queued_pairs == 300 * 1_150
        assert view.pool_busy > 0.0 and view.reused_tokens_per_s > 0.0
        hold.first_token()
        view = registry.views({}, 0.0)[1]
        assert view.queued_pairs == 0.0 and view.pool_busy > 0.0 and view.reused_tokens_per_s > 0.0
    registry.answered(member, info(incarnation="another"))
    assert registry.views({}, 0.0)[1].reused_tokens_per_s == 0.0, "its cache is gone"


def test_a_hold_is_given_back_on_any_way_out(registry: Registry) -> None:
    member = registry.members[0]
    with pytest.raises(RuntimeError), registry.hold(member, 1, 10):
        raise RuntimeError
    assert (member.own_requests, member.own_sequences, member.own_tokens) == (0, 0, 0)


def test_a_restart_drops_what_was_remembered(registry: Registry, index: PrefixIndex) -> None:
    index.record("d", PromptChains.known(4, {4: [b"x"]}))
    registry.answered(registry.members[1], info())
    assert index.num_blocks("d") == 1
    registry.answered(registry.members[1], info(incarnation="2"))
    assert index.num_blocks("d") == 0


def test_one_lost_poll_is_forgiven_two_are_not(registry: Registry) -> None:
    member = registry.members[1]
    registry.poll_failed(member, "slow", unreachable=False)
    assert member.state == "up"
    registry.poll_failed(member, "slow", unreachable=False)
    assert member.state == "down"
    registry.answered(member, info())
    assert member.state == "up"
    registry.poll_failed(member, "refused", unreachable=True)
    assert member.state == "down"


def test_quarantine_ends_by_time_or_by_an_answer(registry: Registry) -> None:
    prefill = registry.members[0]
    second = MemberSettings("http://10.0.0.3:1", "prefill", "p2")
    registry.set_members((PREFILL, second, DECODE))
    for member in registry.members:
        registry.answered(member, info(member.settings.role))
    registry.call_failed(prefill, "prefill_failed", now_s=10.0)

    def names(now_s: float) -> set[str]:
        return {m.name for m in registry.usable(now_s)}

    assert names(10.1) == {"p2", "d"}
    assert names(10.6) == {"p", "p2", "d"}
    registry.call_failed(prefill, "prefill_failed", now_s=11.0)
    assert names(11.9) == {"p2", "d"}  # twice as long
    registry.answered(prefill, info("prefill"))
    assert names(11.9) == {"p", "p2", "d"}


def test_the_last_of_a_role_is_used_even_in_quarantine(registry: Registry) -> None:
    registry.call_failed(registry.members[1], "worker_error", now_s=10.0)
    assert {m.name for m in registry.usable(10.1)} == {"p", "d"}


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"role": "prefill"}, "mismatch"),
        ({"model_id": "other"}, "mismatch"),
        ({"state": "draining"}, "draining"),
        ({"state": "disconnected"}, "down"),
        ({}, "up"),
    ],
)
def test_what_a_worker_says_decides_its_state(registry: Registry, changes: dict[str, Any], state: str) -> None:
    registry.answered(registry.members[1], info(**changes))
    assert registry.members[1].state == state


def test_members_join_move_and_leave(registry: Registry, index: PrefixIndex) -> None:
    index.record("d", PromptChains.known(4, {4: [b"x"]}))
    stays = registry.members[0]
    moved = MemberSettings("http://10.0.0.2:2", "decode", "d")
    registry.set_members((PREFILL, moved))
    assert registry.members[0] is stays and registry.members[1].state == "unknown" and index.num_blocks("d") == 0
    registry.set_members((PREFILL,))
    assert [m.name for m in registry.members] == ["p"]
    with pytest.raises(LocalError):
        registry.set_members((PREFILL, PREFILL))


def test_peers_are_told_the_workers_own_hand_off_address(registry: Registry) -> None:
    member = registry.members[0]
    assert registry.peer_address(member).host == "10.0.0.1"
    registry.answered(member, info("prefill", kv_host="192.168.0.9"))
    assert (registry.peer_address(member).host, registry.peer_address(member).port) == ("192.168.0.9", 7)


def test_whose_kv_fits_nobody_says_so(registry: Registry) -> None:
    """It is used all the same: it may compute where it decodes, and others may join that it fits."""
    prefill, decode = registry.members
    other = Fingerprint(1, "r", 1, 1, 8, "bfloat16", "")
    registry.answered(decode, info(fingerprint=other))
    assert (decode.state, decode.reason) == (
        "up",
        "answers, but no KV fits between it and p: kv_dtype bfloat16, there float32",
    )
    registry.answered(prefill, info("prefill"))
    assert "kv_dtype float32, there bfloat16" in prefill.reason
    ranks = Fingerprint(1, "r", 1, 1, 8, "float32", "", tp_size=2)
    registry.answered(decode, info(fingerprint=ranks))
    registry.answered(prefill, info("prefill"))
    assert (decode.reason, prefill.reason) == ("answers", "answers"), "any numbers of ranks fit"
