"""The journal of a stream: which token ids its events hold, so that another worker can go on where this one fell.

A worker that is asked for it writes SSE comment lines into its stream, in the block of the event they belong to:

    :0 r            the event of this block names the role of choice 0
    :0 c32          32 tokens of choice 0's prompt were cached
    :0 123          token 123 of choice 0; its text is in this block, or is held back (the block is then only this line)
    :0 123 stop     the same, and choice 0 is complete

Invariants: a block is the unit of everything: who has the text has the line, and the other way round; lines of one
choice are in order; a reader needs no other state than the lines themselves. The router cuts the lines out.
Knows nothing about text or requests.
"""

from __future__ import annotations

from typing import get_args

from kvbaton.types import FinishReason
from kvbaton.workers.protocol import ResumedSequence

_REASONS: dict[bytes, FinishReason] = {reason.encode(): reason for reason in get_args(FinishReason)}


class BadStream(ValueError):
    """What a worker streams makes no sense: it cannot be passed on, nor be continued elsewhere."""


def role_line(index: int) -> bytes:
    return b":%d r\n" % index


def cached_line(index: int, num_tokens: int) -> bytes:
    return b":%d c%d\n" % (index, num_tokens)


def token_line(index: int, token_id: int, finish_reason: FinishReason | None) -> bytes:
    if finish_reason is None:
        return b":%d %d\n" % (index, token_id)
    return b":%d %d %s\n" % (index, token_id, finish_reason.encode())


def read(lines: bytes, num_choices: int) -> tuple[ResumedSequence, ...]:
    """What the client has of each choice. Raises BadStream when the lines make no sense."""
    token_ids: list[list[int]] = [[] for _ in range(num_choices)]
    finish: list[FinishReason | None] = [None] * num_choices
    opened = [False] * num_choices
    cached = [0] * num_choices
    for line in lines.split(b"\n")[:-1]:
        choice, _, what = line.removeprefix(b":").partition(b" ")
        index = _number(choice, line)
        if index >= num_choices or finish[index] is not None:
            raise BadStream(f"a journal of {num_choices} choices cannot go on with {line!r}")
        if what == b"r":
            opened[index] = True
        elif what.startswith(b"c"):
            cached[index] = _number(what[1:], line)
        else:
            token_id, _, reason = what.partition(b" ")
            token_ids[index].append(_number(token_id, line))
            if reason:
                if reason not in _REASONS:
                    raise BadStream(f"no line of a journal: {line!r}")
                finish[index] = _REASONS[reason]
    return tuple(ResumedSequence(tuple(token_ids[i]), finish[i], opened[i], cached[i]) for i in range(num_choices))


def _number(digits: bytes, line: bytes) -> int:
    if not digits.isdigit() or len(digits) > 9:
        raise BadStream(f"no line of a journal: {line[:80]!r}")
    return int(digits)


def split(events: bytes) -> tuple[bytes, bytes]:
    """Whole event blocks, or none, without their journal lines; and those lines."""
    if not events:
        return b"", b""
    if events.startswith(b":") and events.find(b"\n\n") == len(events) - 2:  # the usual case: one block
        return _split_block(events)
    texts, lines = [], []
    for block in events[:-2].split(b"\n\n"):
        text, line = _split_block(block.lstrip(b"\n") + b"\n\n")  # of three newlines one begins the next block
        texts.append(text)
        lines.append(line)
    return b"".join(texts), b"".join(lines)


def _split_block(block: bytes) -> tuple[bytes, bytes]:
    start = 0
    while block.startswith(b":", start):
        start = block.index(b"\n", start) + 1
    rest = block[start:]
    return (b"" if rest == b"\n" else rest), block[:start]
