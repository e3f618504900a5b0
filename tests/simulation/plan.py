"""What one seed means: the fleet, the load, the weather, and which faults strike when.

Everything is drawn before the run begins, from the seed alone. Knows nothing about how a fault is carried out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from .network import Weather

STORM_S = 9.0  # faults strike in this time; afterwards all is well again

FAULTS = (
    "crash", "crash", "cut", "cut", "one_way", "one_way", "reset", "slow_engine", "slow_way", "broken_step", "drain",
    "router_dies", "clear_cache", "client_leaves", "client_leaves", "pause", "suspend", "suspend",
)  # fmt: skip


@dataclass(frozen=True)
class Fault:
    at_s: float
    kind: str
    lasts_s: float
    lot: float  # in [0, 1): which worker, way or request it strikes


@dataclass(frozen=True)
class Asked:
    at_s: float
    prompt: tuple[int, ...]
    max_tokens: int
    stream: bool


@dataclass(frozen=True)
class Plan:
    seed: int
    num_prefill: int
    num_decode: int
    num_blocks: int
    prefix_caching: bool
    shared_memory: bool  # how KV is read: mapped, or over the wire
    threshold_tokens: int | None
    skew: float  # clocks run up to this much too fast or too slow
    event_log_hashes: int
    index_blocks: int
    lose_events: float
    lose_scrapes: float
    corrupt: float
    copy_factor: float  # how much slower bytes are than messages
    autoscale: bool
    weather: Weather
    requests: tuple[Asked, ...] = ()
    faults: tuple[Fault, ...] = field(default=())


def draw(seed: int) -> Plan:
    rng = Random(seed)
    return Plan(
        seed=seed,
        num_prefill=rng.choice((1, 1, 2)),
        num_decode=rng.choice((1, 2, 2)),
        num_blocks=rng.choice((24, 40, 64)),
        prefix_caching=rng.random() < 0.8,
        shared_memory=rng.random() < 0.5,
        threshold_tokens=rng.choice((0, 0, 5, None)),
        skew=rng.choice((0.0, 0.05, 0.2)),
        event_log_hashes=rng.choice((8, 40, 1000)),
        index_blocks=rng.choice((40, 10_000)),
        lose_events=rng.choice((0.0, 0.3)),
        lose_scrapes=rng.choice((0.0, 0.2)),
        corrupt=rng.choice((0.0, 0.05)),
        copy_factor=rng.choice((1.0, 5.0, 40.0)),
        autoscale=rng.random() < 0.6,
        weather=Weather(
            delay_s=rng.choice((0.0005, 0.003, 0.02)), spike=rng.choice((0.0, 0.02)), frames=rng.random() < 0.4
        ),
        requests=_requests(rng),
        faults=tuple(
            Fault(rng.uniform(0.3, STORM_S), rng.choice(FAULTS), rng.choice((0.2, 1.0, 3.0)), rng.random())
            for _ in range(rng.randint(0, 7))
        ),
    )


def _requests(rng: Random) -> tuple[Asked, ...]:
    """Prompts that share beginnings, in bursts."""
    shared = [tuple(rng.randrange(64, 90) for _ in range(rng.choice((4, 8, 16)))) for _ in range(2)]
    asked, at_s = [], 0.2
    for _ in range(rng.randint(6, 16)):
        at_s = min(STORM_S, at_s + rng.choice((0.0, 0.0, 0.1, 0.8)))
        own = tuple(rng.randrange(64, 90) for _ in range(rng.choice((1, 3, 6))))
        prompt = (rng.choice(shared) if rng.random() < 0.7 else ()) + own
        asked.append(Asked(at_s, prompt, rng.choice((1, 2, 6, 12, 20)), rng.random() < 0.7))
    return tuple(asked)
