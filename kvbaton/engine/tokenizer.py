"""Text to tokens and back: chat templates, incremental detokenization, stop strings.

Invariants: the pieces a ``Detokenizer`` returns, joined, are ``Tokenizer.decode`` of the same tokens, and none ends
inside a UTF-8 character; the text a ``StopChecker`` lets through never holds part of a stop string that was completed,
and does not depend on how the text was cut into pushes.

Decoding is defined on bytes: each token stands for some bytes, and the text is those bytes read as UTF-8 with one
replacement character for each longest malformed part. For byte-level vocabularies this is what the tokenizers library
does; for those with byte fallback it differs only in how many replacement characters malformed output shows.

Knows nothing about requests or sampling.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbaton.engine.chat_template import ChatTemplate
from kvbaton.engine.json_object import read_object
from kvbaton.engine.user_text import MarkerGuard
from kvbaton.text.segments import SegmentCache
from kvbaton.text.words import WordCache
from kvbaton.types import LocalError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # sentencepiece's visible space
MOST_MERGED = 2048  # pieces whose merges the library remembers: each may hold 8 KiB, and it would keep 10,000
_STRANGE = "\ue000\U0001fa70"  # for private use, which some normalizers drop, and one that few vocabularies know
MOST_IDS = 1 << 24  # beyond it is a typing error, and a table of all tokens would fill the memory


class Tokenizer:
    """One model's vocabulary. Immutable after loading; safe to use from several threads."""

    def __init__(self, definition: Mapping[str, Any], special_tokens: Mapping[str, str], chat: ChatTemplate | None):
        self._library = _library(definition)
        self._chat = chat
        _bound_memory(self._library)
        self._words = WordCache.of(self._library, definition)
        self._segments = SegmentCache.of(self._library, definition, self._words)
        self.strips_first_space = _strips_first_space(definition)
        byte_level = _is_byte_level(definition.get("decoder"))
        self._bytes: list[bytes] = [b""] * self._id_limit()
        for token, token_id in self._library.get_vocab(with_added_tokens=True).items():
            self._bytes[token_id] = _byte_level_bytes(token) if byte_level else _fallback_bytes(token)
        added = definition.get("added_tokens") or []
        self.special_token_ids: frozenset[int] = frozenset(token["id"] for token in added if token.get("special"))
        eos_id = self._library.token_to_id(special_tokens.get("eos_token", ""))
        self.eos_token_ids: tuple[int, ...] = () if eos_id is None else (eos_id,)
        self._guard = MarkerGuard(self._library, definition, self.special_token_ids | self._written_by_template(added))

    def _written_by_template(self, added: Sequence[Mapping[str, Any]]) -> set[int]:
        """Added tokens that the template itself writes around plain messages.

        Some models' turns are marked by tokens that their vocabulary does not call special.
        """
        if self._chat is None:
            return set()
        turns = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
        ids = {token["id"] for token in added}
        for messages in (turns, turns[1:]):  # some templates refuse a system message
            try:
                return ids.intersection(self.encode(self._chat.render(messages), add_special_tokens=False))
            except LocalError:
                continue
        return set()

    def _id_limit(self) -> int:
        limit = 1 + max(self._library.get_vocab(with_added_tokens=True).values(), default=-1)
        if limit > MOST_IDS:
            raise LocalError(f"tokenizer.json has token {limit - 1}, beyond {MOST_IDS:,}", field="tokenizer.json")
        return limit

    @classmethod
    def load(cls, path: Path | str) -> Tokenizer:
        """Read ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja`` of a model directory."""
        path = Path(path)
        config_path = path / "tokenizer_config.json"
        definition = _object_in(definition_path(path))
        config = _object_in(config_path) if config_path.is_file() else {}
        special_tokens = _special_tokens(config)
        chat = ChatTemplate.find(path, config, special_tokens)
        try:
            return cls(definition, special_tokens, chat)
        except (LookupError, TypeError, ValueError, AttributeError, StopIteration) as error:
            # The library takes more than we understand: a part without a type, or with one of another kind.
            raise LocalError(f"tokenizer.json is no tokenizer: {error!r}", field="tokenizer.json") from error

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id (a model's own vocabulary may be padded beyond it)."""
        return len(self._bytes)

    @property
    def has_chat_template(self) -> bool:
        return self._chat is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens written out in ``text`` become those tokens, as vLLM does for completions."""
        if self._words is not None:
            return self._words.encode(text, add_special_tokens)
        return self._library.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_compact(self, text: str) -> Sequence[int]:
        """``encode``, without a number object for each token where that can be."""
        return self.encode(text) if self._words is None else self._words.encode_compact(text)

    def encode_met(self, text: str, max_new: int) -> Sequence[int] | None:
        """The same of a text whose words were nearly all met before; None: it has more new ones, and takes longer."""
        return None if self._words is None else self._words.encode_met(text, max_new)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Tokens of a conversation, laid out by the model's own template. Bad messages are a ``LocalError``.

        Special tokens come from the template only: one written in a message is ordinary text.
        """
        if self._chat is None:
            raise LocalError(
                "this model has no chat template", field="messages", fix="use /v1/completions, or a model with one"
            )
        originals: list[str] = []
        sealed, sealed_tools = self._guard.seal(messages, originals), self._guard.seal(tools, originals)
        text = self._chat.render(sealed, sealed_tools, add_generation_prompt, template_kwargs)
        if originals:
            return self._guard.encode(text, originals)
        if self._segments is not None:
            return self._segments.encode(text)
        return self.encode(text, add_special_tokens=False)  # the template writes them itself

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for; nothing for an id outside the vocabulary (padding of the embedding)."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """A whole text, from its beginning."""
        detokenizer = Detokenizer(self, skip_special_tokens, starts_text=True)
        return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.flush()


class Detokenizer:
    """One sequence's tokens to text, piece by piece.

    ``starts_text``: the tokens begin a text, so a vocabulary that marks word starts drops the first space. Output that
    continues a prompt keeps it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, starts_text: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._drop_space = starts_text and tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """Text that is certain now; an unfinished character waits for its other bytes."""
        if token_id in self._skipped:
            return ""
        return self._without_first_space(self._decoder.decode(self._tokenizer.token_bytes(token_id)))

    def flush(self) -> str:
        """What the end of the sequence makes certain: a replacement character if bytes are missing."""
        return self._without_first_space(self._decoder.decode(b"", final=True))

    def _without_first_space(self, text: str) -> str:
        if self._drop_space and text:
            self._drop_space = False
            return text.removeprefix(" ")
        return text


class StopChecker:
    """Finds stop strings in a stream of text, also across pushes, and holds back what may become one.

    Of several, the one completed first in the stream ends it (of two completed at once, the longer). One that is whole
    before it may end anything (``min_tokens``) is ordinary text; one that is completed after counts, wherever it began.

        pushed:   ... Hello, wor|ld!</s|            stop: "</stop>"
        emitted:  ... Hello, world!
        held:                       </s   until it is a stop string, or cannot be one any more
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        if "" in stops:
            raise LocalError("a stop string must not be empty", field="stop")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self._num_passed = 0  # characters of what is held that no stop string may end with any more
        self._stopped = False

    def push(self, text: str, may_stop: bool = True) -> tuple[str, bool]:
        """Text to emit now, and whether a stop string is complete. Nothing is emitted after that."""
        if self._stopped:
            return "", True
        if not self._stops:
            return text, False
        self._held += text
        if not may_stop:
            self._num_passed = len(self._held)
        found = [
            (start + len(stop), start)
            for stop in self._stops
            if (start := self._held.find(stop, max(0, self._num_passed - len(stop) + 1))) >= 0
        ]
        if found:
            end, start = min(found)
            emitted, self._held, self._stopped = self._held[: end if self._include else start], "", True
            return emitted, True
        keep = max(_overlap(self._held, stop) for stop in self._stops)
        cut = len(self._held) - keep
        emitted, self._held = self._held[:cut], self._held[cut:]
        self._num_passed = max(0, self._num_passed - cut)
        return emitted, False

    def flush(self) -> str:
        """The sequence ended otherwise: what was held is ordinary text."""
        text, self._held = self._held, ""
        return text


def definition_path(path: Path) -> Path:
    """``tokenizer.json`` of a model directory; LocalError when there is none."""
    definition = path / "tokenizer.json"
    if not definition.is_file():
        fix = "convert it: transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise LocalError(f"no tokenizer.json in {path}", field="tokenizer", fix=fix)
    return definition


def _object_in(path: Path) -> dict[str, Any]:
    return read_object(path, path.name)


def _bound_memory(library: Library) -> None:
    """Of strange words that are met once. Words that come again are remembered by ``WordCache``, where there is one."""
    resize = getattr(library.model, "_resize_cache", None)  # only some kinds of models have one
    if resize is not None:
        resize(MOST_MERGED)


def _library(definition: Mapping[str, Any]) -> Library:
    from tokenizers import Tokenizer as Library

    try:
        library = Library.from_str(json.dumps(definition))
        # One whose token for what it does not know is missing takes no such text later, either.
        library.encode(_STRANGE)
        return library
    except BaseException as error:  # the library has no other type for what it cannot read, or panics
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise LocalError(f"tokenizer.json is no tokenizer: {error}", field="tokenizer.json") from None


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that begins ``stop`` without completing it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, each a string or an object that has it as ``content``."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            if any("\ud800" <= character <= "\udfff" for character in content):
                raise LocalError(f"{name} has half of a surrogate pair, which is no character", field=name)
            found[name] = content
    return found


def _decoder_steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _is_byte_level(decoder: Mapping[str, Any] | None) -> bool:
    """Whether tokens spell bytes; else they spell text, with a byte fallback. Anything else is refused."""
    kinds = [step["type"] for step in _decoder_steps(decoder)]
    if "ByteLevel" in kinds:
        return True
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        return False
    raise LocalError(
        f"tokenizer decoder {kinds or None} is not supported",
        field="decoder",
        fix="supported are ByteLevel, Metaspace, and Replace with ByteFallback, Fuse, Strip",
    )


def _strips_first_space(definition: Mapping[str, Any]) -> bool:
    return any(
        (step["type"] == "Strip" and step.get("start", 0) > 0)
        or (step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never")
        for step in _decoder_steps(definition.get("decoder"))
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from visible characters to bytes: printable Latin-1 is itself, the rest moved to U+0100 and up."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()  # an added token, spelled as itself


def _fallback_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_WORD_START, " ").encode()
