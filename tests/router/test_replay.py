"""What the next worker is told of a stream that broke."""

from __future__ import annotations

import pytest

from kvbaton.router.policy import RequestView
from kvbaton.router.replay import Journal, continue_behind
from kvbaton.workers import journal
from kvbaton.workers.protocol import InternalRequest, ResumedSequence

INTERNAL = InternalRequest("r", ((1,) * 10, (2,) * 20), journal=True, created_s=7)
VIEW = RequestView(num_prompt_tokens=30, num_prompts=2, longest_prompt_tokens=20, max_total_tokens=60)


def test_the_journal_keeps_lines_and_passes_text() -> None:
    kept = Journal()
    assert kept.take(journal.role_line(0) + b"data: {}\n\n" + journal.token_line(0, 5, None) + b"\n") == b"data: {}\n\n"
    assert kept.take(journal.token_line(0, 6, "stop") + b"data: {}\n\n") == b"data: {}\n\n"
    assert kept.read(2) == (ResumedSequence((5, 6), "stop", True), ResumedSequence())
    kept.clear()
    assert kept.read(2) == (ResumedSequence(), ResumedSequence())


def test_what_is_complete_is_not_generated_again() -> None:
    had = (
        ResumedSequence((9,) * 4),
        ResumedSequence((9,) * 8, "length"),
        ResumedSequence(),
        ResumedSequence((9,) * 3),
    )
    rest = continue_behind(had, INTERNAL, VIEW)
    assert rest.internal.resume == had and rest.internal.prompt_token_ids == INTERNAL.prompt_token_ids
    assert rest.internal.created_s == 7
    assert rest.num_sequences == 3 and rest.num_replayed_tokens == 7
    assert rest.view.num_prompt_tokens == 14 + 20 + 23 and rest.view.longest_prompt_tokens == 23
    assert rest.view.max_total_tokens == 60, "the whole does not grow"


def test_when_only_the_end_is_missing_there_is_nothing_to_compute() -> None:
    had = (ResumedSequence((9,), "stop"),) * 2
    rest = continue_behind(had, INTERNAL, VIEW)
    assert (rest.num_sequences, rest.num_replayed_tokens, rest.view.num_prompt_tokens) == (1, 0, 1)


def test_a_journal_of_other_choices_is_an_error() -> None:
    kept = Journal()
    kept.take(journal.token_line(5, 1, None) + b"\n")
    with pytest.raises(ValueError, match="2 choices"):
        kept.read(2)
