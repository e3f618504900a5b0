"""A decision as it is kept in the log, and its replay.

A record has what the decision was made from, as far as the placements it keeps need it, every term of those, and the
result. Invariants: a record replays to the same result and to the same terms, bit for bit; it is bounded, however large
the fleet is: the best ``MOST_KEPT`` placements are kept, with at least the best local and the best remote one. Of a
small fleet the log keeps only what they follow from (``brief``), and who reads it (``read_record``) finds them again.
Pure; knows nothing about logs or tables.
"""

from __future__ import annotations

import heapq

import msgspec

from kvbaton.router.cost import Candidate, FleetCosts
from kvbaton.router.policy import Arm, Case, Decision, NoWorker, PolicyConfig, Reason, candidates, decide_case, in_turn
from kvbaton.router.views import MemberView, RequestView
from kvbaton.types import UNREADABLE, LocalError

MOST_KEPT = 8
RECORD_VERSION = 2  # 1 was decided without what comes later, and cannot be replayed


class Placement(msgspec.Struct, frozen=True):
    """One placement that was compared, with all its terms."""

    prefill: str | None
    decode: str
    terms: dict[str, float]


class _Known(msgspec.Struct, frozen=True, kw_only=True):
    """All of a record but the parameters it was decided by."""

    version: int = RECORD_VERSION
    reason: Reason
    decode: str
    prefill: str | None
    arm: Arm
    terms: dict[str, float]
    placements: list[Placement]  # the best first
    num_placements: int  # that were compared
    request: RequestView
    members: list[MemberView]
    config: PolicyConfig
    has_prefill_pool: bool
    prefill_failed: bool
    turn: int = 0  # the members are in an order that makes it 0, or as they were


class Record(_Known, frozen=True, kw_only=True):
    costs: FleetCosts


class Brief(_Known, frozen=True, kw_only=True):
    """A record for a log, with the parameters as they are written there."""

    costs: msgspec.Raw


class _Written:
    """Parameters as JSON. They stay the same over many requests, and are a third of a record."""

    def __init__(self) -> None:
        self._encoder = msgspec.json.Encoder()
        self._costs = FleetCosts()
        self._raw = msgspec.Raw(self._encoder.encode(self._costs))

    def of(self, costs: FleetCosts) -> msgspec.Raw:
        if costs is not self._costs:
            self._costs, self._raw = costs, msgspec.Raw(self._encoder.encode(costs))
        return self._raw


_WRITTEN = _Written()


class Replay(msgspec.Struct, frozen=True):
    record: Record
    decision: Decision | None  # None: nobody could take it
    differences: list[str]

    @property
    def agrees(self) -> bool:
        return not self.differences


def record(decision: Decision) -> Record:
    case = decision.case
    here, away = candidates(case)
    kept = _best(here, away)
    members = in_turn(case)
    terms = decision.terms
    if kept:
        names = {name for each in kept for name in (each.prefill, each.decode)}
        chosen = [m for m in members if m.name in names]
    else:
        chosen = _best_by_rule(decision, members)
        names = {m.name for m in chosen}
        terms = {key: value for key, value in terms.items() if ":" not in key or key.partition(":")[2] in names}
    if all(m.role != "prefill" for m in chosen):  # why there was no remote placement may hang on who was there
        chosen += [m for m in members if m.role == "prefill"][:1]
    if all(m.role != "decode" for m in chosen):  # and one that serves not alone was compared in no local placement
        chosen += [m for m in members if m.role == "decode" and not m.serves_alone][:1]
    return Record(
        reason=decision.reason,
        decode=decision.decode,
        prefill=decision.prefill,
        arm=decision.arm,
        terms=terms,
        placements=[Placement(each.prefill, each.decode, each.terms) for each in kept],
        num_placements=len(here) + len(away),
        request=case.request,
        members=chosen,
        config=case.config,
        has_prefill_pool=case.has_prefill_pool,
        prefill_failed=case.prefill_failed,
        costs=_costs_of(case.costs, {m.name for m in chosen}),
    )


def brief(decision: Decision) -> Record | Brief:
    """The record without its placements, where all they were made from is kept: a router makes one for each request."""
    case = decision.case
    if len(case.members) > MOST_KEPT or len(case.costs.workers) > MOST_KEPT or not case.config.by_cost:
        return record(decision)
    return Brief(
        reason=decision.reason,
        decode=decision.decode,
        prefill=decision.prefill,
        arm=decision.arm,
        terms=decision.terms,
        placements=[],
        num_placements=0,
        request=case.request,
        members=list(case.members),
        config=case.config,
        has_prefill_pool=case.has_prefill_pool,
        prefill_failed=case.prefill_failed,
        costs=_WRITTEN.of(case.costs),
        turn=case.turn,
    )


def _whole(known: Record) -> Record:
    """With the placements that a brief record leaves out."""
    if known.placements or not known.config.by_cost:
        return known
    try:
        here, away = candidates(_case_of(known))
    except NoWorker:  # replaying it tells
        return known
    placements = [Placement(each.prefill, each.decode, each.terms) for each in _best(here, away)]
    return msgspec.structs.replace(known, placements=placements, num_placements=len(here) + len(away))


def _case_of(known: Record) -> Case:
    return Case(
        known.request,
        tuple(known.members),
        known.config,
        known.turn,
        known.has_prefill_pool,
        known.prefill_failed,
        known.costs,
    )


def replay(known: Record) -> Replay:
    """Decide again from the record alone, and compare."""
    case = _case_of(known)
    try:
        decision = decide_case(case)
        kept = _best(*candidates(case))
    except NoWorker:
        return Replay(known, None, ["nobody in the record can take the request"])
    differences = [
        f"{name}: recorded {getattr(known, name)!r}, replayed {getattr(decision, name)!r}"
        for name in ("reason", "prefill", "decode", "arm")
        if getattr(known, name) != getattr(decision, name)
    ]
    differences += _unequal("decision", known.terms, decision.terms)
    found = {(each.prefill, each.decode): each.terms for each in kept}
    for placement in known.placements:
        name = place_name(placement.prefill, placement.decode)
        terms = found.get((placement.prefill, placement.decode))
        differences += [f"{name}: not among the best"] if terms is None else _unequal(name, placement.terms, terms)
    return Replay(known, decision, differences)


def read_record(raw: bytes) -> Record:
    """From a line of the router's log, or from the record in it."""
    try:
        line = msgspec.json.decode(raw)
        if isinstance(line, dict) and "route" in line:
            line = line["route"]
        known = msgspec.convert(line, Record)
    except UNREADABLE as error:
        fix = 'give a line of the router\'s log with "message": "request", or its `route` object'
        raise LocalError(f"this is no record of a decision: {error}", field="record", fix=fix) from None
    if known.version != RECORD_VERSION:
        raise LocalError(f"the record has version {known.version}, not {RECORD_VERSION}", field="record.version")
    return _whole(known)


def place_name(prefill: str | None, decode: str) -> str:
    return decode if prefill is None else f"{prefill} > {decode}"


def _best(here: list[Candidate], away: list[Candidate]) -> list[Candidate]:
    """The best of all, and at least the best of either kind; the best first, and among equals the first."""
    firsts = [min(each, key=_rank) for each in (here, away) if each]
    kept = heapq.nsmallest(MOST_KEPT, [*here, *away], key=_rank)
    missing = [each for each in firsts if each not in kept]
    return sorted(kept[: MOST_KEPT - len(missing)] + missing, key=_rank)


def _rank(candidate: Candidate) -> tuple[float, float]:
    return candidate.rank


def _best_by_rule(decision: Decision, members: list[MemberView]) -> list[MemberView]:
    kept = {decision.decode, decision.prefill}
    for label in ("local", "prefill", "decode"):
        scored = [(key, value) for key, value in decision.terms.items() if key.startswith(label + ":")]
        kept |= {key.partition(":")[2] for key, _ in heapq.nsmallest(MOST_KEPT, scored, key=lambda item: item[1])}
    return [m for m in members if m.name in kept]


def _costs_of(costs: FleetCosts, names: set[str]) -> FleetCosts:
    links = {
        prefill: {decode: link for decode, link in known.items() if decode in names}
        for prefill, known in costs.links.items()
        if prefill in names
    }
    workers = {name: cost for name, cost in costs.workers.items() if name in names}
    return msgspec.structs.replace(costs, workers=workers, links=links)


def _unequal(what: str, recorded: dict[str, float], replayed: dict[str, float]) -> list[str]:
    return [
        f"{what}, {name}: recorded {recorded.get(name)}, replayed {replayed.get(name)}"
        for name in sorted(recorded.keys() | replayed.keys())
        if recorded.get(name) != replayed.get(name)
    ]
