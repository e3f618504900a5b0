"""The transition table: what it allows, what it refuses, and that the picture in the docs is this table."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.router.lifecycle import (
    OUTCOMES,
    TERMINAL,
    TRANSITIONS,
    Event,
    IllegalTransition,
    Lifecycle,
    State,
    render_markdown,
)

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_good_story() -> None:
    life = Lifecycle()
    for event in (Event.ACCEPT, Event.DISPATCH, Event.RETRY, Event.DISPATCH, Event.FIRST_BYTES, Event.COMPLETE):
        life.on(event)
    assert life.state is State.DONE and life.outcome == "ok" and life.num_attempts == 2


def test_one_retry_and_none_after_the_first_bytes() -> None:
    life = Lifecycle()
    for event in (Event.ACCEPT, Event.DISPATCH, Event.RETRY, Event.DISPATCH):
        life.on(event)
    assert not life.may_retry
    with pytest.raises(IllegalTransition, match="received -accept-> admitted -dispatch-> dispatched -retry->"):
        life.on(Event.RETRY)
    streaming = Lifecycle()
    for event in (Event.ACCEPT, Event.DISPATCH, Event.FIRST_BYTES):
        streaming.on(event)
    with pytest.raises(IllegalTransition):
        streaming.on(Event.RETRY)
    assert streaming.state is State.STREAMING


@settings(deadline=None)
@given(st.lists(st.sampled_from(list(Event)), max_size=30))
def test_any_sequence_of_events_keeps_the_invariants(events: list[Event]) -> None:
    life = Lifecycle()
    for event in events:
        before, history = life.state, list(life.history)
        try:
            life.on(event)
        except IllegalTransition:
            assert (life.state, life.history) == (before, history)
        else:
            assert before not in TERMINAL and TRANSITIONS[before, event] is life.state
        assert life.num_attempts <= 2
        assert life.ended == (life.state in TERMINAL)


def test_every_state_is_reached_and_every_end_has_an_outcome() -> None:
    reached = {State.RECEIVED, *TRANSITIONS.values()}
    assert reached == set(State)
    assert set(OUTCOMES) == set(TERMINAL)
    assert all((state, Event.CLIENT_GONE) in TRANSITIONS for state in State if state not in TERMINAL)


def test_the_docs_are_generated_from_the_table() -> None:
    assert (DOCS / "lifecycle.md").read_text() == render_markdown()
