"""Alert rules for Prometheus, each with the paragraph that whoever is woken reads.

Invariants: an alert fires on something an operator can act upon, names what users feel, and stays silent without
traffic; docs/runbooks.md is generated from the same table. Knows nothing about where Prometheus runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from kvbaton.deploy.queries import (
    Gauge,
    decode_free_share,
    fallback_share,
    prefill_queue_delay_s,
    prompt_output_ratio,
    quantile,
    rate,
    series,
)
from kvbaton.types import LocalError

Severity = Literal["page", "ticket"]


class Gates(msgspec.Struct, frozen=True):
    """What the alerts are measured against."""

    ttft_s: float = 1.0
    tpot_s: float = 0.05
    ratio_low: float | None = None  # planned band of computed prompt tokens for each output token
    ratio_high: float | None = None
    transfer_share: float = 0.25  # of the TTFT gate that moving KV may take
    window: str = "5m"
    hold: str = "5m"  # how long a condition must last; two scrapes at the least
    ratio_window: str = "30m"  # the mix of traffic changes all the time: only what lasts is worth another plan
    ratio_hold: str = "15m"

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s", "transfer_share"):
            if not getattr(self, name) > 0:
                raise LocalError(f"{name} must be above 0", field=name)
        if (self.ratio_low is None) != (self.ratio_high is None):
            raise LocalError("a band has two ends", field="ratio_low", fix="give ratio_low and ratio_high, or neither")
        if self.ratio_low is not None and self.ratio_high is not None and not 0 <= self.ratio_low < self.ratio_high:
            raise LocalError("the low end of the band must be below the high end", field="ratio_low")


@dataclass(frozen=True)
class Alert:
    name: str
    expr: str
    severity: Severity
    summary: str
    runbook: str
    hold: str = ""  # instead of the gates' own


def alerts(gates: Gates) -> tuple[Alert, ...]:
    """Every alert, most urgent first."""
    return (*_what_users_feel(gates), *_hand_off(gates), *_pools(gates), *_members(gates))


def _what_users_feel(gates: Gates) -> tuple[Alert, ...]:
    window = gates.window
    return (
        Alert(
            "KvbatonWrongTokens",
            f"sum(increase({series('kvbaton_router_canary_total', result='wrong')}[1h])) > 0",
            "page",
            "A canary prompt got another answer than the one recorded when the fleet was healthy.",
            "Greedy answers to fixed prompts must not change while the weights do not. Look at the canary's log line: "
            "it names the workers. If only remote answers differ, the hand-off is at fault: set `--disagg-percent 0` "
            "(every request stays on one pool), keep the workers running for inspection, and compare their "
            "fingerprints with `kvbaton verify`. If both arms differ, a worker runs other weights or a broken kernel: "
            "drain it.",
            hold="0m",
        ),
        Alert(
            "KvbatonTTFTAboveGate",
            f"{quantile(0.95, 'kvbaton_router_ttft_seconds', window)} > {gates.ttft_s:g}",
            "page",
            f"p95 TTFT is above {gates.ttft_s:g} s.",
            "Split it by decision on the dashboard. Only `remote` slow: look at prefill queue delay and exposed "
            "transfer. Only `local_*` slow: decode workers prefill too much. All slow: the router's queue or the "
            "machines. The autoscaler adds prefill workers on queue delay; if it stands at its maximum, the plan no "
            "longer fits.",
        ),
        Alert(
            "KvbatonTPOTAboveGate",
            f"{quantile(0.95, 'kvbaton_router_tpot_seconds', window)} > {gates.tpot_s:g}",
            "page",
            f"p95 TPOT is above {gates.tpot_s:g} s.",
            "Decode batches are too large or share their steps with prompts. Look at running sequences per decode "
            "worker and at the share of `local_*` decisions: long prompts prefilled where others decode lengthen "
            "every gap. Add a decode worker, or let more prompts go remote.",
        ),
        Alert(
            "KvbatonBrokenStreams",
            f"{rate('kvbaton_router_broken_streams_total', window)} > 0",
            "page",
            "Streams end with an error after their first token.",
            "A worker died in mid-stream and no other could continue, or clients asked for no replay. See the "
            "restarts of members and the workers' logs; docs/failures.md tells what each failure looks like to a "
            "client.",
            hold="1m",
        ),
        Alert(
            "KvbatonRequestsRefused",
            f"({rate('kvbaton_router_requests_total', window, outcome='rejected', decision='none')} or vector(0)) "
            f"> 0.05 * {rate('kvbaton_router_requests_total', window)}",
            "ticket",
            "More than 5% of requests are refused before any worker was asked.",
            "Either clients send what cannot be served (400, see the log) or there is no room (429, 503). For the "
            "latter look at queued requests and at which pool is full.",
        ),
    )


def _hand_off(gates: Gates) -> tuple[Alert, ...]:
    window = gates.window
    bound_s = gates.transfer_share * gates.ttft_s
    return (
        Alert(
            "KvbatonTransferEatsTTFT",
            f"{quantile(0.99, 'kvbaton_worker_exposed_transfer_seconds', window)} > {bound_s:g}",
            "page",
            f"p99 of the exposed KV transfer is above {bound_s:g} s, {gates.transfer_share:.0%} of the TTFT gate.",
            "The KV arrives well after the first token. Measure the pair with `kvbaton link`: below its nominal rate, "
            "a link is shared or degraded, or a pair fell back from shared memory or RDMA to TCP (its log says so). "
            "At its nominal rate, prompts have outgrown it: raise the threshold, keep pairs on one fabric, or use an "
            "8-bit KV cache.",
        ),
        Alert(
            "KvbatonLeasesExpire",
            f"sum(increase({series('kvbaton_worker_lease_expiries_total')}[{window}])) > 0",
            "ticket",
            "Offered KV was freed because its reader showed no sign of life.",
            "A decode worker died, hung, or could not reach the prefill worker while it held a lease. A few at a "
            "worker's death are normal. A steady trickle means a one-way partition or a decode worker that stalls for "
            "longer than the lease.",
            hold="0m",
        ),
        Alert(
            "KvbatonTransfersFail",
            f"{rate('kvbaton_worker_transfer_failures_total', window)} "
            f"> 0.01 * {rate('kvbaton_worker_transfers_total', window)}",
            "ticket",
            "More than 1% of hand-offs fail.",
            "The decode workers' logs name the peer and the cause: refused (fingerprints differ: somebody rolled out "
            "half), unreachable (network policy, ports), corrupt (checksum: take the host out), lease lost.",
        ),
        Alert(
            "KvbatonFallbackRate",
            f"{fallback_share(window)} > 0.05",
            "ticket",
            "More than 5% of decisions fall back from what the policy wanted.",
            "The label `decision` tells which way: `fallback_no_prefill` (the pool is gone or draining), "
            "`fallback_prefill_failed` (hand-offs break), `fallback_no_decode` (prefill workers serve whole "
            "requests). The service holds, without the benefit of the split.",
        ),
    )


def _pools(gates: Gates) -> tuple[Alert, ...]:
    window = gates.window
    delay = prefill_queue_delay_s(window)
    queued = series("kvbaton_router_queued_requests")
    waiting = Gauge("kvbaton_worker_waiting_prompt_tokens", "prefill")
    found = [
        Alert(
            "KvbatonPrefillStarvesDecode",
            f"({delay} > {gates.ttft_s / 2:g}) and on() ({decode_free_share()} > 0.5)",
            "ticket",
            "Prompts queue for prefill while the decode pool has room.",
            "Prefill is the bottleneck: half the TTFT gate goes into its queue. Move a worker over "
            "(`kvbaton fleet role`), let the autoscaler grow the pool, or raise the threshold so that decode workers "
            "take short prompts.",
        ),
        Alert(
            "KvbatonDecodeStarvesPrefill",
            f"(sum({queued}) > 0) and on() ({decode_free_share()} < 0.1) and on() ({waiting} == 0)",
            "ticket",
            "Requests wait for room on the decode pool while the prefill pool is idle.",
            "Decode is the bottleneck: more prefill would change nothing. Add decode workers, or move one over. Long "
            "outputs or a jump in concurrency do this; see the ratio of prompt to output tokens.",
        ),
        Alert(
            "KvbatonQueueStands",
            f"min_over_time({queued}[{window}]) > 0",
            "page",
            "Requests have been waiting for room without a pause.",
            "Demand is above what the fleet can take. Clients get 429 when the queue is full. See which pool is full, "
            "and whether the autoscaler is at its maximum.",
        ),
    ]
    if gates.ratio_low is not None and gates.ratio_high is not None:
        ratio = prompt_output_ratio(gates.ratio_window)
        found.append(
            Alert(
                "KvbatonRatioDrift",
                f"({ratio} < {gates.ratio_low:g}) or ({ratio} > {gates.ratio_high:g})",
                "ticket",
                f"Computed prompt tokens per output token left the planned band, {gates.ratio_low:g} to "
                f"{gates.ratio_high:g}.",
                "The pools were sized for another mix. Above the band prefill is short, below it decode is. Write a "
                "new scenario from the live rates, run `kvbaton plan` on it, and apply its pools.",
                hold=gates.ratio_hold,
            )
        )
    return tuple(found)


def _members(gates: Gates) -> tuple[Alert, ...]:
    return (
        Alert(
            "KvbatonPoolGone",
            f"sum by (role) ({series('kvbaton_router_member_up')}) == 0",
            "page",
            "No worker of the pool {{ $labels.role }} takes requests.",
            "`GET /fleet` on the router gives the reason for each member. All of a pool at once is rarely the workers: "
            "look for a rollout with a wrong image, an internal key that differs, or a network policy.",
            hold="1m",
        ),
        Alert(
            "KvbatonWorkerRestarts",
            f"sum by (member) (increase({series('kvbaton_router_member_restarts_total')}[30m])) > 2",
            "ticket",
            "{{ $labels.member }} restarted more than twice in half an hour.",
            "Its last log lines tell why. Out of memory: less KV memory or a smaller batch. An illegal instruction: "
            "the image was built for another processor.",
            hold="0m",
        ),
        Alert(
            "KvbatonEngineStepsFail",
            f"{rate('kvbaton_worker_failed_steps_total', gates.window)} > 0",
            "page",
            "Engine steps fail.",
            "Each failed step ends its requests with an error. The worker's log has the exception. Drain the worker "
            "if it goes on.",
            hold="1m",
        ),
        Alert(
            "KvbatonPreemptions",
            f"{rate('kvbaton_worker_preemptions_total', gates.window, role='decode')} > 0.1",
            "ticket",
            "Decode workers put sequences back because KV blocks run out.",
            "Preempted sequences are computed again, prompt included, on a worker that should only decode. Give the "
            "pool more KV memory, lower its batch limit, or add a worker.",
        ),
    )


def render_rules(gates: Gates) -> dict[str, object]:
    """The rule file, before it is written as YAML."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.expr,
            "for": alert.hold or gates.hold,
            "labels": {"severity": alert.severity, "service": "kvbaton"},
            "annotations": {
                "summary": alert.summary,
                "description": alert.runbook,
                "runbook": f"docs/runbooks.md#{alert.name.lower()}",
            },
        }
        for alert in alerts(gates)
    ]
    return {"groups": [{"name": "kvbaton", "rules": rules}]}


def render_runbooks() -> str:
    """docs/runbooks.md, for the default gates and an example band."""
    gates = Gates(ratio_low=4.0, ratio_high=16.0)
    lines = [
        "# Runbooks",
        "",
        "Generated from `kvbaton/deploy/rules.py`; a test compares the two. The numbers are those of the default gates",
        "and of an example band; `kvbaton deploy` writes the rules with yours.",
    ]
    for alert in alerts(gates):
        lines += ["", f"## {alert.name}", "", f"*{alert.severity}.* {alert.summary}", "", alert.runbook]
        lines += ["", "```promql", alert.expr, "```"]
    return "\n".join(lines) + "\n"
