"""Words from memory: the same tokens as the library's, for every vocabulary that gets a memory; and a bounded one."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from kvbaton.text import words
from kvbaton.text.words import _SAFE_PATTERNS, WordCache

BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
RAW_BYTES = BYTES | {"use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}
SPLITS = [
    {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    for pattern in sorted(_SAFE_PATTERNS)
]
BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
VOCABULARIES: dict[str, dict[str, Any]] = {
    "digits, then GPT-2's words": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]}},
    "GPT-2's words": {"pre_tokenizer": BYTES},
    **{
        f"pattern {number}": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, RAW_BYTES]}}
        for number, split in enumerate(SPLITS)
    },
    "a token with a digit in it": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [DIGITS, BYTES]},
        "added_tokens": [
            {
                "id": 256,
                "content": "<|r_7|>",
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
        ],
    },
    "composed, with a first token": {"pre_tokenizer": BYTES, "normalizer": {"type": "NFC"}, "post_processor": BOS},
}
PARTS = [
    *"ab,.'!?1234567890\n\t\r-/\\_é漢🎉",
    *["  ", "   ", "\n\n", " \n", "\n ", "e\u0301", "\u0301", "\u00a0", "\u3000", "\u200b", "\x1c", "\x85"],
    *["it's", "'S", "word", "The", "don't", "x" * 40, "<|im_end|>", "<|im_", "|>", "12.5", "1234567", "end.\n", "ŞΩ"],
    *["v2.0.1", "$5", "(42)", "2024-01-02T03:04:05Z", "a1b2c3d4e5f6", "\u0661", "3's", "<|r_7|>", "<|r_"],
]


def made(tiny_model_dir: Path, change: dict[str, Any]) -> tuple[Library, dict[str, Any]]:
    definition = json.loads((tiny_model_dir / "tokenizer.json").read_text()) | change
    return Library.from_str(json.dumps(definition)), definition


@pytest.fixture(params=["native", "python"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where words are kept."""
    if request.param == "python":
        monkeypatch.setattr(words.NativeWords, "of", lambda max_words: None)
    elif words.NativeWords.of(1) is None:
        pytest.skip("the native memory of words was not built")
    return str(request.param)


@pytest.mark.usefixtures("where")
@pytest.mark.parametrize("change", VOCABULARIES.values(), ids=VOCABULARIES)
def test_tokens_are_those_of_the_library(
    tiny_model_dir: Path, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(words, "MAX_WORDS", 200)  # generations pass
    monkeypatch.setattr(words, "MAX_NEW_WORDS", 7)
    library, definition = made(tiny_model_dir, change)
    cache = WordCache.of(library, definition)
    assert cache is not None
    rng = random.Random(5)
    for _ in range(1500):
        parts = rng.choices(PARTS, k=rng.randrange(0, 30))
        text = "".join(part + " " * (rng.random() < 0.4) for part in parts)
        for special in (True, False):
            ids = library.encode(text, add_special_tokens=special).ids
            assert cache.encode(text, special) == ids, repr(text)
            met = cache.encode_met(text, 3, special)
            assert met is None or met.tolist() == ids
        assert cache.num_words <= 400


@pytest.mark.usefixtures("where")
def test_known_words_are_not_tokenized_again(tiny_model_dir: Path) -> None:
    class Counting:
        def __init__(self, library: Library) -> None:
            self.library, self.num_calls = library, 0

        def encode(self, text: str, add_special_tokens: bool = True) -> Any:
            self.num_calls += 1
            return self.library.encode(text, add_special_tokens=add_special_tokens)

    library = Counting(made(tiny_model_dir, {})[0])
    cache = WordCache(library)  # type: ignore[arg-type]
    first = cache.encode("The quick brown fox, 1234 times.")
    before = library.num_calls
    assert cache.encode("The quick brown fox, 1234 times.") == first
    assert library.num_calls == before
    met = cache.encode_met("The quick brown fox, 1234 times.", 0)
    assert met is not None and met.tolist() == first
    assert cache.encode_met("The quick brown fox and a dog, a cat and a hen", 3) is None
    assert cache.encode_met("The quick brown " + "fox" * 100, 3) is None, "one word, but much to look at"
    numbers = WordCache(library, num_digits=1)  # type: ignore[arg-type]
    numbers.encode("12 v3.4 (56) 7890")
    before = library.num_calls
    assert len(numbers.encode("90 v8.7 (65) 4321")) == 17
    assert library.num_calls == before, "numbers that were never met, of digits that were"


@pytest.mark.parametrize(
    "change",
    [
        {"pre_tokenizer": None},
        {"pre_tokenizer": DIGITS},
        {"pre_tokenizer": RAW_BYTES},
        {"pre_tokenizer": BYTES | {"add_prefix_space": True}},
        {"pre_tokenizer": SPLITS[0] | {"pattern": {"Regex": r"\w+ \w+"}}},
        {"pre_tokenizer": SPLITS[0] | {"behavior": "Removed"}},
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}},
        {"normalizer": {"type": "NFKC"}},
        {"added_tokens": [{"id": 0, "content": "two words", "special": False, "normalized": False}]},
        {"added_tokens": [{"id": 0, "content": "<x>", "special": True, "lstrip": True}]},
    ],
)
def test_no_memory_where_words_could_depend_on_each_other(tiny_model_dir: Path, change: dict[str, Any]) -> None:
    library, definition = made(tiny_model_dir, {})
    assert WordCache.of(library, definition | change) is None
