"""What a stream's journal says is what the next worker is told; the rest of the bytes pass unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.workers import journal
from kvbaton.workers.protocol import ResumedSequence

TEXT = b'data: {"choices":[{"text":": \\n\\n :0 5"}]}\n\n'
BLOCKS = [
    (journal.role_line(1) + TEXT, TEXT),
    (journal.cached_line(0, 32) + journal.token_line(0, 7, None) + TEXT, TEXT),
    (journal.token_line(1, 300, None) + b"\n", b""),  # its text is held back
    (journal.token_line(0, 8, "stop") + TEXT, TEXT),
    (TEXT, TEXT),
    (b"data: [DONE]\n\n", b"data: [DONE]\n\n"),
]


@given(st.integers(0, len(BLOCKS)), st.integers(0, len(BLOCKS)))
def test_however_blocks_arrive_together_lines_and_events_part(start: int, stop: int) -> None:
    parts = BLOCKS[start:stop]
    events, lines = journal.split(b"".join(block for block, _ in parts))
    assert events == b"".join(text for _, text in parts)
    assert b"".join(block for block, _ in parts).count(b"\n:") <= lines.count(b":")
    if (start, stop) == (0, len(BLOCKS)):
        assert journal.read(lines, 2) == (
            ResumedSequence((7, 8), "stop", False, 32),
            ResumedSequence((300,), None, True, 0),
        )


def test_nothing_is_nothing() -> None:
    assert journal.split(b"") == (b"", b"")
    assert journal.read(b"", 2) == (ResumedSequence(), ResumedSequence())


@pytest.mark.parametrize("lines", [b":2 5\n", b":-1 5\n", b":0 5 stop\n:0 6\n", b":x 5\n", b":0 y\n"])
def test_what_makes_no_sense_is_an_error(lines: bytes) -> None:
    with pytest.raises(ValueError):
        journal.read(lines, 2)
