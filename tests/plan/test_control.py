"""The autoscaling decision: invariants under any figures, and the ways others went wrong (AS-03, AS-05, AS-06)."""

from __future__ import annotations

from math import inf, nan, pi, sin
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.plan.autoscale_demand import PoolPolicy, PoolSeen, spare_workers
from kvbaton.plan.control import ScalingDecision, ScalingPolicy, ScalingState, decide, fits_band
from kvbaton.types import LocalError, Role

SPEED = 8_000.0  # prompt tokens a second of one worker
POLICY = ScalingPolicy(
    {"prefill": PoolPolicy(1, 8), "decode": PoolPolicy(1, 8, sequences_per_worker=20)},
    shrink_after_s=120.0, drain_pause_s=0.0, start_s=30.0,
)  # fmt: skip


def prefill(serving: int, arrived: float = 0.0, waiting: float = 0.0, **more: float) -> PoolSeen:
    return PoolSeen(serving, waiting_prompt_tokens=waiting, arrived_tokens_per_s=arrived, tokens_per_s=SPEED,
                    **{"queue_delay_s": 0.0, **more})  # type: ignore[arg-type]  # fmt: skip


def decode(
    serving: int, running: float = 0.0, waiting: float = 0.0, free_share: float = 0.8, **more: float
) -> PoolSeen:
    return PoolSeen(serving, running=running, waiting=waiting, free_share=free_share, **more)  # type: ignore[arg-type]


class Fleet:
    """Two pools that carry out what is decided: starts take their time, drains end before the next look."""

    def __init__(self, policy: ScalingPolicy, num_prefill: int, num_decode: int, step_s: float = 15.0) -> None:
        self.policy, self.step_s, self.now_s = policy, step_s, 0.0
        self.serving: dict[Role, int] = {"prefill": num_prefill, "decode": num_decode}
        self.coming: list[tuple[float, Role]] = []
        self.state = ScalingState()
        self.history: list[tuple[int, int]] = []
        self.last: ScalingDecision | None = None

    def look(self, first: PoolSeen, second: PoolSeen) -> ScalingDecision:
        for at_s, role in [each for each in self.coming if each[0] <= self.now_s]:
            self.coming.remove((at_s, role))
            self.serving[role] += 1
        given: dict[Role, PoolSeen] = {"prefill": first, "decode": second}
        seen = {
            role: msgspec.structs.replace(
                each, serving=self.serving[role], starting=sum(coming == role for _, coming in self.coming)
            )
            for role, each in given.items()
        }
        decision = decide(self.policy, seen, self.state, self.now_s)
        self.state, self.last = decision.state, decision
        for role, each in decision.pools.items():
            self.coming += [(self.now_s + self.policy.start_s, role)] * each.add
            self.serving[role] -= each.drain
        self.now_s += self.step_s
        have = {role: count + sum(each == role for _, each in self.coming) for role, count in self.serving.items()}
        self.history.append((have["prefill"], have["decode"]))
        return decision


# -- invariants ----------------------------------------------------------------------------------------------------

figure = st.one_of(st.none(), st.just(nan), st.just(inf), st.just(-1.0), st.floats(0, 1e6))
pools = st.builds(
    PoolSeen,
    serving=st.integers(0, 8), starting=st.integers(0, 3), draining=st.integers(0, 2), waiting_prompt_tokens=figure,
    arrived_tokens_per_s=figure, tokens_per_s=figure, queue_delay_s=figure, running=figure, waiting=figure,
    receiving=st.floats(0, 1e4), free_share=figure,
)  # fmt: skip
looks = st.lists(st.tuples(pools, pools), min_size=1, max_size=12)
bands = st.one_of(st.none(), st.tuples(st.floats(0.2, 1.0), st.floats(1.0, 4.0)))


@settings(max_examples=150, deadline=None)
@given(looks, bands)
def test_whatever_is_seen_targets_stay_within_bounds_and_nobody_drains_while_others_start(
    seen: list[tuple[PoolSeen, PoolSeen]], band: tuple[float, float] | None
) -> None:
    policy, state = msgspec.structs.replace(POLICY, ratio_band=band), ScalingState()
    for number, (first, second) in enumerate(seen):
        decision = decide(policy, {"prefill": first, "decode": second}, state, number * 15.0)
        state = decision.state
        for each, pool in ((decision.pools["prefill"], first), (decision.pools["decode"], second)):
            assert each.target >= 1 and (each.target <= 8 or each.target == pool.have and not each.known)
            assert each.add >= 0 and each.drain >= 0 and not (each.add and each.drain)
            assert pool.have + each.add - each.drain >= 1
            assert not each.drain or (each.known and not pool.starting)
            assert not each.drain or pool.have - each.drain >= each.target, "never below where it is heading"
            assert each.reason


missing = st.sampled_from([None, nan, inf, -1.0])


@settings(max_examples=100, deadline=None)
@given(missing, st.sampled_from(["waiting_prompt_tokens", "arrived_tokens_per_s", "running", "waiting", "free_share"]),
       st.integers(1, 8), st.integers(1, 8))  # fmt: skip
def test_a_pool_of_which_something_is_missing_never_shrinks(
    gone: float | None, name: str, num_prefill: int, num_decode: int
) -> None:
    fleet = Fleet(POLICY, num_prefill, num_decode)
    role: Role = "prefill" if "tokens" in name else "decode"
    for _ in range(60):  # idle, so that it would shrink at once if it were known
        seen = {"prefill": prefill(1), "decode": decode(1)}
        seen[role] = msgspec.structs.replace(seen[role], **{name: gone})
        decision = fleet.look(seen["prefill"], seen["decode"])  # type: ignore[index]
        assert not decision.pools[role].known and "missing" in decision.pools[role].reason
    assert fleet.serving[role] == {"prefill": num_prefill, "decode": num_decode}[role]
    other: Role = "decode" if role == "prefill" else "prefill"
    assert fleet.serving[other] == 1, "the other pool goes on being scaled"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 80_000), st.floats(0, 200_000), st.floats(0, 30)), min_size=1, max_size=8),
       st.floats(1.0, 3.0), st.integers(1, 8))  # fmt: skip
def test_more_prompt_work_never_asks_for_fewer(
    work: list[tuple[float, float, float]], factor: float, serving: int
) -> None:
    state = ScalingState()
    for number, (arrived, waiting, delay_s) in enumerate(work):
        quiet = decode(2, 10)
        less, more = (
            decide(POLICY, {"prefill": prefill(serving, arrived * f, waiting * f, queue_delay_s=delay_s * f),
                            "decode": quiet}, state, number * 15.0)
            for f in (1.0, factor)
        )  # fmt: skip
        assert more.pools["prefill"].target >= less.pools["prefill"].target
        state = less.state


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 200), st.floats(0, 50), st.floats(0, 1)), min_size=1, max_size=8),
       st.floats(1.0, 3.0), st.integers(1, 8))  # fmt: skip
def test_more_sequences_or_fewer_free_blocks_never_ask_for_fewer(
    work: list[tuple[float, float, float]], factor: float, serving: int
) -> None:
    state = ScalingState()
    for number, (running, waiting, free) in enumerate(work):
        idle = prefill(2)
        less, more = (
            decide(POLICY, {"prefill": idle, "decode": decode(serving, running * f, waiting * f, free / f)}, state,
                   number * 15.0)
            for f in (1.0, factor)
        )  # fmt: skip
        assert more.pools["decode"].target >= less.pools["decode"].target
        state = less.state


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0.3, 6.0), st.floats(0.3, 6.0))
def test_noise_of_a_few_percent_does_not_flap(seed: int, prompts: float, sequences: float) -> None:
    rng, fleet = Random(seed), Fleet(POLICY, 3, 3)

    def noisy(value: float) -> float:
        return value * (1.0 + rng.uniform(-0.04, 0.04))

    for _ in range(160):
        fleet.look(prefill(1, noisy(prompts * SPEED)), decode(1, noisy(sequences * 20)))
    # It may find its size, up or down, but never turns round: a border crossed by noise is not crossed back.
    for pool in (0, 1):
        sizes = [each[pool] for each in fleet.history]
        assert sizes == sorted(sizes) or sizes == sorted(sizes, reverse=True)


def turns(sizes: list[int]) -> int:
    """How often a pool that grew shrinks, or the other way round."""
    steps = [after - before for before, after in zip(sizes, sizes[1:], strict=False) if after != before]
    return sum((first > 0) != (second > 0) for first, second in zip(steps, steps[1:], strict=False))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.floats(0.2, 7.0), st.floats(0.2, 7.0)), min_size=1, max_size=4))
def test_a_load_that_moves_and_then_stands_is_followed_without_thrashing(
    seed: int, levels: list[tuple[float, float]]
) -> None:
    """Each level lasts for several windows: a pool turns round when the load does, and once for an overshoot."""
    rng, fleet = Random(seed), Fleet(POLICY, 3, 3)
    for prompts, sequences in levels:
        for _ in range(40):
            noise = 1.0 + rng.uniform(-0.04, 0.04)
            fleet.look(prefill(1, prompts * noise * SPEED), decode(1, sequences * noise * 20))
        assert fleet.serving["prefill"] >= prompts
        assert fleet.serving["decode"] * (1.0 + POLICY.dead_band) >= sequences * 0.96, "short by the dead band at most"
    for pool in (0, 1):
        assert turns([each[pool] for each in fleet.history]) <= 2 * len(levels)


@settings(max_examples=60, deadline=None)
@given(
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), max_size=20),
)
def test_without_traffic_both_pools_go_to_their_minimum_and_stay(
    sizes: tuple[int, int], before: list[tuple[float, float]]
) -> None:
    fleet = Fleet(POLICY, *sizes)
    for prompts, sequences in before:
        fleet.look(prefill(1, prompts * SPEED), decode(1, sequences * 20))
    for _ in range(80):
        decision = fleet.look(prefill(1), decode(1, free_share=1.0))
        assert all(each.known for each in decision.pools.values()), "nothing to do is a figure like any other"
    assert fleet.serving == {"prefill": 1, "decode": 1} and not fleet.coming
    assert set(fleet.history[-20:]) == {(1, 1)}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 8), st.floats(0, 8), st.booleans()), min_size=20, max_size=60))
def test_looks_that_fail_now_and_then_never_make_a_pool_smaller_than_it_would_be(
    looks: list[tuple[float, float, bool]],
) -> None:
    """What is missing may delay a change; it is never read as a load that is gone."""
    fleet = Fleet(POLICY, 2, 2)
    for prompts, sequences, seen in looks:
        have = dict(fleet.serving)
        if seen:
            fleet.look(prefill(1, prompts * SPEED), decode(1, sequences * 20))
            continue
        decision = fleet.look(PoolSeen(1), PoolSeen(1))
        assert not any(each.drain or each.add for each in decision.pools.values())
        assert all(fleet.serving[role] >= have[role] for role in have)


@settings(max_examples=60, deadline=None)
@given(bands, st.lists(st.tuples(st.floats(0, 8), st.floats(0, 8)), min_size=5, max_size=60))
def test_the_ratio_of_the_pools_stays_in_its_band(
    band: tuple[float, float] | None, work: list[tuple[float, float]]
) -> None:
    fleet = Fleet(msgspec.structs.replace(POLICY, ratio_band=band, shrink_after_s=30.0), 1, 1)
    for prompts, sequences in work:
        fleet.look(prefill(1, prompts * SPEED), decode(1, sequences * 20))
        first, second = fleet.history[-1]
        assert fits_band(band, first, second) or 8 in (first, second)


# -- attribution ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [decode(2, 30, waiting=10), decode(2, 30, free_share=0.02)])
def test_prefill_does_not_grow_while_decode_has_no_room(short: PoolSeen) -> None:
    late = prefill(2, 30_000, waiting=60_000, queue_delay_s=8.0)
    decision = decide(POLICY, {"prefill": late, "decode": short}, ScalingState(), 0.0)
    assert decision.bottleneck == "decode"
    assert decision.pools["prefill"].add == 0 and "decode is what is short" in decision.pools["prefill"].reason
    assert decision.pools["decode"].add > 0, "nobody else could end the shortage"
    relieved = decide(POLICY, {"prefill": late, "decode": decode(4, 30)}, ScalingState(), 0.0)
    assert relieved.bottleneck == "prefill" and relieved.pools["prefill"].add > 0


def test_prefill_keeps_its_workers_while_decode_holds_its_prompts_back() -> None:
    """Requests that wait at the router for room have not arrived at prefill yet: fewer seem to come, and all will."""
    fleet = Fleet(POLICY, 6, 2)
    for _ in range(10):
        fleet.look(prefill(1, 4.5 * SPEED), decode(1, 30))
    for _ in range(20):
        fleet.look(prefill(1, 1.0 * SPEED), decode(1, 40, waiting=60))
    assert fleet.serving["prefill"] == 6
    for _ in range(20):
        fleet.look(prefill(1, 1.0 * SPEED), decode(1, 40))
    assert fleet.serving["prefill"] == 2, "with room again, what comes is all there is"


def test_decode_does_not_grow_for_blocks_that_wait_for_prefill() -> None:
    late = prefill(2, 30_000, waiting=60_000, queue_delay_s=8.0)
    # All blocks are taken, nearly all by sequences whose prompts nobody has computed yet.
    held = decode(2, 4, free_share=0.0, receiving=60)
    decision = decide(POLICY, {"prefill": late, "decode": held}, ScalingState(), 0.0)
    assert decision.bottleneck == "prefill"
    assert decision.pools["decode"].add == 0 and decision.pools["prefill"].add > 0
    # The same blocks held by sequences that decode are decode's own shortage.
    own = decode(2, 60, free_share=0.0, receiving=4)
    decision = decide(POLICY, {"prefill": late, "decode": own}, ScalingState(), 0.0)
    assert decision.bottleneck == "decode"
    assert decision.pools["decode"].add > 0 and decision.pools["prefill"].add == 0


# -- growth and shrinking ------------------------------------------------------------------------------------------


def test_as_03_no_traffic_is_a_load_of_zero_and_a_missing_scrape_holds() -> None:
    policy = msgspec.structs.replace(POLICY, shrink_after_s=300.0)
    fleet = Fleet(policy, 3, 3, step_s=60.0)
    for _ in range(10):
        fleet.look(prefill(1, 1.5 * 2048 * 4), decode(1, 45))
    busy = dict(fleet.serving)
    for _ in range(5):
        fleet.look(PoolSeen(1), PoolSeen(1))  # a scrape that failed is no zero
    assert fleet.serving == busy
    assert fleet.last is not None and not fleet.last.pools["prefill"].known
    targets = [fleet.look(prefill(1), decode(1)) for _ in range(10)]
    cooled_down = 300 // 60 + 3
    assert all(each.target == 1 for each in targets[cooled_down].pools.values())
    assert fleet.serving == {"prefill": 1, "decode": 1}


def test_as_05_a_queue_that_stands_grows_prefill_within_two_looks() -> None:
    """A sinusoid between 0.8 and 5.2 workers' worth, met by pools that take their time to start."""
    fleet, waiting, late_looks = Fleet(POLICY, 1, 2, step_s=5.0), 0.0, 0
    for number in range(180):
        arrived = 8_000 * (3.0 - 2.2 * sin(2 * pi * number / 180 + pi / 2))
        served = SPEED * fleet.serving["prefill"]
        waiting = max(0.0, waiting + (arrived - served) * fleet.step_s)
        late_looks = late_looks + 1 if waiting / served > 0.5 else 0
        fleet.look(prefill(1, arrived, waiting), decode(1, 5))
        more_come = any(role == "prefill" for _, role in fleet.coming)
        assert late_looks < 2 or more_come or fleet.serving["prefill"] == 8
    assert max(each[0] for each in fleet.history) >= 5


def test_as_05_the_queue_alone_is_enough() -> None:
    """Each prompt is computed as fast as ever and few come now: only what stands, or what was waited, tells."""
    for late in (prefill(2, 1_000, waiting=60_000), prefill(2, 1_000, queue_delay_s=4.0)):
        decision = decide(POLICY, {"prefill": late, "decode": decode(2, 5)}, ScalingState(), 0.0)
        assert decision.bottleneck == "prefill" and decision.pools["prefill"].add >= 1


def test_as_06_noise_in_the_queue_changes_nothing_and_a_doubling_is_followed() -> None:
    policy = ScalingPolicy({"decode": PoolPolicy(1, 16, sequences_per_worker=10)})
    state, have = ScalingState(), 5
    depths = [50, 52, 49, 51, 48, 52, 50, 49]
    for number, depth in enumerate(depths * 8):
        decision = decide(policy, {"decode": decode(have, depth)}, state, number * 15.0)
        state = decision.state
        assert decision.pools["decode"].target == 5
    for number in range(len(depths) * 8, len(depths) * 8 + 2):
        decision = decide(policy, {"decode": decode(have, 100)}, state, number * 15.0)
        state, have = decision.state, have + decision.pools["decode"].add
    assert have >= 9


def test_workers_that_start_are_not_ordered_again() -> None:
    work = prefill(2, 20_000)
    first = decide(POLICY, {"prefill": work, "decode": decode(2, 10)}, ScalingState(), 0.0)
    ordered = first.pools["prefill"].add
    assert ordered > 0
    again = msgspec.structs.replace(work, starting=ordered)
    second = decide(POLICY, {"prefill": again, "decode": decode(2, 10)}, first.state, 15.0)
    assert second.pools["prefill"].add == 0


def test_growing_load_is_met_before_the_queue_stands_when_a_start_takes_long() -> None:
    def ordered_at(start_s: float) -> float:
        policy = msgspec.structs.replace(POLICY, start_s=start_s, trust_in_trend=1.0)
        fleet = Fleet(policy, 2, 2, step_s=5.0)
        while True:
            arrived = 2_000.0 + 40.0 * fleet.now_s
            if fleet.look(prefill(1, arrived), decode(1, 5)).pools["prefill"].target >= 3:
                return fleet.now_s

    assert ordered_at(300.0) < ordered_at(30.0) < ordered_at(0.0)


def test_shrinking_takes_a_whole_quiet_window_and_one_peak_in_it_keeps_the_workers() -> None:
    fleet = Fleet(POLICY, 1, 4)
    for number in range(20):
        fleet.look(prefill(1), decode(1, {0: 70, 6: 110}.get(number, 5)))
    # Quiet from the seventh look on, at 90 s: nothing before 210 s.
    assert [each[1] for each in fleet.history[:14]] == [4] * 14
    assert fleet.history[-1][1] < 4
    assert all(
        before - after in (0, 1) for (_, before), (_, after) in zip(fleet.history, fleet.history[1:], strict=False)
    )


def test_what_is_far_too_much_goes_in_halves_and_the_last_one_by_one() -> None:
    policy = msgspec.structs.replace(
        POLICY, pools={**POLICY.pools, "decode": PoolPolicy(1, 32, sequences_per_worker=20)}, drain_pause_s=30.0
    )
    fleet = Fleet(policy, 1, 17)
    for _ in range(40):
        fleet.look(prefill(1), decode(1, 5, free_share=1.0))
    sizes = [each[1] for each in fleet.history]
    assert [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]] == [17, 9, 5, 3, 2, 1]
    assert sizes[:8] == [17] * 8, "not before the whole window was seen"
    drained = [i for i in range(1, len(sizes)) if sizes[i] < sizes[i - 1]]
    assert all(after - before >= 2 for before, after in zip(drained, drained[1:], strict=False)), "with pauses"


def test_part_of_a_prefill_worker_is_rounded_up_unless_it_is_too_little_for_a_start() -> None:
    pool = PoolPolicy(1, 64, spare=0.0, least_spare=0.0)
    for asked, target in ((4.0, 4), (4.25, 4), (4.35, 5), (4.9, 5), (5.25, 5)):
        seen = {"prefill": prefill(4, asked * SPEED)}
        decision = decide(ScalingPolicy({"prefill": pool}), seen, ScalingState(), 0.0)  # type: ignore[arg-type]
        assert decision.pools["prefill"].target == target, asked


def test_workers_for_prompts_that_no_longer_come_are_not_kept_for_long() -> None:
    """From eight workers' worth to four: most of what is too much is gone after two of the slow mean's minutes."""
    pools: dict[Role, PoolPolicy] = {"prefill": PoolPolicy(1, 32, shrink_after_s=15.0), "decode": PoolPolicy(1, 8)}
    fleet = Fleet(ScalingPolicy(pools, shrink_after_s=60.0, drain_pause_s=15.0, start_s=60.0), 8, 1)
    for _ in range(20):
        fleet.look(prefill(1, 8 * SPEED), decode(1, 5))
    before = fleet.serving["prefill"]
    assert before == 10
    sizes = [before]
    while sizes[-1] > 6 and len(sizes) < 16:
        fleet.look(prefill(1, 4 * SPEED), decode(1, 5))
        sizes.append(fleet.serving["prefill"])
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 6 and len(sizes) <= 12, sizes
    for _ in range(40):
        fleet.look(prefill(1, 4 * SPEED), decode(1, 5))
    assert fleet.serving["prefill"] == 6, "and then it stands"


def test_work_that_may_wait_needs_fewer_spare_workers() -> None:
    """With a limit of seconds chance is met by workers, with one of half a minute by the queue."""

    def wanted(max_queue_delay_s: float) -> int:
        pool = PoolPolicy(1, 64, max_queue_delay_s=max_queue_delay_s)
        policy = ScalingPolicy({"prefill": pool}, start_s=60.0)
        return decide(policy, {"prefill": prefill(1, 30 * SPEED)}, ScalingState(), 0.0).pools["prefill"].target

    assert wanted(0.5) >= wanted(2.0) >= wanted(20.0) >= 1
    pool = PoolPolicy(max_queue_delay_s=0.5, spare=1.0)
    assert spare_workers(pool, 9.0, 60.0) == pytest.approx(3.0 - 9.0 * 0.5 / 60.0)
    assert spare_workers(PoolPolicy(max_queue_delay_s=30.0), 9.0, 60.0) == 0.25, "never none at all"
    assert spare_workers(PoolPolicy(), 0.0, 60.0) == 0.0


def test_bad_policies_say_the_field() -> None:
    for make, field in (
        (lambda: PoolPolicy(5, 2), "scaling.minimum"),
        (lambda: PoolPolicy(sequences_per_worker=0), "scaling.sequences_per_worker"),
        (lambda: PoolPolicy(shrink_after_s=-1.0), "scaling.shrink_after_s"),
        (lambda: ScalingPolicy({}), "scaling.pools"),
        (lambda: ScalingPolicy({"both": PoolPolicy()}, ratio_band=(2.0, 1.0)), "scaling.ratio_band"),
        (lambda: decide(POLICY, {"decode": decode(1)}, ScalingState(), 0.0), "scaling.pools"),
    ):
        with pytest.raises(LocalError) as caught:
            make()  # type: ignore[no-untyped-call]
        assert caught.value.field == field
