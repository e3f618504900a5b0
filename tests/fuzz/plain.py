"""Without guidance: the same inputs for the same seed, and every place where a target breaks, once.

For the default tests, and for finding many faults in one run, where a guided fuzzer stops at the first.
"""

from __future__ import annotations

import itertools
import traceback
from dataclasses import dataclass
from pathlib import Path

from .target import Run, Target, inputs


@dataclass(frozen=True)
class Find:
    """One way to break a target."""

    where: str  # exception and line
    data: bytes
    story: str

    def __str__(self) -> str:
        return f"{self.where} by {self.data[:200]!r}\n{self.story}"


def try_inputs(target: Target, run: Run, number: int, seed: int) -> list[Find]:
    finds: dict[str, Find] = {}
    for data in itertools.islice(inputs(target, seed), number):
        found = try_one(run, data)
        if found is not None:
            finds.setdefault(found.where, found)
    return list(finds.values())


def try_one(run: Run, data: bytes) -> Find | None:
    try:
        run(data)
    except (Exception, SystemExit) as error:
        return _find(error, data)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library in Rust; it is no Exception
            raise
        return _find(error, data)
    return None


def _find(error: BaseException, data: bytes) -> Find:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/kvbaton/" in frame.filename] or list(frames)
    where = f"{type(error).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}"
    return Find(where, data, "".join(traceback.format_exception(error))[-3000:])
