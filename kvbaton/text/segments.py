"""Tokenizing a conversation again and again, each time one turn longer, at the cost of the new turn.

A rendered conversation is text between the model's markers, and for the vocabularies accepted here each such segment is
tokenized by itself, whatever stands around it:

    <|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n
    [1         ][a               ][2       ][b][1         ][c        ]

so the tokens of segments seen lately are kept. Invariants: the tokens are always those of the library (a vocabulary for
which that is not certain gets no cache); what is kept is bounded in bytes, and the least recently used go first.
Knows nothing about messages or templates.
"""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvbaton.text.words import WordCache

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_BYTES = 32 * 1024 * 1024  # of all segments kept, text and ids
ENTRY_BYTES = 128  # what the table takes for a segment besides
# Each works on one segment only. Metaspace, for one, looks at what comes before.
_LOCAL_PRE_TOKENIZERS = {"ByteLevel", "Digits", "Split", "Punctuation"}
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD"}


class SegmentCache:
    """Encodes without the special tokens that a post-processor adds. Safe to use from several threads."""

    def __init__(
        self,
        library: Library,
        marker_ids: Mapping[str, int],
        words: WordCache | None = None,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        def by_library(text: str, add_special_tokens: bool) -> list[int]:
            return library.encode(text, add_special_tokens=add_special_tokens).ids

        self._encode: Callable[[str, bool], list[int]] = words.encode if words is not None else by_library
        self._marker_ids = dict(marker_ids)
        longest_first = sorted(self._marker_ids, key=len, reverse=True)
        self._markers = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")") if longest_first else None
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, array[int]] = OrderedDict()
        self._lock = threading.Lock()
        self.num_bytes = 0

    @classmethod
    def of(cls, library: Library, definition: Mapping[str, Any], words: WordCache | None = None) -> SegmentCache | None:
        """None for a vocabulary whose segments might depend on each other."""
        added = definition.get("added_tokens") or []
        plain = all(
            not any(token.get(name, False) for name in ("lstrip", "rstrip", "single_word", "normalized"))
            for token in added
        )
        local = _only(definition.get("pre_tokenizer"), "pretokenizers", _LOCAL_PRE_TOKENIZERS)
        local = local and _only(definition.get("normalizer"), "normalizers", _LOCAL_NORMALIZERS)
        if not plain or not local or definition.get("pre_tokenizer") is None:
            return None
        return cls(library, {token["content"]: token["id"] for token in added}, words)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for piece in self._markers.split(text) if self._markers is not None else [text]:
            marker_id = self._marker_ids.get(piece)
            if marker_id is not None:
                ids.append(marker_id)
            elif piece:
                ids.extend(self._segment(piece))
        return ids

    def _segment(self, piece: str) -> array[int]:
        with self._lock:
            known = self._kept.get(piece)
            if known is not None:
                self._kept.move_to_end(piece)
                return known
        found = array("I", self._encode(piece, False))
        cost = held_bytes(piece, found)
        with self._lock:
            if piece not in self._kept and cost <= self._max_bytes // 8:
                self._kept[piece] = found
                self.num_bytes += cost
                while self.num_bytes > self._max_bytes:
                    self.num_bytes -= held_bytes(*self._kept.popitem(last=False))
        return found


def held_bytes(piece: str, ids: array[int]) -> int:
    """A character takes 1 to 4 bytes as text, and up to as many ids of 4 bytes each as UTF-8 has bytes for it."""
    return sys.getsizeof(piece) + sys.getsizeof(ids) + ENTRY_BYTES


def _only(step: Mapping[str, Any] | None, many: str, allowed: set[str]) -> bool:
    """Whether a step of the definition, and all it is made of, is of an allowed kind."""
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(_only(inner, many, allowed) for inner in step[many])
    return step["type"] in allowed
