"""What a fuzzer runs: one parser of outside bytes, with examples and a way to change them.

A target's ``run`` takes any bytes and returns when they were read or refused as they should be; whatever it raises is a
find. Its ``prepare`` builds it once, so that imports can be instrumented and temporary files have a place.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

import msgspec

from .shapes import as_json, as_msgpack, changed, changed_bytes, changed_lines

Run = Callable[[bytes], None]
Form = Literal["bytes", "json", "msgpack", "jsonl", "lines", "call"]


@dataclass(frozen=True)
class Target:
    name: str
    prepare: Callable[[Path], Run]  # given a folder of its own
    seeds: Callable[[], list[bytes]]
    form: Form = "bytes"
    share: float = 1.0  # of all inputs, beside the others' shares
    words: tuple[bytes, ...] = ()  # that mean something to the parser

    def change(self, data: bytes, rng: Random) -> bytes:
        """Half of the time a well-formed document that is wrong somewhere, else bytes."""
        if self.form == "bytes" or rng.random() < 0.4:
            return changed_bytes(data, rng, self.words)
        if self.form == "call":  # a line, and a document behind it
            line, _, body = data.partition(b"\n")
            if rng.random() < 0.2:
                line = changed_bytes(line, rng, self.words)
            return line + b"\n" + _changed_json(body, rng)
        if self.form in ("jsonl", "lines"):
            one = _changed_json if self.form == "jsonl" else self._changed_line
            return changed_lines(data, rng, one)
        return _changed_json(data, rng) if self.form == "json" else _changed_msgpack(data, rng)

    def _changed_line(self, line: bytes, rng: Random) -> bytes:
        fields = line.split(b",")
        fields[rng.randrange(len(fields))] = rng.choice((b"", b"-1", b"nan", b"1e400", b"\0", b'"', b"9" * 30, b"a"))
        return b",".join(fields) if rng.random() < 0.6 else changed_bytes(line, rng, self.words)


def _changed_json(data: bytes, rng: Random) -> bytes:
    try:
        document: Any = json.loads(data)
    except (ValueError, RecursionError):
        return changed_bytes(data, rng)
    return as_json(changed(document, rng))


def _changed_msgpack(data: bytes, rng: Random) -> bytes:
    try:
        document: Any = msgspec.msgpack.decode(data)
    except (ValueError, RecursionError, msgspec.MsgspecError):
        return changed_bytes(data, rng)
    return as_msgpack(changed(document, rng))


def inputs(target: Target, seed: int) -> Any:
    """Its examples, then changes of them and of their changes, without end."""
    rng, known = Random(f"{target.name}-{seed}"), target.seeds()
    yield from known
    while True:
        data = target.change(rng.choice(known), rng)
        if len(data) <= 1 << 16 and rng.random() < 0.05:
            if len(known) < 400:
                known.append(data)
            else:
                known[rng.randrange(len(known))] = data
        yield data
