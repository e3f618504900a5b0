"""What this router sent to one worker: what is left to compute of it, and how much of it came lately.

Workers report how many prompt tokens wait, not what these look at; late tokens of a long prompt take twice as long as
early ones, or more. A worker computes prompts in the order they came, so what is left of the reported tokens is the end
of what was sent. Prompts of other routers count as like ours.

Invariants: bounded by the prompts on their way; every figure is finite and not negative. Time is an argument. Knows
nothing about how long anything takes (``cost``).
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

from kvbaton.types import Role

RECENT_HALF_S = 60.0  # what was sent so long ago counts half: conversations go on within minutes
_DECAY = log(2.0) / RECENT_HALF_S


class Sent:
    __slots__ = ("_as_of_s", "_found_tokens", "_num_pairs", "_num_tokens", "_prompts", "_work_s")

    def __init__(self) -> None:
        self._prompts: dict[object, tuple[int, float, int]] = {}  # tokens, cached ones before them, prompts; in order
        self._num_tokens = 0
        self._num_pairs = 0.0
        self._work_s = 0.0  # seconds of prefill, fading, as of ``_as_of_s``
        self._found_tokens = 0.0  # that were cached, fading
        self._as_of_s = 0.0

    def prompt(
        self, key: object, num_tokens: int, cached_tokens: int, num_prompts: int, now_s: float, work_s: float = 0.0
    ) -> None:
        """``num_tokens`` of a request's prompts are to be computed there, in ``work_s``; the ``cached_tokens`` before
        them are not."""
        self._prompts[key] = (num_tokens, cached_tokens, num_prompts)
        self._num_tokens += num_tokens
        self._num_pairs += _pairs(num_tokens, cached_tokens, num_prompts)
        faded = exp(-_DECAY * max(0.0, now_s - self._as_of_s))
        self._work_s = self._work_s * faded + work_s
        self._found_tokens = self._found_tokens * faded + cached_tokens
        self._as_of_s = max(self._as_of_s, now_s)

    def computed(self, key: object) -> None:
        """They are computed, or never will be. Told twice, the second time says nothing."""
        known = self._prompts.pop(key, None)
        if known is None:
            return
        if not self._prompts:  # so that no rounding piles up
            self._num_tokens, self._num_pairs = 0, 0.0
            return
        self._num_tokens -= known[0]
        self._num_pairs -= _pairs(*known)

    def queued_pairs(self, queued_tokens: int) -> float:
        """What the last ``queued_tokens`` of them look at, summed over these tokens."""
        if not self._num_tokens or not queued_tokens:
            return 0.0
        done = self._num_tokens - queued_tokens
        if done <= 0:
            return max(0.0, self._num_pairs) * queued_tokens / self._num_tokens
        left = self._num_pairs
        for num_tokens, cached_tokens, num_prompts in self._prompts.values():
            part = min(done, num_tokens)
            left -= _pairs(part, cached_tokens, num_prompts)
            done -= part
            if not done:
                break
        return max(0.0, left)

    def _faded(self, now_s: float) -> float:
        """What a second, or a token, that counts here is worth by now, as a rate."""
        return _DECAY * exp(-_DECAY * max(0.0, now_s - self._as_of_s))

    def rates(self, now_s: float) -> tuple[float, float]:
        """``work_share`` and ``found_tokens_per_s``."""
        if not self._work_s and not self._found_tokens:
            return 0.0, 0.0
        faded = self._faded(now_s)
        return self._work_s * faded, self._found_tokens * faded

    def work_share(self, now_s: float) -> float:
        """Seconds of prefill that were sent there per second, lately."""
        return self._work_s * self._faded(now_s) if self._work_s else 0.0

    def found_tokens_per_s(self, now_s: float) -> float:
        """How fast prompts that found their prefix there came lately, in cached tokens."""
        return self._found_tokens * self._faded(now_s) if self._found_tokens else 0.0

    def lost_cache(self) -> None:
        """The worker started over: what was found there is gone."""
        self._found_tokens = 0.0


def _pairs(num_tokens: int, cached_tokens: float, num_prompts: int) -> float:
    return num_tokens * (cached_tokens + num_tokens / 2) / num_prompts


def pool_shares(workers: Iterable[tuple[Role, Sent]], now_s: float) -> dict[Role, float]:
    """Mean ``work_share`` of the workers of each role: what any of them is to expect, whoever had more by chance."""
    sums: dict[Role, tuple[float, int]] = {}
    for role, sent in workers:
        share, count = sums.get(role, (0.0, 0))
        sums[role] = (share + sent.work_share(now_s), count + 1)
    return {role: share / count for role, (share, count) in sums.items()}
