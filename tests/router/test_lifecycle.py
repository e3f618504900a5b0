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
    streaming = Lifecycle(max_replays=0)
    for event in (Event.ACCEPT, Event.DISPATCH, Event.FIRST_BYTES):
        streaming.on(event)
    with pytest.raises(IllegalTransition):
        streaming.on(Event.RETRY)
    with pytest.raises(IllegalTransition):
        streaming.on(Event.RESUME)
    assert streaming.state is State.STREAMING


def test_a_stream_is_continued_a_bounded_number_of_times() -> None:
    life = Lifecycle(max_replays=2)
    for event in (Event.ACCEPT, Event.DISPATCH, Event.FIRST_BYTES, Event.RESUME, Event.DISPATCH, Event.DEFER):
        life.on(event)
    assert life.state is State.RESUMING and life.num_replays == 1, "waiting for room is not another replay"
    for event in (Event.DISPATCH, Event.RESUME, Event.DISPATCH, Event.FIRST_BYTES):
        life.on(event)
    assert life.state is State.STREAMING and not life.may_resume
    with pytest.raises(IllegalTransition):
        life.on(Event.RESUME)
    life.on(Event.FAIL)
    assert life.state is State.BROKEN


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
        assert life.num_replays <= 2
        assert life.num_attempts <= 2 + life.num_replays
        assert life.ended == (life.state in TERMINAL)


def test_every_state_is_reached_and_every_end_has_an_outcome() -> None:
    reached = {State.RECEIVED, *TRANSITIONS.values()}
    assert reached == set(State)
    assert set(OUTCOMES) == set(TERMINAL)
    assert all((state, Event.CLIENT_GONE) in TRANSITIONS for state in State if state not in TERMINAL)


def test_the_docs_are_generated_from_the_table() -> None:
    assert (DOCS / "lifecycle.md").read_text() == render_markdown()
