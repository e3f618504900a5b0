"""What happened in a run, in order: kept as plain values, made into text only when somebody reads it."""

from __future__ import annotations

from collections.abc import Callable


class Violation(AssertionError):
    """An invariant does not hold."""


class Story:
    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lines: list[tuple[float, str, tuple[object, ...]]] = []

    def tell(self, text: str, *values: object) -> None:
        self._lines.append((self._now_s(), text, values))

    def __len__(self) -> int:
        return len(self._lines)

    def lines(self) -> list[str]:
        return [f"{at_s:9.4f}  {text.format(*values)}" for at_s, text, values in self._lines]
