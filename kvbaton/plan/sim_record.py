"""What the simulation remembers: one record for each request, and all gaps between tokens.

Knows nothing about how requests are served.
"""

from __future__ import annotations

from collections import defaultdict

from kvbaton.router.lifecycle import Lifecycle


class GapHistogram:
    """Gaps between consecutive tokens of one request, with counts. Equal gaps share an entry."""

    def __init__(self) -> None:
        self.counts: dict[float, int] = defaultdict(int)

    def add(self, gap_s: float, count: int) -> None:
        if count:
            self.counts[gap_s] += count

    def percentile(self, share: float) -> float:
        """The smallest gap that at least ``share`` of all gaps do not exceed; 0 when there are none."""
        total = sum(self.counts.values())
        seen = 0
        for gap_s in sorted(self.counts):
            seen += self.counts[gap_s]
            if seen >= share * total:
                return gap_s
        return 0.0


class Record:
    """One request on its way through the simulated fleet."""

    __slots__ = (
        "arrival_s", "attempt", "cached_tokens", "decode", "exposed_s", "finish_s", "first_token_s", "have_tokens",
        "hashes", "last_token_s", "lifecycle", "max_gap_s", "output_tokens", "prefill", "prefill_failed",
        "prompt_tokens", "ready_s", "reason", "replayed_tokens", "request_id", "tried", "wire_bytes",
    )  # fmt: skip

    def __init__(self, request_id: str, arrival_s: float, prompt_tokens: int, output_tokens: int,
                 hashes: list[bytes]) -> None:  # fmt: skip
        self.request_id = request_id
        self.arrival_s = arrival_s
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hashes = hashes  # of the full blocks of the prompt
        self.lifecycle = Lifecycle()
        self.attempt = 0
        self.tried: set[str] = set()
        self.reason = ""
        self.prefill: str | None = None
        self.replayed_tokens = 0  # of the output, that a worker which was lost had generated: prompt to the next one
        self.prefill_failed = False  # the last attempt was given up because its prefill worker was lost
        self.decode: str | None = None
        self.first_token_s: float | None = None
        self.last_token_s = arrival_s
        self.finish_s: float | None = None
        self.max_gap_s = 0.0
        self.cached_tokens = 0
        self.have_tokens = 0  # on the decode side, before the hand-off
        self.ready_s = 0.0  # when the last byte sent so far has arrived
        self.wire_bytes = 0
        self.exposed_s = 0.0

    def got_token(self, now_s: float, gaps: GapHistogram) -> None:
        """One token, not from a decode batch (the first one, or the first after a preemption)."""
        if self.first_token_s is None:
            self.first_token_s = now_s
        else:
            gap_s = now_s - self.last_token_s
            gaps.add(gap_s, 1)
            self.max_gap_s = max(self.max_gap_s, gap_s)
        self.last_token_s = now_s

    @property
    def to_prefill(self) -> int:
        """Tokens that the present attempt has to have in a cache before it generates."""
        return self.prompt_tokens + self.replayed_tokens

    @property
    def to_generate(self) -> int:
        return self.output_tokens - self.replayed_tokens

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap after the first token; None for a single token."""
        if self.finish_s is None or self.first_token_s is None or self.output_tokens < 2:
            return None
        return (self.finish_s - self.first_token_s) / (self.output_tokens - 1)
