"""What a soak has shown, and whether it holds: pure judgement over what was sent, seen and counted.

A record without problems passed. Knows nothing about fleets or clocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from kvbaton.drill.resources import Life, Slope
from kvbaton.drill.samples import Sample
from kvbaton.drill.soak_load import Sent

LEAST_WHOLE = 0.5  # of those whose clients stayed: below, faults were all that there was
EVERY_KIND_MINUTES = 15.0  # from so long a run on, every kind of fault must have struck
MARGIN_S = 2.0  # around the death of a router: what was sent then may have met either life
NUM_SHOWN = 5
_LIFE_CHARS = 16  # of a request id: the router's life


class RouterCount(msgspec.Struct, frozen=True):
    """What the router that is there at the end has counted, beside what must have gone through it."""

    counted: int
    at_least: int
    at_most: int

    @property
    def holds(self) -> bool:
        return self.at_least <= self.counted <= self.at_most


class Seen(msgspec.Struct, frozen=True):
    """Everything that is judged."""

    minutes: float
    sent: Sequence[Sent]  # of the traces, in the storm
    num_started: int
    canaries: Sequence[Sample]
    router_canaries: dict[str, int]  # by result
    router_down: Sequence[tuple[float, float]]
    router: RouterCount
    struck: dict[str, int]
    not_struck: Sequence[str]  # kinds of fault that never were
    left_over: Sequence[str]
    slopes: Sequence[Slope]
    doubtful: Sequence[str]


class SoakRecord(msgspec.Struct):
    """All of a soak."""

    settings: dict[str, float]
    machine: dict[str, str]
    sources: list[str]
    rate_per_s: float
    minutes: float
    trace: dict[str, int]  # endings
    canaries: dict[str, int]  # outcomes
    router_canaries: dict[str, int]
    errors: dict[str, int]  # codes
    latency_s: dict[str, float]
    within_limits: float
    router: RouterCount
    faults: dict[str, int]
    not_carried_out: list[str]
    scaled: dict[str, int]  # workers that the autoscaler added and drained
    lives: dict[str, int]  # processes watched, by kind
    slopes: list[Slope]
    memory: list[Life]  # so that the slopes can be looked at
    left_over: list[str]
    problems: list[str]

    @property
    def passed(self) -> bool:
        return not self.problems


def problems_of(seen: Seen) -> list[str]:
    found = [f"even the healthy fleet answers {each}" for each in seen.doubtful]
    found += _of_requests(seen) + _of_canaries(seen) + list(seen.left_over)
    if not seen.router.holds:
        found.append(f"the router counts {seen.router.counted} requests, of {seen.router.at_least} it must have had")
    found += [f"the memory of {slope.kind} processes grows {how}" for slope in seen.slopes for how in slope.problems]
    if not seen.struck:
        found.append("no fault struck")
    if seen.minutes >= EVERY_KIND_MINUTES:
        found += [f"never struck: {kind}" for kind in seen.not_struck]
    return found


def _of_requests(seen: Seen) -> list[str]:
    found = []
    if len(seen.sent) != seen.num_started:
        found.append(f"{seen.num_started} requests were sent and {len(seen.sent)} ended")
    for ending in ("bad", "lost"):
        these = [each for each in seen.sent if each.ending == ending]
        found += [f"{ending}: {each.source}: status {each.status} {each.message}" for each in these[:NUM_SHOWN]]
        if len(these) > NUM_SHOWN:
            found.append(f"{ending}: {len(these) - NUM_SHOWN} more")
    found += [
        f"a connection broke although the router lived: {each.message}"
        for each in [each for each in seen.sent if each.ending == "broken"]
        if not _met_its_death(each.sent_s, each.ended_s, seen.router_down)
    ][:NUM_SHOWN]
    stayed = [each for each in seen.sent if each.ending != "hung_up"]
    whole = sum(each.ending == "whole" for each in stayed)
    if whole < LEAST_WHOLE * len(stayed) or not whole:
        found.append(f"of {len(stayed)} requests whose clients stayed only {whole} were answered")
    return found


def _of_canaries(seen: Seen) -> list[str]:
    wrong = [each for each in seen.canaries if each.outcome == "wrong"]
    found = [f"wrong: {each.message}" for each in wrong[:NUM_SHOWN]]
    found += [
        f"a canary was lost although the router lived: {each.message}"
        for each in seen.canaries
        if each.outcome == "lost" and not _met_its_death(each.sent_s, each.ended_s, seen.router_down)
    ][:NUM_SHOWN]
    if not any(each.outcome == "right" for each in seen.canaries):
        found.append("no canary was answered")
    if wrongs := seen.router_canaries.get("wrong"):
        found.append(f"the router's own canary found {wrongs} wrong answers")
    return found


def _met_its_death(from_s: float, until_s: float, down: Iterable[tuple[float, float]]) -> bool:
    return any(from_s < up_s + MARGIN_S and until_s > down_s - MARGIN_S for down_s, up_s in down)


def router_count(
    counted: int, sent: Sequence[Sent], canaries: Sequence[Sample], down: Sequence[tuple[float, float]], learnt: int
) -> RouterCount:
    """``sent`` are all requests of traces since the fleet began, and ``learnt`` were sent before any of them.

    What has an id of the last router went through it. Of what has none, hung up before an answer began or broken, who
    knows; and so with canaries, whose ids are not kept, around that router's birth.
    """
    with_ids = [each for each in sent if each.request_id]
    if not with_ids:
        return RouterCount(counted, 0, counted)
    life = max(with_ids, key=lambda each: each.sent_s).request_id[:_LIFE_CHARS]
    born_s = max((up_s for _, up_s in down), default=None)
    sure = sum(each.request_id.startswith(life) for each in with_ids) + (learnt if born_s is None else 0)
    unsure = sum(not each.request_id and (born_s is None or each.ended_s > born_s - MARGIN_S) for each in sent)
    for each in canaries:
        if born_s is None or each.sent_s > born_s + MARGIN_S:
            sure, unsure = sure + (each.status != 0), unsure + (each.status == 0)
        else:
            unsure += each.ended_s > born_s - MARGIN_S
    return RouterCount(counted, sure, sure + unsure)


def latencies(whole: Sequence[Sent]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, values in (
        ("ttft", sorted(each.ttft_s for each in whole if each.ttft_s is not None)),
        ("tpot", sorted(each.tpot_s for each in whole if each.tpot_s is not None)),
    ):
        if values:
            found |= {f"{name}_p{share}": round(values[(len(values) - 1) * share // 100], 4) for share in (50, 90, 99)}
    return found


def counted(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items()))


def summary(record: SoakRecord) -> str:
    """A page of text."""
    lines = [
        f"{record.minutes:.1f} minutes at {record.rate_per_s:.3g} requests/s, seed {record.settings['seed']:g}",
        *(f"  {each}" for each in record.sources),
        f"requests of traces: {_told(record.trace)}; within both limits {record.within_limits:.1%}",
        f"  errors: {_told(record.errors)}; latency: {_told(record.latency_s)}",
        f"canaries: {_told(record.canaries)}; the router's own: {_told(record.router_canaries)}",
        f"the last router counted {record.router.counted}, between {record.router.at_least} and "
        f"{record.router.at_most} went through it",
        f"faults: {_told(record.faults)}",
        *(f"  not carried out: {each}" for each in record.not_carried_out),
        f"autoscaler: {_told(record.scaled)}; processes watched: {_told(record.lives)}",
        *map(_memory, record.slopes),
        "left over: " + ("; ".join(record.left_over) or "nothing"),
        *(f"PROBLEM: {each}" for each in record.problems),
        "passed" if record.passed else "FAILED",
    ]
    return "\n".join(lines)


def _memory(slope: Slope) -> str:
    by_time = "" if slope.mib_per_minute is None else f", {slope.mib_per_minute:+.3f} MiB a minute"
    return (
        f"memory of {slope.kind}: {slope.kib_per_request:+.2f} KiB a request ({slope.num_windows} windows of "
        f"{slope.num_lives} lives){by_time}; at most {slope.most_grown_mib:+.1f} MiB in a life of up to "
        f"{slope.longest_s:.0f} s after it has settled"
    )


def _told(numbers: dict[str, int] | dict[str, float]) -> str:
    return ", ".join(f"{number:g} {what}" for what, number in numbers.items()) or "none"
