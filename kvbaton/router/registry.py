"""The workers a router knows: who they are, whether they take requests, and how busy they are.

Invariants: one owner of this state, the router's event loop; what a request holds of a worker is given back when its
``Hold`` is closed, on whatever path; a worker that restarted (a new incarnation) is a new one, and nothing remembered
of the old one is kept. Knows nothing about how workers are asked (``monitor``) or which one is chosen (``policy``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self
from urllib.parse import urlsplit

from kvbaton.config import MemberSettings
from kvbaton.kv.compat import blocking, differences
from kvbaton.observe.metrics import Metrics
from kvbaton.router.learning import Learning
from kvbaton.router.measured import Measured
from kvbaton.router.policy import Decision
from kvbaton.router.prefix_index import PrefixIndex, PromptChains
from kvbaton.router.sent import Sent
from kvbaton.router.views import MemberView
from kvbaton.types import LocalError, Role
from kvbaton.workers.protocol import CONTROL_VERSION, PeerAddress, WorkerInfo

MemberState = Literal["unknown", "up", "draining", "down", "mismatch"]


@dataclass
class Reported:
    """What the worker said last, and what this router had on it at that moment."""

    info: WorkerInfo
    own_sequences: int
    own_tokens: int


@dataclass(eq=False)
class Member:
    settings: MemberSettings
    state: MemberState = "unknown"
    reason: str = "not asked yet"  # why it is in this state, in words
    reported: Reported | None = None  # None until the first answer
    own_requests: int = 0
    own_sequences: int = 0
    own_tokens: int = 0  # prompt tokens sent here whose first token has not come back
    sent: Sent = field(default_factory=Sent)
    num_dispatched: int = 0
    num_failures: int = 0
    quarantined_until_s: float = 0.0
    failures_in_row: int = 0
    holds: set[Hold] = field(default_factory=set)
    expected: dict[Hold, float] = field(default_factory=dict)  # when a first token is due at the latest, oldest first
    held_back: str = ""  # why an operator keeps requests away from it; empty: nobody does

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def role(self) -> Role:
        """What the fleet file says, unless the worker was told another role while it runs."""
        info = self.reported.info if self.reported is not None else None
        return info.role if info is not None and info.role_changes else self.settings.role

    @property
    def serves_alone(self) -> bool:
        return self.reported is None or self.reported.info.serves_alone

    @property
    def prompts_on_the_way(self) -> bool:
        """Whether a prompt was sent here whose first token has not come back."""
        return any(hold.num_tokens for hold in self.holds)

    def overdue_s(self, now_s: float) -> float:
        """By how much the oldest prompt on its way is later than it should be: what hangs tells nothing else."""
        for due_s in self.expected.values():
            return max(0.0, now_s - due_s)
        return 0.0

    @property
    def num_requests(self) -> int:
        """Reported sequences, corrected by what this router sent and got back since the report."""
        if self.reported is None:
            return self.own_sequences
        return max(0, self.reported.info.stats.num_active + self.own_sequences - self.reported.own_sequences)

    @property
    def queued_tokens(self) -> int:
        if self.reported is None:
            return self.own_tokens
        return max(0, self.reported.info.stats.waiting_prompt_tokens + self.own_tokens - self.reported.own_tokens)


@dataclass(eq=False, slots=True)
class Hold:
    """What one attempt of one request occupies on one worker. ``release`` it, or leave its ``with``."""

    member: Member
    num_sequences: int
    num_tokens: int

    def first_token(self) -> None:
        """The prompt is computed: it no longer waits there."""
        member = self.member
        if member.expected:
            member.expected.pop(self, None)
        member.sent.computed(self)
        member.own_tokens -= self.num_tokens
        self.num_tokens = 0

    def release(self) -> None:
        member = self.member
        assert self in member.holds, "released twice"
        member.holds.discard(self)
        self.first_token()
        member.own_requests -= 1
        member.own_sequences -= self.num_sequences

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


# A failed call keeps a worker out this long (doubling, up to the last) unless it answers a poll; so one bad answer
# never blacklists a worker for good.
QUARANTINE_S = (0.5, 1.0, 2.0, 4.0)


class Registry:
    def __init__(
        self,
        settings: Sequence[MemberSettings],
        model_name: str,
        index: PrefixIndex,
        metrics: Metrics,
        learning: Learning | None = None,
    ) -> None:
        self._model_name = model_name
        self._index = index
        self._metrics = metrics
        self.measured = Measured(learning or Learning(), metrics)
        self._looked_s = 0.0  # when it was last asked for views
        self._members: dict[str, Member] = {}
        self.set_members(settings)

    @property
    def members(self) -> list[Member]:
        return list(self._members.values())

    def get(self, name: str) -> Member | None:
        return self._members.get(name)

    def set_members(self, settings: Sequence[MemberSettings]) -> None:
        """The fleet is now these. Workers that stay keep their state; one at a new address starts over."""
        names = [s.name for s in settings]
        if len(set(names)) != len(names) or not all(names):
            raise LocalError("every worker needs a name of its own", field="workers.name")
        for name in set(self._members) - set(names):
            self._forget(self._members.pop(name))
        for item in settings:
            known = self._members.get(item.name)
            if known is not None and (known.settings.url, known.role) == (item.url, item.role):
                known.settings = item  # the same worker, at most reached by another way or told another role
            else:
                if known is not None:
                    self._forget(known)
                self._members[item.name] = Member(item)

    def _forget(self, member: Member) -> None:
        self._index.forget(member.name)
        self.measured.forget(member.name)
        self._forget_gauges(member.name, member.role)
        self._index.forget_metrics(self._metrics, member.name)

    def _forget_gauges(self, name: str, role: Role) -> None:
        for metric in ("kvbaton_router_member_up", "kvbaton_router_member_inflight_requests"):
            self._metrics.forget(metric, name, role)

    def hold_back(self, member: Member, why: str) -> None:
        """From now on nothing new goes there, whatever it says of itself."""
        member.held_back = why
        if member.state == "up":
            member.state, member.reason = "draining", why

    def let_go(self, member: Member) -> None:
        """Requests may go there again, once it answers a poll."""
        member.held_back = ""

    # -- what was seen of a worker -------------------------------------------------------------------------------

    def answered(self, member: Member, info: WorkerInfo) -> None:
        """A poll came back."""
        previous, previous_role = member.reported, member.role
        if previous is not None and previous.info.incarnation != info.incarnation:
            self._index.forget(member.name)
            member.sent.lost_cache()
            self._metrics.add("kvbaton_router_member_restarts_total", member.name)
        self.measured.polled(member.name, previous.info if previous is not None else None, info, self._looked_s)
        cache_tokens = info.stats.num_blocks * info.block_size
        self._index.heard_of(member.name, info.incarnation, info.block_size, info.kv_events, cache_tokens)
        member.reported = Reported(info, member.own_sequences, member.own_tokens)
        member.failures_in_row = 0
        member.quarantined_until_s = 0.0
        if member.role != previous_role:
            self._forget_gauges(member.name, previous_role)
        if abs(info.control_version - CONTROL_VERSION) > 1:
            said = f"it speaks version {info.control_version} of the control API, this router {CONTROL_VERSION}"
            member.state, member.reason = "mismatch", f"{said}: upgrade one version at a time"
        elif info.role != member.role:
            member.state, member.reason = "mismatch", f"it says its role is {info.role}, not {member.role}"
        elif info.model_id != self._model_name:
            member.state, member.reason = "mismatch", f"it serves {info.model_id}, not {self._model_name}"
        elif info.state == "serving" and member.held_back:
            member.state, member.reason = "draining", member.held_back
        elif info.state == "serving":
            member.state, member.reason = "up", self._unfit(member, info) or "answers"
        elif info.state == "disconnected":
            member.state, member.reason = "down", "its engine's server refuses connections"
        else:
            member.state, member.reason = "draining", f"says it is {info.state}"

    def _unfit(self, member: Member, info: WorkerInfo) -> str:
        """Whose KV is of no use to it, or its to whom; empty where all fits. Every hand-off there would fail."""
        for other in self._members.values():
            if other.reported is None or other.state != "up" or {member.role, other.role} != {"prefill", "decode"}:
                continue
            theirs = other.reported.info.fingerprint
            if theirs != info.fingerprint and (found := blocking(differences(info.fingerprint, theirs))):
                fields = "; ".join(f"{one.field} {one.ours}, there {one.theirs}" for one in found)
                return f"answers, but no KV fits between it and {other.name}: {fields}"
        return ""

    def poll_failed(self, member: Member, cause: str, unreachable: bool) -> None:
        """One lost poll may be a hiccup; a refused connection or two in a row mean it is down."""
        member.failures_in_row += 1
        self._metrics.add("kvbaton_router_member_failures_total", member.name, "poll")
        if unreachable or member.failures_in_row >= 2:
            member.state, member.reason = "down", cause

    def call_failed(self, member: Member, cause: str, now_s: float, unreachable: bool = False) -> None:
        """A request failed there. It is left out for a while, or until it answers a poll."""
        member.num_failures += 1
        member.failures_in_row += 1
        wait_s = QUARANTINE_S[min(member.failures_in_row, len(QUARANTINE_S)) - 1]
        member.quarantined_until_s = now_s + wait_s
        self._metrics.add("kvbaton_router_member_failures_total", member.name, cause)
        if unreachable:
            member.state, member.reason = "down", "a call could not reach it"

    def says_draining(self, member: Member) -> None:
        if member.state == "up":
            member.state, member.reason = "draining", "refused a request because it drains"

    # -- what the policy sees ------------------------------------------------------------------------------------

    @property
    def has_prefill_pool(self) -> bool:
        return "prefill" in [member.role for member in self._members.values()]

    def usable(self, now_s: float, excluded: frozenset[str] = frozenset()) -> list[Member]:
        """Workers that take requests. If every one of a role is only quarantined, better those than none."""
        up = [m for m in self._members.values() if m.state == "up"]
        if excluded:
            up = [m for m in up if m.name not in excluded]
        for member in up:
            if member.quarantined_until_s > now_s:
                break
        else:
            return up
        calm = [m for m in up if m.quarantined_until_s <= now_s]
        roles = {m.role for m in calm}
        return calm + [m for m in up if m not in calm and m.role not in roles]

    def cached_tokens(self, prompts: PromptChains) -> dict[str, int]:
        """Of these prompts, on each worker, by the prefix index. Asked before the routing itself changes the index."""
        return self._index.cached_tokens(prompts, self._members)

    def chain_sizes(self) -> set[int]:
        return self._index.chain_sizes()

    def prefix_index_state(self, member: Member) -> dict[str, object]:
        return {"trust": self._index.trust(member.name), "num_blocks": self._index.num_blocks(member.name)}

    def another_answers(self, now_s: float, excluded: frozenset[str]) -> bool:
        """Whether a worker that answers is left and was not tried, and one to prefill for it where it needs that."""
        left = self.usable(now_s, excluded)
        answering = [member for member in left if member.role != "prefill"]
        if any(member.serves_alone for member in answering):
            return True
        return bool(answering) and len(answering) < len(left)

    def views(
        self, cached_tokens: Mapping[str, int], now_s: float, excluded: frozenset[str] = frozenset()
    ) -> list[MemberView]:
        self._looked_s = now_s
        found: list[tuple[Member, Role, float]] = []
        shares: dict[Role, tuple[float, int]] = {}  # of a pool: what any of it is to expect, whoever had more by chance
        for member in self.usable(now_s, excluded):
            if member.reported is None:
                continue
            role, (share, reused) = member.role, member.sent.rates(now_s)
            total, count = shares.get(role, (0.0, 0))
            shares[role] = (total + share, count + 1)
            found.append((member, role, reused))
        busy = {role: total / count for role, (total, count) in shares.items()}
        return [
            _view(member, role, cached_tokens.get(member.settings.name, 0), now_s, busy[role], reused)
            for member, role, reused in found
        ]

    @property
    def max_context(self) -> int:
        """The longest sequence any worker that decodes can hold; 0 when none was heard of."""
        longest = only_prefills = 0
        for member in self._members.values():
            if member.reported is None or member.state not in ("up", "draining"):
                continue
            max_context = member.reported.info.max_context
            if member.role != "prefill":
                longest = max(longest, max_context)
            else:
                only_prefills = max(only_prefills, max_context)
        return longest or only_prefills

    def hold(
        self,
        member: Member,
        num_sequences: int,
        num_tokens: int,
        due_s: float | None = None,
        decision: Decision | None = None,
    ) -> Hold:
        """Account for one attempt on ``member`` until it is released: ``num_tokens`` of its prompts are computed there,
        as ``decision`` foretold. ``due_s``: when its first token is overdue."""
        hold = Hold(member, num_sequences, num_tokens)
        if due_s is not None:
            member.expected[hold] = due_s
        member.own_requests += 1
        member.own_sequences += num_sequences
        member.own_tokens += num_tokens
        if num_tokens and decision is not None:
            work_s, num_prompts = decision.terms.get("prefill_s", 0.0), decision.case.request.num_prompts
            cached_tokens = decision.foretold_cached_tokens
            member.sent.prompt(hold, num_tokens, cached_tokens, num_prompts, self._looked_s, work_s)
        member.num_dispatched += 1
        member.holds.add(hold)
        return hold

    def peer_address(self, member: Member) -> PeerAddress:
        """Where decode workers reach this prefill worker's hand-off server."""
        assert member.reported is not None
        info = member.reported.info
        if member.settings.kv_address:
            host, _, port = member.settings.kv_address.rpartition(":")
            return PeerAddress(host.strip("[]"), int(port))
        return PeerAddress(info.kv_host or urlsplit(member.settings.url).hostname or "", info.kv_port)

    def export(self) -> None:
        """Bring the gauges up to date, before a scrape."""
        self.measured.export(self._looked_s)
        for member in self._members.values():
            labels = (member.name, member.role)
            self._metrics.set("kvbaton_router_member_up", *labels, value=1.0 if member.state == "up" else 0.0)
            self._metrics.set("kvbaton_router_member_inflight_requests", *labels, value=member.own_requests)
            self._index.export(self._metrics, member.name)

    def check(self) -> None:
        """What is held agrees with what is counted; nothing is negative."""
        for member in self._members.values():
            assert member.own_requests == len(member.holds)
            assert member.own_sequences == sum(h.num_sequences for h in member.holds)
            assert member.own_tokens == sum(h.num_tokens for h in member.holds)


def _view(
    member: Member, role: Role, cached_tokens: int, now_s: float, pool_busy: float, reused_tokens_per_s: float
) -> MemberView:
    reported = member.reported
    assert reported is not None
    info = reported.info
    stats = info.stats
    # As the properties of the same names say it; this runs for every worker in every decision.
    num_requests = stats.num_active + member.own_sequences - reported.own_sequences
    queued_tokens = stats.waiting_prompt_tokens + member.own_tokens - reported.own_tokens
    queued_tokens = queued_tokens if queued_tokens > 0 else 0
    return MemberView(
        member.settings.name,
        role,
        num_requests if num_requests > 0 else 0,
        queued_tokens,
        info.max_context,
        cached_tokens,
        stats.num_blocks_used * info.block_size,
        stats.num_blocks_free * info.block_size if stats.num_blocks else None,
        info.chunk_tokens,
        info.max_running,
        member.overdue_s(now_s) if member.expected else 0.0,
        member.sent.queued_pairs(queued_tokens) if queued_tokens else 0.0,
        pool_busy,
        reused_tokens_per_s,
        info.serves_alone,
    )
