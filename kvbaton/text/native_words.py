"""Words and their tokens in native memory: a long text of known words costs a lookup each, and no object of Python's.

Token ids are an ``array`` here, 4 bytes each, for what reads many prompts needs few of the ids as numbers.

Invariants: what is not known is handed back as text, cut where ``words`` allows it; a call holds Python's lock, so
threads need none, for at most ``SLICE_BYTES`` of known words. Without the library (no C++ compiler at installation)
there is no memory and everything else works. Knows nothing about vocabularies.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
from array import array
from collections.abc import Iterator, Sequence

from kvbaton.native_library import quick_library

SLICE_BYTES = 64 * 1024
MAX_GAPS = 64  # unknown stretches of text that one call tells of
MAX_WORD_BYTES = 256


@functools.cache
def _library() -> ctypes.PyDLL | None:
    library = quick_library(__file__, "_words")
    if library is None:
        return None
    pointer, integer, text = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p
    library.kvb_words_create.argtypes = [ctypes.c_uint64, integer]
    library.kvb_words_create.restype = pointer
    library.kvb_words_destroy.argtypes = [pointer]
    library.kvb_words_destroy.restype = None
    library.kvb_words_learn.argtypes = [pointer, text, integer, pointer, integer]
    library.kvb_words_learn.restype = None
    library.kvb_words_encode.argtypes = [pointer, text, *[integer] * 3, pointer, pointer, integer, pointer]
    library.kvb_words_encode.restype = integer
    library.kvb_ids_as_json.argtypes = [pointer, integer, pointer]
    library.kvb_ids_as_json.restype = integer
    return library


class NativeWords:
    """Words that follow a space."""

    def __init__(self, library: ctypes.PyDLL, max_words: int) -> None:
        self._library = library
        # The seed keeps clients from choosing words that meet in one place.
        self._memory = library.kvb_words_create(secrets.randbits(64), max_words)

    @classmethod
    def of(cls, max_words: int) -> NativeWords | None:
        library = _library()
        return None if library is None else cls(library, max_words)

    def __del__(self) -> None:
        self._library.kvb_words_destroy(self._memory)

    def learn(self, word: str, ids: Sequence[int]) -> None:
        raw = word.encode()
        if len(raw) <= MAX_WORD_BYTES and len(ids) <= len(raw) + 1:
            held = array("I", ids)  # until the call is over
            self._library.kvb_words_learn(self._memory, raw, len(raw), held.buffer_info()[0], len(held))

    def read(self, raw: bytes) -> Iterator[tuple[array[int], str]]:
        """In turn: ids of known words, and the unknown text behind them, which may be learned before the next turn."""
        at, length = 0, len(raw)
        gaps, counts = array("q", bytes(24 * MAX_GAPS)), array("q", bytes(16))
        gaps_at, counts_at = gaps.buffer_info()[0], counts.buffer_info()[0]
        while at < length:
            ids = array("I", bytes(4 * (min(SLICE_BYTES, length - at) + MAX_WORD_BYTES + 1)))
            at = self._library.kvb_words_encode(
                self._memory, raw, at, length, SLICE_BYTES, ids.buffer_info()[0], gaps_at, MAX_GAPS, counts_at
            )
            taken, (num_ids, num_gaps) = 0, counts
            for i in range(0, 3 * num_gaps, 3):
                start, end, before = gaps[i : i + 3]
                yield ids[taken:before], raw[start:end].decode()
                taken = before
            if taken < num_ids:
                yield ids[taken:num_ids], ""


def ids_as_json(ids: array[int]) -> bytes:
    """Of an ``array`` of type "I"."""
    library = _library()
    if library is None or not ids:
        return str(ids.tolist()).encode()
    text = array("B", bytes(11 * len(ids) + 2))  # ctypes would make a class, and keep it, for each length
    size: int = library.kvb_ids_as_json(ids.buffer_info()[0], len(ids), text.buffer_info()[0])
    return memoryview(text)[:size].tobytes()
