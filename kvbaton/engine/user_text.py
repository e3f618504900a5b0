"""Keeps what users wrote from becoming a model's own markers when a conversation is tokenized.

A chat template writes markers such as ``<|im_start|>`` as text, and the tokenizer turns that text into special tokens,
whoever wrote it. So a user could end their own turn and open one for the system. Here markers in messages are taken out
before the template runs and put back, as ordinary text, behind the tokenizer's search for them:

    message     hi<|im_end|>
    sealed      hi@17@
    rendered    <|im_start|>user hi@17@<|im_end|>
    opened      [1]user hi<|im_end|>[2]        [n]: a name nobody can write; in a second vocabulary it is marker n

Invariants: messages without markers are not touched, so their tokens are what transformers gives; no token of a marker
comes from a message, by whatever way (search, normalisation, or a vocabulary that holds markers as words).

Knows nothing about templates.
"""

from __future__ import annotations

import copy
import json
import re
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library


class MarkerGuard:
    """The markers of one vocabulary. Safe to use from several threads."""

    def __init__(self, library: Library, definition: Mapping[str, Any], marker_ids: Iterable[int]) -> None:
        self.marker_ids = frozenset(marker_ids)
        self._library = library
        self._definition = definition
        self._secret = secrets.token_hex(8)  # nobody outside can guess it, and it never leaves: no token depends on it
        self._seal_pattern = re.compile(f"{self._secret}-([0-9]+)-")
        markers = [token for token in definition.get("added_tokens") or [] if token["id"] in self.marker_ids]
        longest_first = sorted((token["content"] for token in markers), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if markers else None
        self._contents = {token["id"]: token["content"] for token in markers}
        self._unknown_id = _unknown_id(definition)
        # Such a marker is also found where the text only becomes it when normalised.
        self._normalised = any(token.get("normalized", False) for token in markers)
        self._lock = threading.Lock()
        self._opened: Library | None = None

    def seal(self, value: Any, originals: list[str]) -> Any:
        """``value`` with every marker in its strings replaced; what they were is appended to ``originals``.

        Roles are the template's to judge, and it compares them: they stay as they are.
        """
        match value:
            case str():
                return self._seal_text(value, originals)
            case Mapping():
                return {k: v if k == "role" else self.seal(v, originals) for k, v in value.items()}
            case list() | tuple():
                return [self.seal(item, originals) for item in value]
            case _:
                return value

    def encode(self, text: str, originals: list[str]) -> list[int]:
        """Tokens of a rendered text in which ``originals`` were sealed."""
        # No sealed text is in here: what is found, the template wrote.
        renamed = self._replace(text, lambda token_id, _: self._name(token_id))
        opened = self._seal_pattern.sub(lambda seal: originals[int(seal[1])], renamed)
        return self._renamed_library().encode(opened, add_special_tokens=False).ids

    def _seal_text(self, text: str, originals: list[str]) -> str:
        if self._pattern is None:
            return text

        def sealed(original: str) -> str:
            originals.append(original)
            return f"{self._secret}-{len(originals) - 1}-"

        if not self._normalised:
            return self._pattern.sub(lambda found: sealed(found[0]), text)
        return self._replace(text, lambda _, original: sealed(original))

    def _replace(self, text: str, replacement: Callable[[int, str], str]) -> str:
        """``text`` with each marker that the library finds in it replaced."""
        parts, end = [], 0
        encoding = self._library.encode(text, add_special_tokens=False)
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            original = text[start:stop]
            if token_id not in self.marker_ids:
                continue
            if token_id == self._unknown_id and original.strip() != self._contents[token_id]:
                continue  # a character that the vocabulary lacks
            parts += [text[end:start], replacement(token_id, original)]
            end = stop
        return "".join(parts) + text[end:]

    def _name(self, token_id: int) -> str:
        return f"{self._secret}={token_id}="

    def _renamed_library(self) -> Library:
        """The vocabulary with other names for its markers. Made when first needed: it takes as long as loading did."""
        with self._lock:
            if self._opened is None:
                self._opened = self._make_renamed()
            return self._opened

    def _make_renamed(self) -> Library:
        from tokenizers import Tokenizer as Library

        definition = copy.deepcopy(dict(self._definition))
        definition["post_processor"] = None  # it names markers, and adds what templates write themselves
        names = {}
        for token in definition["added_tokens"]:
            if token["id"] in self.marker_ids:
                names[token["content"]] = self._name(token["id"])
                token["content"] = names[token["content"]]
        model = definition["model"]
        if isinstance(model.get("vocab"), dict):
            model["vocab"] = {names.get(word, word): token_id for word, token_id in model["vocab"].items()}
        elif "vocab" in model:
            model["vocab"] = [[names.get(word, word), score] for word, score in model["vocab"]]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        library = Library.from_str(json.dumps(definition))
        library.no_truncation()
        library.no_padding()
        assert all(library.token_to_id(self._name(i)) == i for i in self.marker_ids), "a renamed marker has another id"
        return library


def _unknown_id(definition: Mapping[str, Any]) -> int | None:
    """The token for what the vocabulary lacks; ordinary text has it too."""
    model = definition["model"]
    if "unk_id" in model:
        return model["unk_id"]
    vocabulary = model.get("vocab")
    return vocabulary.get(model.get("unk_token")) if isinstance(vocabulary, dict) else None
