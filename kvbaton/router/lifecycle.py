"""The life of one request in the router: a transition table and nothing else.

Invariants: an event that the table does not allow in a state raises, leaves the state unchanged, and tells the story so
far; after the first byte of a stream nothing starts over: it is continued by a replay, or it ends; attempts and replays
are bounded; every terminal state is final.
Knows nothing about sockets, clocks or workers. docs/lifecycle.md is generated from ``TRANSITIONS``.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    __hash__ = str.__hash__  # not in Python: a request's events are looked up by it

    RECEIVED = "received"  # the request line and headers are here
    ADMITTED = "admitted"  # parsed, tokenized, within every limit; it may wait for room
    DISPATCHED = "dispatched"  # a worker has it; nothing was sent to the client yet
    RETRYING = "retrying"  # the attempt failed and another worker will be asked
    STREAMING = "streaming"  # the first bytes of a stream are with the client
    RESUMING = "resuming"  # its worker failed in the middle; another one will be asked to go on
    REPLAYING = "replaying"  # another worker has the prompt and what was generated; nothing of its own came yet
    DONE = "done"
    REJECTED = "rejected"  # refused by us or by a worker, with the client's fault or for want of room
    FAILED = "failed"  # answered with a 5xx
    BROKEN = "broken"  # the stream ended with an error event
    CANCELLED = "cancelled"  # the client went away


class Event(StrEnum):
    __hash__ = str.__hash__

    ACCEPT = "accept"
    REFUSE = "refuse"
    DISPATCH = "dispatch"
    RETRY = "retry"
    DEFER = "defer"
    FIRST_BYTES = "first_bytes"
    RESUME = "resume"
    COMPLETE = "complete"
    FAIL = "fail"
    CLIENT_GONE = "client_gone"


S, E = State, Event
TRANSITIONS: dict[tuple[State, Event], State] = {
    (S.RECEIVED, E.ACCEPT): S.ADMITTED,
    (S.RECEIVED, E.REFUSE): S.REJECTED,
    (S.RECEIVED, E.FAIL): S.FAILED,
    (S.RECEIVED, E.CLIENT_GONE): S.CANCELLED,
    (S.ADMITTED, E.DISPATCH): S.DISPATCHED,
    (S.ADMITTED, E.REFUSE): S.REJECTED,
    (S.ADMITTED, E.FAIL): S.FAILED,
    (S.ADMITTED, E.CLIENT_GONE): S.CANCELLED,
    (S.DISPATCHED, E.FIRST_BYTES): S.STREAMING,
    (S.DISPATCHED, E.COMPLETE): S.DONE,
    (S.DISPATCHED, E.RETRY): S.RETRYING,
    (S.DISPATCHED, E.DEFER): S.ADMITTED,
    (S.DISPATCHED, E.REFUSE): S.REJECTED,
    (S.DISPATCHED, E.FAIL): S.FAILED,
    (S.DISPATCHED, E.CLIENT_GONE): S.CANCELLED,
    (S.RETRYING, E.DISPATCH): S.DISPATCHED,
    (S.RETRYING, E.REFUSE): S.REJECTED,
    (S.RETRYING, E.FAIL): S.FAILED,
    (S.RETRYING, E.CLIENT_GONE): S.CANCELLED,
    (S.STREAMING, E.COMPLETE): S.DONE,
    (S.STREAMING, E.RESUME): S.RESUMING,
    (S.STREAMING, E.FAIL): S.BROKEN,
    (S.STREAMING, E.CLIENT_GONE): S.CANCELLED,
    (S.RESUMING, E.DISPATCH): S.REPLAYING,
    (S.RESUMING, E.FAIL): S.BROKEN,
    (S.RESUMING, E.CLIENT_GONE): S.CANCELLED,
    (S.REPLAYING, E.FIRST_BYTES): S.STREAMING,
    (S.REPLAYING, E.COMPLETE): S.DONE,
    (S.REPLAYING, E.RESUME): S.RESUMING,
    (S.REPLAYING, E.DEFER): S.RESUMING,
    (S.REPLAYING, E.FAIL): S.BROKEN,
    (S.REPLAYING, E.CLIENT_GONE): S.CANCELLED,
}
TERMINAL = frozenset(State) - {state for state, _ in TRANSITIONS}
# what the request counter calls each end
OUTCOMES = {
    S.DONE: "ok",
    S.REJECTED: "rejected",
    S.FAILED: "error",
    S.BROKEN: "error",
    S.CANCELLED: "cancelled",
}


class IllegalTransition(AssertionError):
    """A bug in the shell: an event that cannot happen in this state."""


class Lifecycle:
    """State and history of one request: one retry before the first byte, ``max_replays`` replays after it."""

    def __init__(self, max_attempts: int = 2, max_replays: int = 2) -> None:
        self.state = State.RECEIVED
        self.history: list[tuple[State, Event]] = []
        self.num_attempts = 0
        self.num_replays = 0
        self._max_attempts = max_attempts
        self._max_replays = max_replays

    def on(self, event: Event) -> State:
        following = TRANSITIONS.get((self.state, event))
        spent = (event is Event.RETRY and not self.may_retry) or (event is Event.RESUME and not self.may_resume)
        if following is None or spent:
            story = " ".join(f"{state} -{happened}->" for state, happened in self.history)
            raise IllegalTransition(f"{event} cannot happen in {story} {self.state}")
        self.history.append((self.state, event))
        self.state = following
        if event is Event.DISPATCH:
            self.num_attempts += 1
        elif event is Event.DEFER:  # nothing went wrong: it was only too early
            self.num_attempts -= 1
        elif event is Event.RESUME:
            self.num_replays += 1
        return following

    @property
    def may_retry(self) -> bool:
        return self.state is State.DISPATCHED and self.num_attempts < self._max_attempts

    @property
    def may_resume(self) -> bool:
        return self.state in (State.STREAMING, State.REPLAYING) and self.replays_left

    @property
    def replays_left(self) -> bool:
        return self.num_replays < self._max_replays

    @property
    def states(self) -> list[State]:
        """All it has been in, the present one last."""
        return [*[state for state, _ in self.history], self.state]

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def outcome(self) -> str:
        return OUTCOMES[self.state]


def render_markdown() -> str:
    """docs/lifecycle.md."""
    lines = [
        "# The life of a request in the router",
        "",
        "Generated from `kvbaton/router/lifecycle.py`; a test compares the two. An event that is not drawn raises.",
        "`retry` happens at most once, and never after the first bytes of a stream went to the client. From then on",
        "`resume` continues the stream on another worker, which is given the prompt and what was generated so far; at",
        "most `max_replays` times, and never when the client asked for no replay. `defer` is no failure: no worker had",
        "room, and the request waits for its next turn. Who retries what, and what the client sees, is in",
        "[failures.md](failures.md).",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> received",
    ]
    lines += [f"    {state} --> {following}: {event}" for (state, event), following in TRANSITIONS.items()]
    lines += [f"    {state} --> [*]" for state in State if state in TERMINAL]
    return "\n".join([*lines, "```"]) + "\n"
