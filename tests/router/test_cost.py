"""Estimates against numbers worked out by hand; where the break-even is known, decisions are on its right side."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvbaton.router.cost import (
    MOST_BUSY,
    MOST_LEGS,
    SPREAD,
    FleetCosts,
    Limits,
    LinkCost,
    WorkerCost,
    best_local,
    best_pair,
    landings_on,
    locals_,
    pairs,
)
from kvbaton.router.policy import COLD, Decision, NoWorker, PolicyConfig, decide
from kvbaton.router.views import MemberView, RequestView

LIMITS = Limits(2.0, 0.1)
# 10 ms a chunk, 0.1 ms a token; 10 ms a step, 0.1 ms a stream. No context, so that sums are short.
WORKER = WorkerCost(0.010, 1e-4, 0.0, 0.010, 1e-4, 0.0)
COSTS = FleetCosts(
    worker=WORKER, link=LinkCost(0.001, 1e-9), token_bytes=100_000, num_layers=10,
    overhead_local_s=0.002, overhead_remote_s=0.003, output_tokens=100.0,
)  # fmt: skip
P = MemberView("p", "prefill", 0, 0, 100_000, chunk_tokens=1_000)
D = MemberView("d", "decode", 0, 0, 100_000, chunk_tokens=1_000)


def request(tokens: int, **more: Any) -> RequestView:
    return RequestView(tokens, 1, tokens, tokens + 100, **more)


def place(tokens: int, *members: MemberView, costs: FleetCosts = COSTS, **config: Any) -> Decision:
    return decide(request(tokens), members, PolicyConfig(**config), 0, True, costs=costs)


def test_every_term_of_an_idle_fleet() -> None:
    (here,) = locals_(request(1_000), [D], COSTS, LIMITS)
    (away,) = pairs(request(1_000), [P], [D], COSTS, LIMITS)
    assert here.terms == pytest.approx(
        {
            "overhead_s": 0.002, "queue_s": 0.0, "prefill_s": 0.110, "exposed_s": 0.0, "admission_s": 0.0,
            "first_step_s": 0.0101, "ttft_s": 0.112, "tpot_s": 0.0101, "harm_s": 0.0, "later_s": 0.0,
            "cost_s": 0.112 + 0.0101 + 20 * 0.0101, "violation": 0.0,
        }
    )  # fmt: skip
    # 100 MB take 100 ms; 99 of the 110 ms of prefill hide all but the last layer's 10 ms.
    exposed_s = 0.001 + 0.010
    tpot_s = 0.0101 + exposed_s / 100
    assert away.terms == pytest.approx(
        {
            "overhead_s": 0.003, "queue_s": 0.0, "prefill_s": 0.110, "exposed_s": exposed_s, "admission_s": 0.0,
            "first_step_s": 0.0101, "ttft_s": 0.113, "tpot_s": tpot_s, "harm_s": 0.0, "later_s": 0.0,
            "cost_s": 0.113 + exposed_s + 0.0101 + 20 * tpot_s, "violation": 0.0,
        }
    )  # fmt: skip


def test_local_prefill_shares_its_chunks_with_the_streams() -> None:
    """20 streams leave 980 tokens of a chunk and add 2 ms to it; the request holds each up, and joins their batch."""
    (here,) = locals_(request(1_000), [replace(D, num_requests=20)], COSTS, LIMITS)
    assert here.prefill_s == pytest.approx(2 * (0.010 + 0.002) + 0.100)
    assert here.queue_s == pytest.approx(0.012 / 2)  # half of the step under way
    assert here.tpot_s == pytest.approx(0.010 + 21 * 1e-4)
    assert here.harm_s == pytest.approx(20 * 20 * (0.100 / 100 + 1e-4))


def test_a_transfer_slower_than_prefill_shows() -> None:
    costs = replace(COSTS, link=LinkCost(0.001, 3e-9))
    (away,) = pairs(request(1_000), [P], [D], costs, LIMITS)
    assert away.exposed_s == pytest.approx(0.001 + 0.300 - 0.110 * 0.9)


def test_blocks_the_decode_worker_has_are_not_moved() -> None:
    (away,) = pairs(request(1_000), [P], [replace(D, cached_tokens=990)], COSTS, LIMITS)
    assert away.exposed_s == pytest.approx(0.001 + 10 * 100_000 * 1e-9 / 10)


def test_a_queue_takes_what_its_tokens_look_at_as_well() -> None:
    """10,000 tokens take 1.1 s; looking at 20,000 tokens each, at 10 ns, another 2 s."""
    costs = replace(COSTS, worker=replace(WORKER, prefill_pair_s=1e-8))
    long = {"queued_tokens": 10_000, "queued_pairs": 10_000 * 20_000.0}
    (here,) = locals_(request(1_000), [replace(D, **long)], costs, LIMITS)
    (away,) = pairs(request(1_000), [replace(P, **long)], [D], costs, LIMITS)
    assert here.queue_s == away.queue_s == pytest.approx(3.1)
    short = [replace(D, name="short", queued_tokens=20_000, queued_pairs=20_000 * 500.0), replace(D, **long)]
    assert decide(request(1_000), short, PolicyConfig(), 0, False, costs=costs).decode == "short"


def test_work_costs_those_who_come_later_the_more_the_busier_the_worker_is() -> None:
    """At a quarter of its time a second of work takes 3.3 x 0.25 / 0.75^2 seconds from others; at half no more than at
    the bound."""
    quarter = 3.3 * 0.25 / 0.75**2
    for busy, price in ((0.0, 0.0), (0.25, quarter), (0.5, SPREAD * MOST_BUSY / (1 - MOST_BUSY) ** 2)):
        (here,) = locals_(request(1_000), [replace(D, pool_busy=busy)], COSTS, LIMITS)
        (away,) = pairs(request(1_000), [replace(P, pool_busy=busy)], [D], COSTS, LIMITS)
        assert here.later_s == away.later_s == pytest.approx(price * 0.110)
        assert away.cost_s == pytest.approx(0.113 + 0.011 + 0.0101 + 20 * away.tpot_s + price * 0.110)


def test_work_that_a_cache_saves_counts_more_than_the_wait_for_it() -> None:
    """4,000 cached tokens save 440 ms of work: worth a wait of as much on an idle fleet, and of more on a busy one."""
    holder = replace(D, name="holder", cached_tokens=4_000)
    price = 3.3 * 0.25 / 0.75**2
    for busy, worth_s in ((0.0, 0.440), (0.25, 0.440 * (1 + price))):
        for share, chosen in ((0.95, "holder"), (1.05, "d")):
            queued_tokens = round(share * worth_s / 1.1e-4)
            members = [replace(D, pool_busy=busy), replace(holder, pool_busy=busy, queued_tokens=queued_tokens)]
            placed = decide(request(5_000), members, PolicyConfig(ttft_slo_s=5.0), 0, False, costs=COSTS)
            assert placed.decode == chosen, (busy, share)


def test_work_stays_away_from_what_is_asked_for_again() -> None:
    """1 s of prefill where 2,000 cached tokens a second are found, worth 0.2 s: that much of it is done twice."""
    hot = replace(D, name="hot", reused_tokens_per_s=2_000.0)
    (here, there) = locals_(request(9_000), [D, hot], COSTS, LIMITS)
    assert there.later_s - here.later_s == pytest.approx(here.prefill_s * 0.2)
    (away,) = pairs(request(9_000), [replace(hot, role="prefill")], [D], COSTS, LIMITS)
    assert away.later_s == pytest.approx(away.prefill_s * 0.2)
    for turn in range(2):
        assert decide(request(9_000), [hot, D], PolicyConfig(), turn, False, costs=COSTS).decode == "d"


# -- which side of the break-even ----------------------------------------------------------------------------------


def test_an_idle_decode_worker_prefills_itself() -> None:
    assert place(1_000, P, D).reason == "local_cheaper"


def test_a_busy_decode_worker_is_spared_a_long_prompt() -> None:
    assert place(4_000, P, replace(D, num_requests=32)).reason == "remote"


def test_a_short_prompt_stays() -> None:
    """10 tokens hold two streams up for 1 ms: priced at 0.4 ms. The hand-off alone costs a millisecond of alpha."""
    assert place(10, P, replace(D, num_requests=2)).reason == "local_cheaper"


def test_a_slow_link_keeps_it_local() -> None:
    busy = replace(D, num_requests=8)
    assert place(4_000, P, busy).reason == "remote"
    assert place(4_000, P, busy, costs=replace(COSTS, link=LinkCost(0.001, 1e-7))).reason == "local_cheaper"


def test_a_saturated_prefill_pool_keeps_it_local() -> None:
    busy = replace(D, num_requests=8)
    assert place(4_000, replace(P, queued_tokens=200_000), busy).reason == "local_cheaper"


@pytest.mark.parametrize("streams", [4, 12, 16, 18, 24, 48])
def test_the_break_even_length_is_where_the_formula_says(streams: int) -> None:
    """Solve cost(local) = cost(remote) for the tokens of a prompt of one chunk, and look on either side of it."""
    output, price, step_s = 2_000.0, 20.0, 0.010 + streams * 1e-4
    tpot = 1 + price / output  # what delays the second token counts as TPOT too
    harm = price * streams * 1e-4 / output  # of a token, to the streams
    moved = 100_000 * 1e-9 / 10 * tpot  # the last layer's transfer of a token
    local_s = 0.002 + step_s / 2 + streams * 1e-4  # overhead, the step under way, rows in the chunk
    remote_s = 0.003 + (0.001 + step_s / 2) * tpot  # overhead, alpha, the next step
    even = (remote_s - local_s) / (harm - moved)
    busy, costs = replace(D, num_requests=streams), replace(COSTS, output_tokens=output)
    below, above = ("local_cheaper", "remote") if harm > moved else ("remote", "local_cheaper")
    if even > 1:
        assert place(max(1, int(even * 0.95) - 1), P, busy, costs=costs).reason == below
    if even < 900:
        assert place(max(1, int(even * 1.05) + 2), P, busy, costs=costs).reason == above


def test_limits_come_before_cost() -> None:
    """The cheapest placement breaks the TTFT limit; a dearer one keeps both limits, and gets the request."""
    queue = replace(D, queued_tokens=30_000)  # 3.3 s of prompts wait there
    chosen = place(1_000, P, queue, ttft_slo_s=1.0)
    assert chosen.reason == "remote" and chosen.terms["violation"] == 0.0
    tight = place(4_000, P, replace(D, num_requests=16), tpot_slo_s=0.012)
    assert tight.reason == "remote", "4,000 tokens between their steps would break the streams' TPOT"


def test_of_two_that_break_a_limit_the_lesser_evil() -> None:
    late, later = replace(D, queued_tokens=40_000), replace(D, name="later", queued_tokens=60_000)
    chosen = decide(request(1_000), [later, late], PolicyConfig(), 0, False, costs=COSTS)
    assert chosen.decode == "d" and chosen.terms["violation"] > 0


def test_what_is_late_anywhere_goes_where_it_costs_least() -> None:
    """Of 30,000 tokens all but 1,000 are cached behind 35,000 others: 3.9 s to wait for 0.1 s of work, or 3.3 s of work
    elsewhere. Both are late; on a busy fleet the work is spared."""
    holder = replace(D, name="holder", cached_tokens=29_000, queued_tokens=35_000, pool_busy=0.25)
    chosen = decide(request(30_000), [replace(D, pool_busy=0.25), holder], PolicyConfig(), 0, False, costs=COSTS)
    assert chosen.decode == "holder" and chosen.terms["violation"] > 0.9
    shorter = replace(holder, cached_tokens=8_000)
    chosen = decide(request(9_000), [replace(D, pool_busy=0.25), shorter], PolicyConfig(), 0, False, costs=COSTS)
    assert chosen.decode == "d", "there it is in time"


def test_no_room_is_tried_last() -> None:
    full, other = replace(D, free_tokens=500), replace(D, name="other", num_requests=30, free_tokens=5_000)
    assert decide(request(1_000), [full, other], PolicyConfig(), 0, False, costs=COSTS).decode == "other"
    late = replace(other, queued_tokens=40_000)
    assert decide(request(1_000), [full, late], PolicyConfig(), 0, False, costs=COSTS).decode == "other"


def test_what_hangs_is_left_alone() -> None:
    hangs = replace(P, overdue_s=3.0)
    busy = replace(D, num_requests=32)
    assert place(4_000, hangs, replace(P, name="q", queued_tokens=9_000), busy).prefill == "q"


def test_a_slow_worker_loses_traffic() -> None:
    costs = replace(COSTS, workers={"p": replace(WORKER, slowdown=8.0)})
    busy = replace(D, num_requests=32)
    assert place(4_000, P, replace(P, name="q", queued_tokens=9_000), busy, costs=costs).prefill == "q"


# -- for every fleet -----------------------------------------------------------------------------------------------

TIMES = st.floats(1e-6, 0.5)
WORKERS = st.builds(
    WorkerCost, TIMES, TIMES, st.floats(0, 1e-6), TIMES, st.floats(0, 0.01), st.floats(0, 1e-6), st.floats(0.25, 4),
    st.floats(1, 64),
)  # fmt: skip
LINKS = st.builds(LinkCost, st.floats(0, 1), st.floats(1e-13, 1e-6))


@st.composite
def fleets(draw: st.DrawFn) -> tuple[list[MemberView], FleetCosts]:
    members = [
        MemberView(
            f"w{i}",
            draw(st.sampled_from(("prefill", "decode", "both"))),
            draw(st.integers(0, 80)),
            draw(st.integers(0, 100_000)),
            draw(st.sampled_from((100, 2_000, 50_000))),
            draw(st.integers(0, 4_000)),
            draw(st.integers(0, 100_000)),
            draw(st.none() | st.integers(0, 100_000)),
            draw(st.sampled_from((64, 512, 2_048))),
            draw(st.integers(1, 64)),
            draw(st.floats(0, 10)),
            draw(st.floats(0, 1e10)),
            draw(st.floats(0, 3)),
            draw(st.floats(0, 1e5)),
            draw(st.booleans()),
        )
        for i in range(draw(st.integers(0, 10)))
    ]
    names = [m.name for m in members]
    workers = {name: draw(WORKERS) for name in names if draw(st.booleans())}
    links = {name: {other: draw(LINKS) for other in names[:3]} for name in names[:3]}
    return members, FleetCosts(workers, links, draw(WORKERS), draw(LINKS), output_tokens=draw(st.floats(1, 1_000)))


REQUESTS = st.builds(
    lambda tokens, prompts, output, bucket: RequestView(
        tokens * prompts, prompts, tokens, tokens + output, prompts, bucket
    ),
    st.integers(1, 40_000),
    st.integers(1, 4),
    st.integers(1, 4_000),
    st.floats(0, 99.9),
)


def decided(view: RequestView, members: list[MemberView], costs: FleetCosts, turn: int = 0, **config: Any) -> Decision:
    has_prefill = any(m.role == "prefill" for m in members)
    return decide(view, members, PolicyConfig(**config), turn, has_prefill, costs=costs)


@given(fleets(), REQUESTS, st.integers(0, 20), st.sampled_from(("cost", "static", "least_load", "round_robin")))
def test_only_workers_that_can_take_it_are_chosen(
    fleet: tuple[list[MemberView], FleetCosts], view: RequestView, turn: int, kind: str
) -> None:
    members, costs = fleet
    by_name = {m.name: m for m in members}
    try:
        chosen = decided(view, members, costs, turn, kind=kind)
    except NoWorker:
        assert all(m.max_context < view.max_total_tokens for m in members if m.serves_alone)
        prefills = [m for m in members if m.role == "prefill" and m.max_context > view.longest_prompt_tokens]
        decodes = [m for m in members if m.role == "decode" and m.max_context >= view.max_total_tokens]
        assert not (prefills and decodes)
        return
    assert chosen == decided(view, members, costs, turn, kind=kind), "the same arguments give the same decision"
    assert by_name[chosen.decode].max_context >= view.max_total_tokens
    if chosen.prefill is not None:
        assert by_name[chosen.prefill].role == "prefill" and by_name[chosen.decode].role == "decode"
        assert by_name[chosen.prefill].max_context > view.longest_prompt_tokens
    else:
        assert by_name[chosen.decode].serves_alone
    assert all(value >= 0 and value < float("inf") for value in chosen.terms.values())


@given(fleets(), REQUESTS)
def test_the_choice_is_the_best_of_all_placements(
    fleet: tuple[list[MemberView], FleetCosts], view: RequestView
) -> None:  # fmt: skip
    members, costs = fleet
    prefills = [m for m in members if m.role == "prefill"]
    decodes = [m for m in members if m.role == "decode"]
    if members:
        every = locals_(view, members, costs, LIMITS)
        here = best_local(view, members, landings_on(view, members, costs, LIMITS), costs, LIMITS)
        assert here == min(every, key=lambda each: each.rank), "the first of the best"
    if prefills and decodes:
        every = pairs(view, prefills, decodes, costs, LIMITS)
        landings = landings_on(view, decodes, costs, LIMITS)
        assert best_pair(view, prefills, landings, costs, LIMITS).rank == min(each.rank for each in every)


@given(fleets(), REQUESTS, st.integers(1, 50_000))
def test_more_in_the_queue_is_never_cheaper(
    fleet: tuple[list[MemberView], FleetCosts], view: RequestView, more: int
) -> None:  # fmt: skip
    members, costs = fleet
    longer = [replace(m, queued_tokens=m.queued_tokens + more) for m in members]
    before = locals_(view, members, costs, LIMITS)
    after = locals_(view, longer, costs, LIMITS)
    if len(members) <= MOST_LEGS:  # all are paired, whatever their queues
        by_name = {(each.prefill, each.decode): each for each in pairs(view, members, members, costs, LIMITS)}
        paired = pairs(view, longer, longer, costs, LIMITS)
        before += [by_name[each.prefill, each.decode] for each in paired]
        after += paired
    for short, long in zip(before, after, strict=True):
        assert long.cost_s >= short.cost_s and long.violation >= short.violation and long.broken >= short.broken


def test_cold_start_is_of_the_right_order() -> None:
    """Before anything was measured a long prompt leaves busy decode workers alone, a short one stays with idle ones."""
    busy = replace(D, num_requests=16, chunk_tokens=512)
    assert decide(request(4_000), [P, busy], PolicyConfig(), 0, True, costs=COLD).reason == "remote"
    assert decide(request(40), [P, D], PolicyConfig(), 0, True, costs=COLD).reason == "local_cheaper"
