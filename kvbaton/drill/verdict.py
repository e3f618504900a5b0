"""From what a scenario left behind to pass or fail, with the numbers and the reasons.

A scenario passes when its fault struck, no answer was wrong, no request was lost, every error is one that the failure
table foresees for it, service and fleet recovered, and nothing is held afterwards. Pure.
Knows nothing about how faults are made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kvbaton.drill.samples import FleetSeen, MemberSeen, Sample, Story


class Promise(msgspec.Struct, frozen=True):
    """What may happen to clients while it lasts. ``errors`` are codes or statuses; everything else is a failure."""

    text: str
    errors: tuple[str, ...] = ()
    may_break: bool = False  # connections may break without a word: the router itself goes away
    recover_s: float = 60.0  # service must be back by then


class Result(msgspec.Struct, frozen=True):
    name: str
    run: int
    seed: str
    passed: bool
    reasons: list[str]  # why not; empty when it passed
    requests: int
    right: int
    wrong: int
    lost: int
    errors: dict[str, int]
    detect_s: float | None  # fault to the first sign of it on the fleet page
    recover_s: float | None  # fault to the first right canary after which nothing failed
    whole_s: float | None  # fault to every worker back
    wasted_tokens: int  # prompt tokens computed whose KV served no answer
    computed_tokens: int
    slowest_s: float  # the longest request
    left_over: list[str]
    evidence: list[str]
    skipped: str = ""  # why it could not be rehearsed here
    moved_bytes: int = 0  # of KV, from worker to worker


def skipped(name: str, run: int, seed: str, why: str) -> Result:
    return Result(
        name, run, seed, True, [], 0, 0, 0, 0, {}, None, None, None, 0, 0, 0.0, [], [], skipped=why
    )  # fmt: skip


def judge(name: str, run: int, seed: str, promise: Promise, story: Story, patience: float = 1.0) -> Result:
    promise = msgspec.structs.replace(promise, recover_s=promise.recover_s * patience)
    samples = story.samples
    ends = Counter(sample.outcome for sample in samples)
    errors = Counter(sample.what for sample in samples if sample.outcome == "error")
    recover_s = recovered_after_s(story)
    computed = computed_tokens(story.looks)
    used = sum(sample.uncached_tokens for sample in samples)
    return Result(
        name=name,
        run=run,
        seed=seed,
        passed=not (reasons := failures(promise, story, recover_s)),
        reasons=reasons,
        requests=len(samples),
        right=ends["right"],
        wrong=ends["wrong"],
        lost=ends["lost"],
        errors=dict(sorted(errors.items())),
        detect_s=detected_after_s(story),
        recover_s=recover_s,
        whole_s=_since(story, story.whole_s),
        wasted_tokens=max(0, computed - used),
        computed_tokens=computed,
        slowest_s=round(max((sample.ended_s - sample.sent_s for sample in samples), default=0.0), 3),
        left_over=story.left_over,
        evidence=[f"{mark.at_s - story.begun_s:7.2f} s  {mark.what}" for mark in story.marks],
        moved_bytes=moved_bytes(story.looks),
    )


def failures(promise: Promise, story: Story, recover_s: float | None) -> list[str]:
    """Every reason not to pass, in words."""
    found = [story.problem] if story.problem else []
    if story.fault_s is None:
        return [*found, "the fault did not strike"]
    for sample in story.samples:
        if sample.outcome == "wrong":
            found.append(f"wrong answer to prompt {sample.prompt}: {sample.message[:120]}")
        elif sample.outcome == "lost" and not (promise.may_break and _spans(sample, story)):
            found.append(f"lost a {sample.kind} request, sent {_at(sample, story)}: {sample.message[:120]}")
        elif sample.outcome == "error" and not {sample.code, str(sample.status)} & set(promise.errors):
            found.append(f"error {sample.what} to a {sample.kind} request, sent {_at(sample, story)}: {sample.message}")
    if not any(sample.kind == "canary" and sample.outcome == "right" for sample in story.samples):
        found.append("no canary was right")
    if recover_s is None:
        found.append("service did not recover")
    elif recover_s > promise.recover_s:
        found.append(f"service recovered after {recover_s:.1f} s; {promise.recover_s:g} s are allowed")
    if story.whole_s is None:
        found.append("the fleet was not whole at the end")
    return found + [f"left over: {what}" for what in story.left_over]


def _at(sample: Sample, story: Story) -> str:
    assert story.fault_s is not None
    return f"{sample.sent_s - story.fault_s:+.2f} s from the fault"


def _spans(sample: Sample, story: Story) -> bool:
    """Whether the request was under way while the fault lasted."""
    assert story.fault_s is not None
    return sample.ended_s >= story.fault_s and (story.whole_s is None or sample.sent_s <= story.whole_s)


def recovered_after_s(story: Story) -> float | None:
    """To the end of the first right canary that was sent after the fault and after which no request failed."""
    if story.fault_s is None:
        return None
    failed_s = [s.ended_s for s in story.samples if s.outcome != "right" and s.ended_s >= story.fault_s]
    after_s = max([story.fault_s, *failed_s])
    ends_s = [s.ended_s for s in story.samples if s.kind == "canary" and s.outcome == "right" and s.sent_s >= after_s]
    # A canary that overlaps with the last failure proves as much when it ended right after it.
    ends_s += [
        s.ended_s
        for s in story.samples
        if s.kind == "canary" and s.outcome == "right" and story.fault_s <= s.sent_s < after_s <= s.ended_s
    ]
    return _since(story, min(ends_s, default=None))


def detected_after_s(story: Story) -> float | None:
    """To the first look that shows a member in another state or life, a failed call, or no router."""
    if story.fault_s is None:
        return None
    before = next((look for look in reversed(story.looks) if look.at_s <= story.fault_s and look.members), None)
    if before is None:
        return None
    for look in story.looks:
        if look.at_s > story.fault_s and _differs(before, look):
            return _since(story, look.at_s)
    return None


def _differs(before: FleetSeen, now: FleetSeen) -> bool:
    assert before.members is not None
    if now.members is None or set(now.members) != set(before.members):
        return True
    return any(
        (member.state, member.incarnation, member.failures, member.role)
        != (before.members[name].state, before.members[name].incarnation, before.members[name].failures,
            before.members[name].role)
        for name, member in now.members.items()
    )  # fmt: skip


def computed_tokens(looks: Sequence[FleetSeen]) -> int:
    """Prompt tokens computed by all workers, each life by itself. A life that ends counts up to its last look."""
    return _grown(looks, lambda member: member.computed_tokens)


def moved_bytes(looks: Sequence[FleetSeen]) -> int:
    """Of KV that workers got from others, by their own count; lives as above."""
    return _grown(looks, lambda member: member.received_bytes)


def _grown(looks: Sequence[FleetSeen], total: Callable[[MemberSeen], int]) -> int:
    first: dict[tuple[str, str], int] = {}
    last: dict[tuple[str, str], int] = {}
    known: set[str] = set()
    for look in looks:
        for name, member in (look.members or {}).items():
            life = (name, member.incarnation)
            if life not in first:
                # The first life of a name began before the drill looked; a later one began at zero.
                first[life] = 0 if name in known else total(member)
                known.add(name)
            last[life] = total(member)
    return sum(last[life] - first[life] for life in last)


def _since(story: Story, at_s: float | None) -> float | None:
    return None if at_s is None or story.fault_s is None else round(max(0.0, at_s - story.fault_s), 3)
