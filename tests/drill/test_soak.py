"""The soak: what it asks, what it finds, and a whole one with a tiny model.

KVBATON_SOAK_S sets how long the whole one is (default 600 s); the seed is printed, and KVBATON_SOAK_SEED sets it.
"""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest

from kvbaton.drill.resources import MIB, MOST_KIB_PER_REQUEST, Held, Life, Watch, left_over, most_of, slopes, theil_sen
from kvbaton.drill.samples import Sample
from kvbaton.drill.soak_load import Mixture, Sent, made_up, tide
from kvbaton.drill.soak_verdict import RouterCount, Seen, latencies, problems_of, router_count
from kvbaton.plan.workload import Trace, TraceRequest
from kvbaton.types import LocalError

# -- the load


def trace(name: str, lengths: list[tuple[int, int]], block_tokens: int | None = None) -> Trace:
    ids = (0, 1) if block_tokens else ()
    return Trace(name, tuple(TraceRequest(0.0, prompt, output, ids) for prompt, output in lengths), block_tokens)


def test_a_mixture_fits_the_model_and_keeps_what_is_shared() -> None:
    mixture = Mixture([trace("long", [(1000, 10)] * 20, 100), trace("short", [(5, 500), (9, 100)])], 100, 50)
    found = list(itertools.islice(mixture.requests(Random(1)), 200))
    assert {each.source for each in found} == {"long", "short"}
    assert all(1 <= each.prompt_tokens <= 100 and 1 <= each.output_tokens <= 50 for each in found)
    long = next(each for each in found if each.source == "long")
    assert (long.prompt_tokens, long.output_tokens, long.block_tokens, long.block_ids) == (100, 10, 10, (0, 2))
    short = [each for each in found if each.source == "short"]
    assert [each.prompt_tokens for each in short[:4]] in ([5, 9, 5, 9], [9, 5, 9, 5]), "in the trace's own order"
    assert list(itertools.islice(mixture.requests(Random(1)), 200)) == found
    with pytest.raises(LocalError, match="needs a trace"):
        Mixture([], 10, 10)
    assert [each.name for each in made_up(3)] == ["chat", "documents"]


def test_the_tide_swings_around_the_rate() -> None:
    rates = [tide(4.0, at_s, 0.25, 100.0) for at_s in range(100)]
    assert min(rates) == pytest.approx(3.0) and max(rates) == pytest.approx(5.0)
    assert sum(rates) / len(rates) == pytest.approx(4.0)


# -- what processes hold


def lived(rng: Random, lasts_s: int, per_s: float, kib: float, *steps: tuple[int, float]) -> Life:
    """A life that keeps ``kib`` of each request, and takes (when, MiB) at once."""
    looks, served = [], 0.0
    for at in range(0, lasts_s, 2):
        served += 2 * per_s
        taken = sum(mib for when, mib in steps if at >= when) * MIB
        looks.append(Held(float(at), int(100 * MIB + rng.uniform(-0.1, 0.1) * MIB + taken + kib * 1024 * served), 5, 5,
                          served))  # fmt: skip
    return Life("d0", "decode", looks)


def test_what_is_kept_of_each_request_is_found_in_short_lives_and_settling_is_not() -> None:
    rng = Random(0)

    def lives(kib: float) -> list[Life]:
        """None is older than seven minutes; each settles in steps that come when they come."""
        return [
            lived(
                rng, rng.randrange(150, 420), 1.0, kib, *((rng.randrange(420), rng.uniform(0.5, 3)) for _ in range(4))
            )
            for _ in range(9)
        ]

    (settling,) = slopes(lives(0.0), 900.0)
    assert settling.num_windows > 40 and settling.most_grown_mib > 1.0
    assert abs(settling.kib_per_request) < 1.0 and settling.problems == []
    (leaking,) = slopes(lives(10.0), 900.0)
    assert leaking.kib_per_request == pytest.approx(10.0, abs=2.0) and leaking.mib_per_minute is None
    (problem,) = leaking.problems
    assert "KiB with every request" in problem
    (long,) = slopes([lived(rng, 1500, 1.0, 0.0, (400, 8.0))], 1500.0)
    assert long.problems == [] and long.mib_per_minute is not None and long.mib_per_minute < 0.1


def test_what_is_kept_of_few_requests_is_found_by_time_or_at_once() -> None:
    rng = Random(1)
    every_minute = tuple((at, 1.5) for at in range(0, 1500, 60))
    (lumps,) = slopes([lived(rng, 1500, 0.5, 0.0, *every_minute)], 1500.0)
    assert lumps.mib_per_minute == pytest.approx(1.5, abs=0.2)
    assert lumps.kib_per_request < MOST_KIB_PER_REQUEST or lumps.problems
    assert any("MiB a minute" in each for each in lumps.problems)
    (at_once,) = slopes([lived(rng, 400, 1.0, 0.0, (200, 60.0))], 400.0)
    assert at_once.problems == ["by 60 MiB in one life"]


def test_too_short_a_life_or_too_little_work_says_nothing() -> None:
    rng = Random(2)
    assert slopes([lived(rng, 80, 9.0, 50.0)], 900.0) == [], "it has not settled"
    assert slopes([lived(rng, 600, 0.05, 0.0)], 900.0) == [], "it has hardly worked"
    (little,) = slopes([lived(rng, 200, 1.0, 9.0)], 900.0)
    assert 0 < little.num_windows < 8 and little.problems == []
    assert theil_sen([(float(x), 2.0 * x + 1.0) for x in range(9)] + [(9.0, 500.0)]) == pytest.approx(2.0)


def test_processes_of_a_kind_share_what_was_answered() -> None:
    watch, here = Watch(), ("a", "decode", os.getpid())
    watch.look([here], 0.0, 5)
    watch.look([here, ("b", "decode", os.getppid())], 2.0, 15)
    watch.look([here, ("b", "decode", os.getppid())], 4.0, 7)  # counted anew
    held = watch.look([here], 6.0, 10)
    assert held["a"].num_requests == 5 + 3


def test_what_is_held_at_rest_beyond_what_it_was_is_found() -> None:
    before = most_of({"d0": Held(0.0, 1, 20, 8), "d1": Held(0.0, 1, 22, 9)}, {"d0": "decode", "d1": "decode"})
    assert (before["decode"].num_fds, before["decode"].num_threads) == (22, 9)
    kinds = {"d0": "decode", "x": "unknown"}
    assert left_over(before, {"d0": Held(9.0, 1, 25, 10), "x": Held(9.0, 1, 900, 900)}, kinds) == []
    found = left_over(before, {"d0": Held(9.0, 1, 400, 99)}, kinds)
    assert found == ["d0: 400 file descriptors, 22 before", "d0: 99 threads, 9 before"]


def test_a_second_life_is_another_one() -> None:
    watch = Watch()
    here = watch.look([("me", "up", os.getpid()), ("gone", "decode", 2**22 - 3)], 1.0)
    assert set(here) == {"me"} and here["me"].num_threads >= 1 and here["me"].own_bytes > 0
    watch.look([("me", "up", os.getpid())], 5.0)
    (life,) = watch.lives.values()
    assert life.lasted_s == 4.0


# -- the verdict


def sent(ending: str = "whole", at_s: float = 100.0, **more: object) -> Sent:
    return Sent("t", at_s, at_s + 1, ending, **more)  # type: ignore[arg-type]


def canary(outcome: str = "right", at_s: float = 100.0) -> Sample:
    return Sample("canary", 0, at_s, at_s + 1, outcome, 200 if outcome != "lost" else 0)  # type: ignore[arg-type]


GOOD = Seen(
    minutes=30.0, sent=[sent()] * 9 + [sent("refused"), sent("hung_up")], num_started=11, canaries=[canary()],
    router_canaries={"right": 3}, router_down=[(10.0, 20.0)], router=RouterCount(11, 10, 12), struck={"x": 3},
    not_struck=[], left_over=[], slopes=[], doubtful=[],
)  # fmt: skip


def test_a_good_run_has_no_problem() -> None:
    assert problems_of(GOOD) == []
    broken = [*GOOD.sent, sent("broken", 19.0)]
    assert problems_of(msgspec.structs.replace(GOOD, sent=broken, num_started=12)) == [], "the router had died"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"num_started": 12}, "12 requests were sent and 11 ended"),
        ({"sent": [*GOOD.sent[:-1], sent("bad", message="no usage")]}, "bad: t: status 0 no usage"),
        ({"sent": [*GOOD.sent[:-1], sent("lost")]}, "lost: t"),
        ({"sent": [*GOOD.sent[:-1], sent("broken")]}, "although the router lived"),
        ({"sent": [sent("refused")] * 11}, "only 0 were answered"),
        ({"canaries": [canary(), canary("wrong")]}, "wrong: "),
        ({"canaries": [canary(), canary("lost")]}, "a canary was lost"),
        ({"canaries": []}, "no canary was answered"),
        ({"router_canaries": {"wrong": 1}}, "found 1 wrong"),
        ({"router": RouterCount(9, 10, 12)}, "counts 9 requests, of 10"),
        ({"struck": {}}, "no fault struck"),
        ({"not_struck": ["rolling drain"]}, "never struck: rolling drain"),
        ({"left_over": ["d0: num_leases 1"]}, "num_leases"),
        ({"doubtful": ["prompt 1: a, then b"]}, "even the healthy fleet"),
    ],
)
def test_each_thing_that_must_not_be_is_a_problem(changes: dict[str, object], problem: str) -> None:
    (found,) = problems_of(msgspec.structs.replace(GOOD, **changes))
    assert problem in found


def test_the_routers_count_is_held_against_what_went_through_it() -> None:
    old, new = "a" * 16, "b" * 16
    rows = [
        sent(at_s=5.0, request_id=old + "1"), sent(at_s=100.0, request_id=new + "1"),
        sent("refused", 101.0, request_id=new + "2"), sent("hung_up", 102.0),
    ]  # fmt: skip
    down = [(10.0, 20.0)]
    assert router_count(3, rows, [canary(at_s=50.0)], down, 24) == RouterCount(3, 3, 4)
    assert not router_count(2, rows, [canary(at_s=50.0)], down, 24).holds
    first = router_count(26, rows[:1], [canary(at_s=50.0)], [], 24)
    assert (first.at_least, first.at_most) == (26, 26), "the only router had what was learnt too"


def test_latencies_are_those_of_whole_answers() -> None:
    rows = [sent(ttft_s=number / 100, tpot_s=0.01) for number in range(1, 101)]
    assert latencies(rows) == {"ttft_p50": 0.5, "ttft_p90": 0.9, "ttft_p99": 0.99,
                               "tpot_p50": 0.01, "tpot_p90": 0.01, "tpot_p99": 0.01}  # fmt: skip
    assert latencies([]) == {}


@pytest.mark.slow
def test_a_whole_soak(tmp_path: Path) -> None:
    minutes = float(os.environ.get("KVBATON_SOAK_S", "600")) / 60
    seed = os.environ.get("KVBATON_SOAK_SEED", str(random.randrange(2**31)))
    print(f"seed {seed}")
    command = [sys.executable, "-m", "kvbaton.cli.main", "soak", "--minutes", f"{minutes:.2f}", "--model", "tiny"]
    command += ["--seed", seed, "--report", str(tmp_path), "--fault-every-s", "12", "--first-rate", "8", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=Path(__file__).parents[2])
    record = msgspec.json.decode(done.stdout)
    assert done.returncode == 0 and record["passed"], record["problems"]
    assert record["faults"] and record["trace"]["whole"] and (tmp_path / "soak.json").is_file()
