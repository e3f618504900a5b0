"""When a broken stream goes on elsewhere, and what the next worker is told.

The worker's stream carries a journal of token ids (see ``workers.journal``). The router keeps its lines unread as they
come; only when the stream breaks are they read, and the next worker gets the prompt with what the client has.

Invariants: a line is kept if and only if the text of its block was passed on or is still held back by the worker, so
nothing is sent twice and nothing is left out; a stream any part of which came without journal is never continued.
Pure: knows nothing about sockets or clocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from kvbaton.workers import journal
from kvbaton.workers.protocol import InternalRequest, ResumedSequence

if TYPE_CHECKING:
    from kvbaton.router.policy import RequestView

# Errors inside a stream that speak of the worker, of its peer or of its load. All others would come again elsewhere.
REPLAYABLE = frozenset({"prefill_failed", "no_capacity", "draining", "internal_error"})


class Journal:
    """What the client has of one stream."""

    def __init__(self) -> None:
        self._lines = bytearray()
        self.complete = True  # no part without lines was passed on

    def take(self, events: bytes) -> bytes:
        """Keep the lines; the rest is for the client, and may be nothing."""
        events, lines = journal.split(events)
        self._lines += lines
        return events

    def clear(self) -> None:
        """Nothing was passed on: the next attempt begins from the prompt."""
        self._lines.clear()
        self.complete = True

    def read(self, num_choices: int) -> tuple[ResumedSequence, ...]:
        return journal.read(bytes(self._lines), num_choices)


@dataclass(frozen=True)
class Continuation:
    """The rest of a request, as the next worker and the policy see it."""

    internal: InternalRequest
    view: RequestView
    num_sequences: int  # still to be generated
    num_replayed_tokens: int  # computed before, to be computed or found in a cache again


def continue_behind(resumed: tuple[ResumedSequence, ...], internal: InternalRequest, view: RequestView) -> Continuation:
    """``internal`` and ``view`` are those of the whole request."""
    prompts = internal.prompt_token_ids
    num_choices = len(resumed) // len(prompts)
    lengths = [
        len(prompts[i // num_choices]) + len(choice.token_ids)
        for i, choice in enumerate(resumed)
        if choice.finish_reason is None
    ]
    left = lengths or [1]  # every choice is complete: only the end of the stream is missing
    return Continuation(
        internal=msgspec.structs.replace(internal, resume=resumed),
        view=msgspec.structs.replace(
            view, num_prompt_tokens=sum(left), num_prompts=len(left), longest_prompt_tokens=max(left)
        ),
        num_sequences=len(left),
        num_replayed_tokens=sum(len(c.token_ids) for c in resumed if c.finish_reason is None),
    )
