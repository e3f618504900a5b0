"""A decision is kept with what it was made from: its record replays to the same result, and is bounded."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from router.test_cost import REQUESTS, D, P, fleets

from kvbaton.router.cost import FleetCosts, WorkerCost
from kvbaton.router.explain import MOST_KEPT, brief, read_record, record, replay
from kvbaton.router.policy import Decision, MemberView, NoWorker, PolicyConfig, RequestView, decide
from kvbaton.types import LocalError


def placed(kind: str = "cost", turn: int = 0, **config: Any) -> Decision:
    members = [P, D, replace(D, name="d2", num_requests=40), replace(P, name="p2", queued_tokens=900)]
    return decide(RequestView(3_000, 1, 3_000, 3_100), members, PolicyConfig(kind=kind, **config), turn, True)  # type: ignore[arg-type]


def through_the_log(decision: Decision) -> bytes:
    """As the router writes it and a file keeps it."""
    return msgspec.json.encode({"message": "request", "decision": decision.reason, "route": record(decision)})


@given(
    fleets(),
    REQUESTS,
    st.integers(0, 30),
    st.sampled_from(("cost", "static", "least_load", "round_robin")),
    st.sampled_from((None, 0, 700)),
    st.sampled_from((0.0, 50.0, 100.0)),
    st.booleans(),
)
def test_every_record_replays_to_the_same(
    fleet: tuple[list[MemberView], FleetCosts],
    view: RequestView,
    turn: int,
    kind: Any,
    threshold: int | None,
    percent: float,
    failed: bool,
) -> None:
    members, costs = fleet
    config = PolicyConfig(threshold, kind=kind, disagg_percent=percent)
    has_prefill = any(m.role == "prefill" for m in members)
    try:
        decision = decide(view, members, config, turn, has_prefill, failed, costs)
    except NoWorker:
        return
    known = read_record(through_the_log(decision))
    again = replay(known)
    assert again.differences == []
    assert again.decision is not None
    assert (again.decision.prefill, again.decision.decode) == (decision.prefill, decision.decode)
    assert len(known.placements) <= MOST_KEPT
    in_short = read_record(msgspec.json.encode(brief(decision)))
    assert in_short.placements == known.placements and in_short.num_placements == known.num_placements
    assert replay(in_short).differences == []


def test_a_brief_record_of_a_small_fleet_is_short() -> None:
    decision = placed()
    in_short = msgspec.json.encode(brief(decision))
    assert not brief(decision).placements
    assert len(in_short) < len(msgspec.json.encode(record(decision))) / 2
    assert read_record(in_short).placements == record(decision).placements


def test_the_chosen_placement_is_first_and_the_other_kind_is_there() -> None:
    known = record(placed())
    first = known.placements[0]
    assert (first.prefill, first.decode) == (known.prefill, known.decode)
    assert {each.prefill is None for each in known.placements} == {True, False}
    assert first.terms["cost_s"] == min(each.terms["cost_s"] for each in known.placements)
    assert known.terms.items() >= first.terms.items()


def test_a_large_fleet_makes_no_large_record() -> None:
    members = [replace(P, name=f"p{i}", queued_tokens=i) for i in range(100)]
    members += [replace(D, name=f"d{i}", num_requests=i) for i in range(100)]
    costs = FleetCosts({m.name: WorkerCost() for m in members})
    decision = decide(RequestView(3_000, 1, 3_000, 3_100), members, PolicyConfig(), 7, True, costs=costs)
    raw = through_the_log(decision)
    assert len(raw) < 10_000
    assert replay(read_record(raw)).agrees
    static = decide(RequestView(3_000, 1, 3_000, 3_100), members, PolicyConfig(64), 7, True)
    assert len(through_the_log(static)) < 12_000
    assert replay(read_record(through_the_log(static))).agrees


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("decode",), "d2"),
        (("reason",), "remote"),
        (("terms", "queue_s"), 1.0),
        (("placements", 1, "terms", "ttft_s"), 0.5),
        (("members", 0, "num_requests"), 60),
        (("costs", "worker", "prefill_token_s"), 1e-5),
        (("config", "ttft_slo_s"), 0.1),
    ],
)
def test_what_was_tampered_with_does_not_replay(path: tuple[Any, ...], value: Any) -> None:
    line = json.loads(through_the_log(placed(tpot_slo_s=0.03)))
    assert replay(read_record(json.dumps(line).encode())).agrees
    inside = line["route"]
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    assert replay(read_record(json.dumps(line).encode())).differences


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"{}", b'{"route": null}', b'{"route": {"version": 1}}', b"\xff\xfe"]
)
def test_what_is_no_record_is_named(raw: bytes) -> None:
    with pytest.raises(LocalError) as caught:
        read_record(raw)
    assert caught.value.field == "record"


def test_a_record_of_another_version_is_refused() -> None:
    line = json.loads(through_the_log(placed()))
    line["route"]["version"] = 99
    with pytest.raises(LocalError, match="version 99"):
        read_record(json.dumps(line).encode())
