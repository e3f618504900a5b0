"""Tokenizing text word by word, from a memory of the words met before: a router reads far more text than new words.

For the vocabularies accepted here a space that follows something else than space always begins a new piece, whatever
stands around it, so a text may be cut there:

    The quick brown  fox,\\n it
    [The][ quick][ brown][  fox,\\n it]

Numbers are seldom met again, but their digits are: where the vocabulary keeps digits apart from all else, a word is put
together from them and from what stands between them.

Invariants: the tokens are always those of the library (a vocabulary for which that is not certain gets no memory); what
is kept is bounded; a text of new words costs at most a bounded number of calls more than without.
Knows nothing about messages, templates or requests.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbaton.text.native_words import NativeWords

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

MAX_WORDS = 32_768  # of one generation; there are two
MAX_WORD_CHARS = 32
MAX_NEW_WORDS = 256  # learned from one text
MAX_PARTS = 9  # of a word with digits, digits and what is between them
_DIGITS = re.compile("([0-9]+)")
# Patterns in which no alternative matches a space behind anything but space, and how many digits make a piece, which
# holds nothing else. ByteLevel's own is another, where a number and the space before it are one piece.
_SAFE_PATTERNS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + digits
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": num_digits
    for digits, num_digits in ((r"\p{N}", 1), (r"\p{N}{1,3}", 3))
}


class _Limit:
    """What is left of the time that one text may cost."""

    __slots__ = ("left", "max_new", "num_new")

    def __init__(self, max_new: int) -> None:
        self.max_new = max_new
        self.num_new = 0
        self.left = (max_new + 1) * MAX_WORD_CHARS  # characters that may be unknown


class WordCache:
    """``encode`` as the library does it. Safe to use from several threads."""

    def __init__(self, library: Library, num_digits: int = 0, not_in_numbers: str = "") -> None:
        """``num_digits`` of a number make a piece; 0: it is not certain that they do. A word with one of the characters
        ``not_in_numbers`` may hold a token with digits in it."""
        self._library = library
        self._num_digits, self._not_in_numbers = num_digits, frozenset(not_in_numbers)
        self._digits: dict[str, list[int]] = {}  # pieces of digits; few are possible
        self._before, self._after = _frame(library)
        self._native = NativeWords.of(MAX_WORDS)
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
        if not plain:
            return None
        marks = {token["content"][0] for token in added if _DIGITS.search(token["content"])}
        return cls(library, _digits_in_piece(steps[0]), "".join(marks))

    @property
    def num_words(self) -> int:
        return len(self._young) + len(self._old)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = self._tokens(text, _Limit(len(text)), add_special_tokens)
        assert ids is not None, "a text has fewer words than characters"
        return ids if isinstance(ids, list) else ids.tolist()

    def encode_compact(self, text: str, add_special_tokens: bool = True) -> array[int]:
        ids = self.encode_met(text, len(text), add_special_tokens)
        assert ids is not None, "a text has fewer words than characters"
        return ids

    def encode_met(self, text: str, max_new: int, add_special_tokens: bool = True) -> array[int] | None:
        """None, and little time was spent, when more than ``max_new`` of its words have to be looked at closely, or
        more text than such words have is none that is kept."""
        ids = self._tokens(text, _Limit(max_new), add_special_tokens)
        return array("I", ids) if isinstance(ids, list) else ids

    def _tokens(self, text: str, limit: _Limit, add_special_tokens: bool) -> list[int] | array[int] | None:
        """As numbers, or as they lie in native memory; None: the limit is passed."""
        ids: list[int] | array[int] = [*self._before] if add_special_tokens else []
        try:
            raw = None if self._native is None else text.encode()
        except UnicodeEncodeError:  # half of a surrogate pair: whatever the library says to it
            raw = None
        if self._native is None or raw is None:
            if not self._read(text, "", ids, limit):
                return None
        else:
            ids = array("I", ids)
            for known, unknown in self._native.read(raw):
                ids.extend(known)
                if unknown and not self._read_unknown(unknown, ids, limit):
                    return None
        if add_special_tokens:
            ids.extend(self._after)
        return ids

    def _read_unknown(self, text: str, ids: list[int] | array[int], limit: _Limit) -> bool:
        """Of the native memory; of a text's start, or with the space before it."""
        return self._read(text[1:], " ", ids, limit) if text[0] == " " else self._read(text, "", ids, limit)

    def _read(self, text: str, space: str, ids: list[int] | array[int], limit: _Limit) -> bool:
        """``text`` behind ``space``; False when the limit is passed."""
        get, extend, native = self._young.get, ids.extend, self._native
        known: Sequence[int] | None
        unknown = ""  # text since the last known word
        joined = False  # to what comes before it
        for piece in text.split(" "):
            if not joined:
                known = get(piece if space else " " + piece)  # no piece has a space: the first one's key is its own
                if known is None:
                    if limit.num_new > limit.max_new:
                        return False
                    known = self._look_again(piece, space, limit.num_new < MAX_NEW_WORDS)
                    limit.num_new += 1
                elif native is not None and space:
                    native.learn(piece, known)
                if known is not None:
                    if unknown:
                        extend(self._library.encode(unknown, add_special_tokens=False).ids)
                        unknown = ""
                    extend(known)
                    space = " "
                    continue
            unknown += space + piece
            space, joined = " ", not piece or piece[-1].isspace()
            limit.left -= len(piece) + 1
            if limit.left < 0:
                return False
        if unknown:
            extend(self._library.encode(unknown, add_special_tokens=False).ids)
        return True

    def _look_again(self, piece: str, space: str, may_learn: bool) -> Sequence[int] | None:
        """Of a piece that the young generation does not have."""
        if not piece or len(piece) > MAX_WORD_CHARS or piece[-1].isspace():
            return None
        if self._num_digits and piece.isascii() and piece.isprintable() and self._not_in_numbers.isdisjoint(piece):
            parts = _DIGITS.split(piece)
            if 1 < len(parts) <= MAX_PARTS:
                return self._put_together(parts, space, may_learn)
        key = piece if space else " " + piece
        known = self._old.get(key)
        if known is None:
            if not may_learn:
                return None
            known = tuple(self._library.encode(space + piece, add_special_tokens=False).ids)
        if len(self._young) >= MAX_WORDS:
            self._old, self._young = self._young, {}
        self._young[key] = known
        if self._native is not None and space:
            self._native.learn(piece, known)
        return known

    def _put_together(self, parts: Sequence[str], space: str, may_learn: bool) -> list[int] | None:
        """``parts``: text and digits in turn, text first and last, which may be empty."""
        ids: list[int] = []
        known: Sequence[int] | None
        text = parts[0]
        if text or space:
            known = self._young.get(text if space else " " + text) if text else self._piece(space)
            if known is None and (known := self._look_again(text, space, may_learn)) is None:
                return None
            ids += known
        for number in range(1, len(parts), 2):
            digits, text, size = parts[number], parts[number + 1], self._num_digits
            for piece in digits if size == 1 else [digits[at : at + size] for at in range(0, len(digits), size)]:
                ids += self._digits.get(piece) or self._piece(piece)
            if text:
                known = self._young.get(" " + text)
                if known is None and (known := self._look_again(text, "", may_learn)) is None:
                    return None
                ids += known
        return ids

    def _piece(self, text: str) -> list[int]:
        """A piece of digits, or the space before one."""
        known = self._digits.get(text)
        if known is None:
            known = self._digits[text] = self._library.encode(text, add_special_tokens=False).ids
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


def _digits_in_piece(step: Mapping[str, Any]) -> int:
    """How many digits, told by the first step: the others see what it left."""
    match step["type"]:
        case "Digits":
            return 1 if step.get("individual_digits") else 0
        case "Split":
            return _SAFE_PATTERNS[step["pattern"]["Regex"]]
        case _:
            return 0


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
