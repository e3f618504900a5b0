"""What a drill saw: requests and how they ended, the fleet over time, and the marks the drill itself left.

Pure data with the few words that name an outcome. Times are seconds on one clock of the drill.
Knows nothing about what should have been seen.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# right: complete and as recorded; wrong: text that the healthy fleet does not give; error: an error in OpenAI's shape,
# as a status or as the last event of a stream; lost: neither an answer nor an error came.
Outcome = Literal["right", "wrong", "error", "lost"]
Kind = Literal["background", "canary", "trigger"]


class Sample(msgspec.Struct, frozen=True):
    """One request."""

    kind: Kind
    prompt: int
    sent_s: float
    ended_s: float
    outcome: Outcome
    status: int = 0  # 0: no status line came
    code: str = ""  # of the error
    message: str = ""  # of the error, or how it was lost, or the wrong text
    begun: bool = False  # part of the answer had come
    uncached_tokens: int = 0  # prompt tokens that had to be computed for it
    decision: str = ""
    prefill: str = ""
    decode: str = ""

    @property
    def what(self) -> str:
        """The error as the failure table names it."""
        return self.code or str(self.status or "no answer")


class MemberSeen(msgspec.Struct, frozen=True):
    role: str
    state: str
    incarnation: str
    failures: int
    computed_tokens: int
    held: dict[str, int]  # what it still holds, by gauge; empty when nothing
    received_bytes: int = 0  # of KV from peers


class FleetSeen(msgspec.Struct, frozen=True):
    """One look at the router's fleet page; ``members`` is None when it did not answer."""

    at_s: float
    members: dict[str, MemberSeen] | None
    inflight: int = 0


class Mark(msgspec.Struct, frozen=True):
    """Something the drill did or saw, in words."""

    at_s: float
    what: str


class Story(msgspec.Struct, frozen=True):
    """Everything one scenario left behind."""

    begun_s: float
    fault_s: float | None  # when the fault struck; None: it never did
    samples: list[Sample]
    looks: list[FleetSeen]
    marks: list[Mark]
    whole_s: float | None  # when the fleet was whole again; None: it was not
    left_over: list[str]  # what was still held at the end
    problem: str = ""  # why the scenario could not be carried out to its end
