"""A transition table and the one way to walk it.

Invariants: an event that has no row raises ``IllegalEvent`` and changes nothing; a row says which states it may lead
to, and leading elsewhere is a bug that fails at once; the table is also the documentation.

Pure. Knows nothing about what the states mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class IllegalEvent(Exception):
    """An event the protocol cannot produce in this state: a bug, or a peer that does not follow the protocol."""


@dataclass(frozen=True)
class Row:
    """What an event does in a state: ``act`` updates the session and returns actions. ``why`` is for the reader."""

    act: Callable[[Any, Any], list[Any]]
    to: tuple[Enum, ...]
    why: str


Table = Mapping[tuple[Enum, type], Row]


def walk(session: Any, table: Table, event: Any) -> list[Any]:
    """Take one step of ``session`` (anything with ``state`` and ``story``)."""
    before = session.state
    row = table.get((before, type(event)))
    if row is None:
        raise IllegalEvent(f"{event!r} in state {before.value} after {', '.join(session.story) or 'nothing'}")
    actions = row.act(session, event)
    assert session.state in row.to, f"{type(event).__name__}: {before.value} led to {session.state.value}"
    session.story.append(f"{type(event).__name__}->{session.state.value}")
    return actions


def rows(states: tuple[Enum, ...], event: type, row: Row) -> dict[tuple[Enum, type], Row]:
    """The same row for several states. ``to`` empty means: each state leads to itself."""
    return {(state, event): row if row.to else Row(row.act, (state,), row.why) for state in states}


def markdown(table: Table) -> str:
    """The table as the documentation shows it."""
    lines = ["| state | event | leads to | why |", "|---|---|---|---|"]
    lines += [
        f"| {state.value} | {event.__name__} | {', '.join(to.value for to in row.to)} | {row.why} |"
        for (state, event), row in table.items()
    ]
    return "\n".join(lines)
