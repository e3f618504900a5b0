"""Prompts of an exact token count, and prefixes that are really shared.

A prompt is a row of words, each of which is one token of the served model's tokenizer and stays one token beside any
other, so the count is known while building; it is checked by encoding the whole all the same. Words of a shared block
are drawn from a seed made of the block's id, so equal ids mean equal text and different ids mean different text.

Knows nothing about arrival times, HTTP or files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from kvbaton.types import LocalError

NUM_WORDS = 1024
_WORD = re.compile(r" [a-z]{2,10}")
# Content whose special tokens a template adds are measured with this; it is not empty because templates may trim.
_PROBE_WORDS = 8


class Codec(Protocol):
    """The part of a tokenizer that building prompts needs (kvbaton.engine.tokenizer.Tokenizer has it)."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class PromptBuilder:
    """Builds prompt texts for one tokenizer. ``count`` says how many prompt tokens the server will see for a text."""

    def __init__(self, codec: Codec, seed: int, count: Callable[[str], int] | None = None) -> None:
        self._codec = codec
        self._seed = seed
        self._count = count or (lambda text: len(codec.encode(text)))
        self.words = single_token_words(codec, Random(f"{seed}:words"))
        probe = "".join(self.words[:_PROBE_WORDS])
        # What a chat template or a BOS adds to every prompt.
        self.overhead_tokens = self._count(probe) - _PROBE_WORDS
        self._ids = {word: codec.encode(word, add_special_tokens=False)[0] for word in self.words}

    def text(self, num_tokens: int, key: str, blocks: Sequence[int] = (), block_tokens: int = 0) -> str:
        """A text that makes a prompt of exactly ``num_tokens``, or of the least the template allows.

        ``blocks`` are ids of leading blocks of ``block_tokens`` each, shared with every prompt that has the same ids;
        what they do not cover is drawn from ``key``, which no other prompt should have.
        """
        wanted = max(1, num_tokens - self.overhead_tokens)
        words = self._words(wanted, key, blocks, block_tokens)
        text = "".join(words)
        # One pass suffices for word-by-word tokenizers; the loop is for those that join words at a template's seam.
        for _ in range(4):
            difference = self._count(text) - max(num_tokens, self.overhead_tokens + 1)
            if difference == 0:
                return text
            wanted = max(1, wanted - difference)
            words = self._words(wanted, key, blocks, block_tokens)
            text = "".join(words)
        raise LocalError(
            f"cannot build a prompt of exactly {num_tokens} tokens with this tokenizer",
            field="tokenizer",
            fix="give the served model's own tokenizer, or --prompt-format ids",
        )

    def ids(self, num_tokens: int, key: str, blocks: Sequence[int] = (), block_tokens: int = 0) -> list[int]:
        """Token ids instead of text, for endpoints that take them; exact by construction."""
        return [self._ids[word] for word in self._words(max(1, num_tokens), key, blocks, block_tokens)]

    def _words(self, num: int, key: str, blocks: Sequence[int], block_tokens: int) -> list[str]:
        words: list[str] = []
        for block in blocks:
            if len(words) >= num:
                break
            words += Random(f"{self._seed}:block:{block}").choices(self.words, k=block_tokens)
        if len(words) < num:
            words += Random(f"{self._seed}:own:{key}").choices(self.words, k=num - len(words))
        return words[:num]


def single_token_words(codec: Codec, random: Random) -> list[str]:
    """Words (with their leading space) that are one token alone and one token each in a row."""
    order = list(range(codec.vocab_size))
    random.shuffle(order)
    words: list[str] = []
    for token in order:
        text = codec.decode([token])
        if not _WORD.fullmatch(text):
            # Some decoders drop the leading space of the first word.
            text = f" {text}"
            if not _WORD.fullmatch(text):
                continue
        if codec.encode(text, add_special_tokens=False) == [token]:
            words.append(text)
            if len(words) == NUM_WORDS:
                break
    if len(words) < 16:
        raise LocalError("the tokenizer has too few whole words to build prompts from", field="tokenizer")
    return words
