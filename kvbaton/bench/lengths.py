"""How long prompts and answers are: fixed, or drawn from a distribution named in one word.

Knows nothing about text or time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from kvbaton.types import LocalError

CLASSES_HELP = "INPUT:OUTPUT@SHARE,INPUT:OUTPUT@SHARE"
HELP = "N | uniform:LOW:HIGH | normal:MEAN:SD | lognormal:MEDIAN:SIGMA | exp:MEAN | mix:N@SHARE,N@SHARE"
Draw = Callable[[Random], int]
DrawPair = Callable[[Random], tuple[int, int]]


def parse_lengths(text: str, field: str) -> Draw:
    """A sampler of lengths of at least 1 token; LocalError names the field."""
    kind, _, rest = text.partition(":")
    try:
        if not rest:
            return _fixed(int(kind))
        if kind == "mix":
            return _mix(rest)
        numbers = [float(part) for part in rest.split(":")]
        return _distribution(kind, numbers)
    except ValueError as error:
        raise LocalError(f"cannot read {text!r}: {error}", field=field, fix=f"use {HELP}") from error


def parse_classes(text: str) -> DrawPair:
    """A sampler of (prompt tokens, output tokens) that belong together, for traffic of several kinds."""
    try:
        lengths, shares = _shared(text, "a class is INPUT:OUTPUT@SHARE, and classes are separated by commas")
        pairs = [(int(input_), int(output)) for input_, output in (each.split(":") for each in lengths)]
        if min(min(pair) for pair in pairs) < 1:
            raise ValueError("a length is at least 1")
    except ValueError as error:
        raise LocalError(f"cannot read {text!r}: {error}", field="classes", fix=f"use {CLASSES_HELP}") from error
    return lambda random: random.choices(pairs, weights=shares)[0]


def _shared(text: str, form: str) -> tuple[list[str], list[float]]:
    """What stands before and behind the @ of each part."""
    parts = [part.split("@") for part in text.split(",")]
    if any(len(part) != 2 for part in parts):
        raise ValueError(form)
    shares = [float(share) for _, share in parts]
    if not all(0 <= share < math.inf for share in shares) or sum(shares) <= 0:
        raise ValueError("shares are not negative, and one is above 0")
    return [what for what, _ in parts], shares


def _fixed(value: int) -> Draw:
    if value < 1:
        raise ValueError("a length is at least 1")
    return lambda random: value


def _distribution(kind: str, numbers: list[float]) -> Draw:
    match kind, numbers:
        case "uniform", [low, high] if 1 <= low <= high:
            return lambda random: random.randint(int(low), int(high))
        case "normal", [mean, deviation] if mean >= 1 and deviation >= 0:
            return lambda random: max(1, round(random.gauss(mean, deviation)))
        case "lognormal", [median, sigma] if median >= 1 and sigma >= 0:
            return lambda random: max(1, round(median * math.exp(random.gauss(0.0, sigma))))
        case "exp", [mean] if mean >= 1:
            return lambda random: max(1, round(random.expovariate(1.0 / mean)))
        case _:
            raise ValueError("unknown distribution, or numbers out of range")


def _mix(rest: str) -> Draw:
    texts, shares = _shared(rest, "a mix is LENGTH@SHARE, separated by commas")
    lengths = [int(length) for length in texts]
    if min(lengths) < 1:
        raise ValueError("a length is at least 1")
    return lambda random: random.choices(lengths, weights=shares)[0]
