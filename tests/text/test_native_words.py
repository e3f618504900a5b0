"""Words in native memory: what is read is what was learned, whatever stands between; and token ids as JSON."""

from __future__ import annotations

import json
import random
from array import array

import pytest

from kvbaton.text import native_words
from kvbaton.text.native_words import MAX_WORD_BYTES, NativeWords, ids_as_json

needs_library = pytest.mark.skipif(NativeWords.of(1) is None, reason="the native memory of words was not built")


def memory(max_words: int = 1000) -> NativeWords:
    words = NativeWords.of(max_words)
    assert words is not None
    return words


def by_hand(text: str, known: dict[str, list[int]]) -> list[int | str]:
    """Ids and unknown stretches as ``read`` may tell them, one after the other."""
    told: list[int | str] = []
    unknown, joined = "", True  # the first word follows no space
    for number, piece in enumerate(text.split(" ")):
        if not joined and piece in known:
            told += [unknown] if unknown else []
            told += known[piece]
            unknown = ""
            continue
        unknown += (" " if number else "") + piece
        joined = not piece or piece[-1].isspace() or not piece[-1].isascii()
    return told + ([unknown] if unknown else [])


def as_told(words: NativeWords, text: str) -> list[int | str]:
    told: list[int | str] = []
    for ids, unknown in words.read(text.encode()):
        told += ids.tolist()
        if unknown:
            told.append(unknown)
    return told


@needs_library
@pytest.mark.parametrize("slice_bytes", [1, 7, 64, 64 * 1024])
def test_reading_finds_what_was_learned_and_tells_the_rest(slice_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_words, "SLICE_BYTES", slice_bytes)
    monkeypatch.setattr(native_words, "MAX_GAPS", 3)
    rng = random.Random(11)
    words, known = memory(), dict[str, list[int]]()
    for _ in range(300):
        word = "".join(rng.choices("abcé漢.,\u00a0", k=rng.randrange(1, 5)))
        if word not in known and not word[-1].isspace():
            known[word] = [rng.randrange(2**31) for _ in range(rng.randrange(1, len(word.encode()) + 2))]
            words.learn(word, known[word])
    for _ in range(400):
        pieces = rng.choices([*known, "unknown", "", "\n", "x\t", "y\u3000", "\x1c"], k=rng.randrange(0, 40))
        text = " ".join(pieces)
        assert as_told(words, text) == by_hand(text, known), repr(text)


@needs_library
def test_of_more_words_than_it_keeps_those_stay_that_are_met() -> None:
    words = memory(50)
    for number in range(1000):
        words.learn(f"w{number}", [number])
        assert as_told(words, ". w0") == [".", 0], "met again and again"
    assert as_told(words, ". w999") == [".", 999]
    assert as_told(words, ". w500") == [". w500"]


@needs_library
def test_words_beyond_the_bounds_are_not_kept() -> None:
    words = memory()
    for word, ids in (("", [1]), ("ab", [1, 2, 3, 4]), ("x" * (MAX_WORD_BYTES + 1), [1])):
        words.learn(word, ids)
        assert as_told(words, f". {word}") == [f". {word}"]


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
def test_ids_are_written_as_json(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(native_words, "_library", lambda: None)
    for ids in ([], [0], [2**32 - 1, 10, 9, 100, 99], list(range(3000))):
        assert json.loads(ids_as_json(array("I", ids))) == ids
