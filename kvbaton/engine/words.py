"""Tokenizing text word by word, from a memory of the words met before: a router reads far more text than new words.

For the vocabularies accepted here a space that follows something else than space always begins a new piece, whatever
stands around it, so a text may be cut there:

    The quick brown  fox,\\n it
    [The][ quick][ brown][  fox,\\n it]

Invariants: the tokens are always those of the library (a vocabulary for which that is not certain gets no memory); what
is kept is bounded; a text of new words costs at most a bounded number of calls more than without.
Knows nothing about messages, templates or requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_WORDS = 32_768  # of one generation; there are two
MAX_WORD_CHARS = 32
MAX_NEW_WORDS = 256  # learned from one text
# Patterns in which no alternative matches a space behind anything but space. ByteLevel's own is another.
_SAFE_PATTERNS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for digits in (r"\p{N}", r"\p{N}{1,3}")
)


class WordCache:
    """``encode`` as the library does it. Safe to use from several threads."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._before, self._after = _frame(library)
        # Words that follow a space. Two generations: when the young one is full it becomes the old one, and what is
        # still met moves back.
        self._young: dict[str, tuple[int, ...]] = {}
        self._old: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of(cls, library: Library, definition: Mapping[str, Any]) -> WordCache | None:
        """None for a vocabulary whose words might depend on each other."""
        added = definition.get("added_tokens") or []
        odd = ("lstrip", "rstrip", "single_word", "normalized")
        plain = all(not any(token.get(name, False) for name in odd) and " " not in token["content"] for token in added)
        model, normalizer = definition.get("model") or {}, definition.get("normalizer")
        plain = plain and model.get("type") == "BPE" and not model.get("dropout")
        plain = plain and (normalizer is None or normalizer.get("type") == "NFC")
        steps = list(_steps(definition.get("pre_tokenizer")))
        plain = plain and all(map(_is_safe, steps)) and any(map(_splits_words, steps))
        return cls(library) if plain else None

    @property
    def num_words(self) -> int:
        return len(self._young) + len(self._old)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [*self._before] if add_special_tokens else []
        get, extend = self._young.get, ids.extend
        unknown = ""  # text since the last known word
        space, joined, num_new = "", False, 0  # joined: to what comes before it
        for piece in text.split(" "):
            if not joined:
                known = get(piece if space else " " + piece)  # no piece has a space: the first one's key is its own
                if known is None:
                    known = self._look_again(piece, space, num_new < MAX_NEW_WORDS)
                    num_new += 1
                if known is not None:
                    if unknown:
                        extend(self._library.encode(unknown, add_special_tokens=False).ids)
                        unknown = ""
                    extend(known)
                    space = " "
                    continue
            unknown += space + piece
            space, joined = " ", not piece or piece[-1].isspace()
        if unknown:
            extend(self._library.encode(unknown, add_special_tokens=False).ids)
        if add_special_tokens:
            extend(self._after)
        return ids

    def _look_again(self, piece: str, space: str, may_learn: bool) -> tuple[int, ...] | None:
        """Of a piece that the young generation does not have."""
        if not piece or len(piece) > MAX_WORD_CHARS or piece[-1].isspace():
            return None
        key = piece if space else " " + piece
        known = self._old.get(key)
        if known is None:
            if not may_learn:
                return None
            known = tuple(self._library.encode(space + piece, add_special_tokens=False).ids)
        if len(self._young) >= MAX_WORDS:
            self._old, self._young = self._young, {}
        self._young[key] = known
        return known


def _frame(library: Library) -> tuple[list[int], list[int]]:
    """The special tokens that the library puts before and after a text."""
    plain, framed = (library.encode("a", add_special_tokens=each).ids for each in (False, True))
    start = next(i for i in range(len(framed)) if framed[i : i + len(plain)] == plain)
    return framed[:start], framed[start + len(plain) :]


def _steps(step: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if step is not None and step["type"] == "Sequence":
        for inner in step["pretokenizers"]:
            yield from _steps(inner)
    elif step is not None:
        yield step


def _splits_words(step: Mapping[str, Any]) -> bool:
    return step["type"] == "Split" or (step["type"] == "ByteLevel" and step.get("use_regex", True))


def _is_safe(step: Mapping[str, Any]) -> bool:
    """Whether a space behind something else always begins a piece, and nothing looks at what was before."""
    match step["type"]:
        case "ByteLevel":
            return not step.get("add_prefix_space", True)
        case "Digits":
            return True
        case "Split":
            isolated = step.get("behavior") == "Isolated" and not step.get("invert")
            return isolated and step.get("pattern", {}).get("Regex") in _SAFE_PATTERNS
        case _:
            return False
