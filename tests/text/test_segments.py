"""Segments of a conversation: the same tokens as without a cache, and a bounded one."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Library

from kvbaton.engine.tokenizer import Tokenizer
from kvbaton.text.segments import SegmentCache, held_bytes


@pytest.fixture
def definition(tiny_model_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    return found


def pieces(definition: dict[str, Any]) -> list[str]:
    markers = [token["content"] for token in definition["added_tokens"]]
    words = [
        "user\n",
        "hello  world",
        " ",
        "\n\n",
        "  x",
        "é",
        "e\u0301",
        "漢字",
        "🎉🎉",
        "1234",
        "it's",
        "<|",
        "|>",
        "a" * 70,
    ]
    return [*markers, *markers, *words, *(marker[:-1] for marker in markers)]


@pytest.mark.parametrize("seed", range(20))
def test_tokens_are_those_of_the_library(definition: dict[str, Any], seed: int) -> None:
    library = Library.from_str(json.dumps(definition))
    cache = SegmentCache.of(library, definition)
    assert cache is not None
    rng, choices = random.Random(seed), pieces(definition)
    text = ""
    for _ in range(30):  # a conversation that grows, then another
        text = (text if rng.random() < 0.9 else "") + "".join(rng.choices(choices, k=rng.randrange(1, 8)))
        assert cache.encode(text) == library.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", ["segment", "🎉🦀🫠"])
def test_the_cache_is_bounded_by_what_it_holds(definition: dict[str, Any], text: str) -> None:
    library = Library.from_str(json.dumps(definition))
    cache = SegmentCache(library, {}, max_bytes=8000)
    for number in range(500):
        cache.encode(f"{text} {number}")
        held = sum(sys.getsizeof(piece) + sys.getsizeof(ids) for piece, ids in cache._kept.items())
        assert 0 < held <= cache.num_bytes <= 8000
        assert cache.num_bytes == sum(held_bytes(piece, ids) for piece, ids in cache._kept.items())
    cache.encode("large " * 1000)
    assert all(not piece.startswith("large") for piece in cache._kept)


def test_no_cache_where_segments_could_depend_on_each_other(definition: dict[str, Any]) -> None:
    library = Library.from_str(json.dumps(definition))
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
    nested = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, metaspace]}
    stripping = [{**definition["added_tokens"][0], "lstrip": True}]
    for change in (
        {"pre_tokenizer": metaspace},
        {"pre_tokenizer": nested},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Prepend", "prepend": "▁"}},
        {"added_tokens": stripping},
    ):
        assert SegmentCache.of(library, definition | change) is None, change


def test_a_conversation_uses_it(tiny_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    assert tokenizer._segments is not None
    messages = [{"role": "user", "content": "hello"}]
    first = tokenizer.chat(messages)
    before = tokenizer._segments.num_bytes
    assert tokenizer.chat(messages) == first and tokenizer._segments.num_bytes == before > 0
