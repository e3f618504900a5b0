"""Cost models learned from what a fleet reports: true parameters come back, gray failures show, nothing old sticks."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from kvbaton.router.cost import FleetCosts, LinkCost, WorkerCost, locals_, pairs
from kvbaton.router.learning import FADE_HALF_S, STALE_HALF_S, Learning
from kvbaton.router.policy import Decision, PolicyConfig, decide
from kvbaton.router.views import MemberView, RequestView
from kvbaton.workers.protocol import RequestReport, WorkerStats

TRUE = WorkerCost(0.012, 120e-6, 15e-9, 0.009, 400e-6, 60e-9)
LINK = LinkCost(0.003, 0.8e-9)
LAYERS, TOKEN_BYTES = 24, 50_000


class World:
    """A fleet that behaves as ``TRUE`` and ``LINK`` say, and a router that learns it. A request takes a second."""

    def __init__(self, seed: int = 0, noise: float = 0.02, outliers: float = 0.05) -> None:
        self.rng = Random(seed)
        self.noise, self.outliers = noise, outliers
        self.learning = Learning()
        self.learning.layout(TOKEN_BYTES, LAYERS)
        self.slow = {"p0": 1.0, "p1": 1.0, "d0": 1.0, "d1": 1.0}
        self.now_s = 0.0
        self.turn = 0
        self.under_way: deque[tuple[str, int]] = deque(maxlen=2)  # where the last prompts are still being computed

    def shaken(self, seconds: float) -> float:
        seconds *= max(0.5, self.rng.gauss(1.0, self.noise))
        return seconds * (self.rng.choice((8.0, 3.0)) if self.rng.random() < self.outliers else 1.0)

    def members(self) -> list[MemberView]:
        return [
            MemberView(
                name, "prefill" if name[0] == "p" else "decode", 0,
                sum(tokens for place, tokens in self.under_way if place == name), 100_000,
            )
            for name in self.slow
        ]  # fmt: skip

    def serve(self, tokens: int, **config: Any) -> Decision:
        """Route one request, let the fleet do it, and learn."""
        self.now_s += 1.0
        self.turn += 1
        costs = self.learning.costs(self.now_s)
        view = RequestView(tokens, 1, tokens, tokens + 100)
        decision = decide(view, self.members(), PolicyConfig(**config), self.turn, True, costs=costs)
        truth = FleetCosts(worker=TRUE, link=LINK, token_bytes=TOKEN_BYTES, num_layers=LAYERS)
        slow = self.slow[decision.prefill or decision.decode]
        by_name = {m.name: replace(m, queued_tokens=0) for m in self.members()}
        self.under_way.append((decision.prefill or decision.decode, tokens))
        if decision.prefill is not None:
            pair = ([by_name[decision.prefill]], [by_name[decision.decode]])
            (real,) = pairs(view, *pair, truth, PolicyConfig().limits)
        else:
            (real,) = locals_(view, [by_name[decision.decode]], truth, PolicyConfig().limits)
        prefill_s = slow * self.shaken(real.prefill_s)
        expected_s = decision.terms.get("queue_s", 0.0)  # what waits is as long as foretold: another test is about that
        ttft_s = real.overhead_s + expected_s + prefill_s
        report = RequestReport(
            path="remote" if decision.remote else "local",
            num_prompt_tokens=tokens,
            num_cached_tokens=0,
            num_remote_tokens=tokens if decision.remote else 0,
            num_output_tokens=100,
            transfer_bytes=tokens * TOKEN_BYTES if decision.remote else 0,
            queue_s=expected_s,
            prefill_s=prefill_s,
            exposed_s=self.shaken(real.exposed_s) if decision.remote else 0.0,
        )
        self.learning.first_token(decision, ttft_s, self.now_s)
        self.learning.served(decision, report, ttft_s, self.now_s)
        return decision

    def run(self, count: int, **config: Any) -> list[Decision]:
        return [self.serve(8 + int(self.rng.lognormvariate(6.5, 1.0)), **config) for _ in range(count)]

    def cost(self, name: str) -> WorkerCost:
        return self.learning.costs(self.now_s).workers[name]


@pytest.mark.parametrize("seed", range(3))
def test_prefill_is_learned_from_reports(seed: int) -> None:
    world = World(seed)
    world.run(600, threshold_tokens=0)
    for name in ("p0", "p1"):
        found = world.cost(name)
        got = (found.prefill_fixed_s, found.prefill_token_s, found.prefill_pair_s)
        assert got == pytest.approx((TRUE.prefill_fixed_s, TRUE.prefill_token_s, TRUE.prefill_pair_s), rel=0.08)
        assert world.learning.workers[name].prefill.error < 0.25


def test_links_are_learned_where_they_show() -> None:
    """A link slower than prefill: both its parameters are in the exposed time."""
    world = World(noise=0.01, outliers=0.0)
    slow = LinkCost(0.003, 8e-9)
    rng = Random(1)
    for _ in range(300):
        tokens = 200 + rng.randrange(4_000)
        carry_s, prefill_s = tokens * TOKEN_BYTES * slow.byte_s, tokens * 120e-6
        exposed_s = slow.startup_s + max(carry_s / LAYERS, carry_s - prefill_s * (1 - 1 / LAYERS))
        decision = decide(
            RequestView(tokens, 1, tokens, tokens + 10), world.members(), PolicyConfig(0), 0, True,
            costs=world.learning.costs(0.0),
        )  # fmt: skip
        world.learning.served(
            decision,
            RequestReport("remote", tokens, 0, tokens, 10, tokens * TOKEN_BYTES, 0.0, prefill_s, 0.0, exposed_s),
            None,
            0.0,
        )
    (found,) = [link for known in world.learning.costs(0.0).links.values() for link in known.values()]
    assert (found.startup_s, found.byte_s) == pytest.approx((slow.startup_s, slow.byte_s), rel=0.05)


def test_steps_are_learned_from_counters() -> None:
    """Two polls tell what happened in between: steps, rows, time, and the KV held."""
    learning, rng = Learning(), Random(2)
    before = WorkerStats(num_blocks_used=1)
    for _ in range(200):
        streams, blocks, steps = rng.randrange(1, 60), rng.randrange(10, 4_000), rng.randrange(5, 60)
        step_s = TRUE.step_fixed_s + TRUE.step_sequence_s * streams + TRUE.step_context_s * blocks * 16
        before = replace(before, num_blocks_used=blocks)
        after = replace(
            before,
            num_steps=before.num_steps + steps,
            num_output_tokens=before.num_output_tokens + steps * streams,
            decode_busy_s=before.decode_busy_s + steps * step_s * rng.gauss(1.0, 0.02),
        )
        learning.polled("d", before, after, 16, 0.0)
        before = after
    found = learning.costs(1.0).workers["d"]
    got = (found.step_fixed_s, found.step_sequence_s, found.step_context_s)
    assert got == pytest.approx((TRUE.step_fixed_s, TRUE.step_sequence_s, TRUE.step_context_s), rel=0.08)


def test_an_idle_poll_teaches_nothing() -> None:
    learning = Learning()
    learning.polled("d", WorkerStats(), WorkerStats(), 16, 0.0)
    learning.polled("d", WorkerStats(), WorkerStats(num_steps=3, num_prompt_tokens=900, prefill_busy_s=0.2), 16, 0.0)
    assert learning.model_of("d").step.count == 0


def shares(decisions: list[Decision], name: str) -> float:
    return sum(name in (each.prefill, each.decode) for each in decisions) / len(decisions)


def test_a_gray_worker_loses_traffic_within_a_few_requests_and_is_tried_again() -> None:
    """p0 answers, but twelve times slower than it did. Case of a slow worker that no health check sees."""
    world = World(outliers=0.0)
    for name in ("d0", "d1"):  # decode workers never prefill here: they are far too slow at it
        world.slow[name] = 50.0
    world.run(200)
    assert 0.2 < shares(world.run(100), "p0") < 0.8
    world.slow["p0"] = 12.0
    assert shares(world.run(12), "p0") <= 0.4
    sick = world.run(200)
    assert 0.0 < shares(sick, "p0") < 0.25, "it is tried now and then"
    world.slow["p0"] = 1.0
    world.run(300)
    assert shares(world.run(100), "p0") > 0.2, "and gets its traffic back when it is well"


def test_a_slowdown_shows_at_once_and_fades() -> None:
    world = World(noise=0.0, outliers=0.0)
    world.run(100, threshold_tokens=None)
    decision = world.serve(1_000)
    name = decision.prefill or decision.decode
    assert decision.ttft_s is not None
    world.learning.first_token(decision, 20 * decision.ttft_s, world.now_s)
    world.now_s += 0.3
    late = world.cost(name).slowdown
    assert late > 3
    world.now_s += FADE_HALF_S
    assert world.cost(name).slowdown == pytest.approx(late**0.5, rel=0.1)


def test_noise_is_no_slowdown() -> None:
    world = World(noise=0.2, outliers=0.0)
    world.run(300)
    assert all(world.cost(name).slowdown < 1.5 for name in world.learning.workers)


def test_a_worker_counts_as_the_others_until_it_is_known() -> None:
    world = World(outliers=0.0)
    world.run(300, threshold_tokens=0)
    learning = world.learning
    learning.model_of("new")
    world.now_s += 1
    others = [world.cost(name).prefill_token_s for name in ("p0", "p1")]
    assert min(others) * 0.95 < world.cost("new").prefill_token_s < max(others) * 1.05
    assert learning.costs(world.now_s).worker.prefill_token_s == world.cost("new").prefill_token_s


def test_what_was_measured_long_ago_counts_less() -> None:
    world = World(outliers=0.0)
    world.slow["p0"] = 6.0
    world.run(300, threshold_tokens=0)
    known = world.cost("p0").prefill_token_s
    usual = world.cost("p1").prefill_token_s
    world.now_s += 12 * STALE_HALF_S
    assert known > 4 * usual
    assert world.cost("p0").prefill_token_s == pytest.approx(usual, rel=0.02)


def test_a_restart_keeps_the_model_with_less_confidence() -> None:
    world = World(outliers=0.0)
    world.run(300, threshold_tokens=0)
    before = world.cost("p0")
    world.learning.restarted("p0")
    world.now_s += 0.3
    assert world.cost("p0").prefill_token_s == pytest.approx(before.prefill_token_s, rel=0.1)
    assert world.learning.workers["p0"].prefill.count == 3


def test_a_worker_that_left_is_forgotten() -> None:
    world = World()
    world.run(100, threshold_tokens=0)
    world.learning.forget("p0")
    costs = world.learning.costs(world.now_s)
    assert "p0" not in costs.workers and "p0" not in costs.links
    assert all("p0" not in pair for pair in world.learning.links)


def test_costs_given_out_are_never_changed() -> None:
    world = World()
    world.run(20, threshold_tokens=0)
    given = world.learning.costs(world.now_s)
    copy = replace(given, workers=dict(given.workers), links={k: dict(v) for k, v in given.links.items()})
    world.run(50, threshold_tokens=0)
    assert given == copy


def test_requests_that_say_nothing_teach_nothing() -> None:
    """A remote decision that ended up local, and a prefill mostly made of other people's steps."""
    world = World()
    view = RequestView(100, 1, 100, 200)
    busy = [MemberView("p0", "prefill", 0, 0, 9_000), MemberView("d0", "decode", 60, 0, 9_000)]
    remote = decide(view, busy, PolicyConfig(0), 0, True)
    world.learning.served(remote, RequestReport("local", 100, 0, 0, 5, prefill_s=0.1), 0.1, 0.0)
    local = decide(view, busy[1:], PolicyConfig(), 0, False)
    world.learning.served(local, RequestReport("local", 100, 0, 0, 5, prefill_s=0.02), 0.1, 0.0)
    assert all(model.prefill.count == 0 for model in world.learning.workers.values())
