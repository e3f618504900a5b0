"""vLLM's KV events become this fleet's hashes: both encodings, both kinds of hash, everything that cannot be placed."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.kv.blocks import BlockEvents, block_hashes
from kvbaton.workers.vllm_kv_events import (
    Cleared,
    EngineBlocks,
    RemovedBlocks,
    StoredBlocks,
    UnreadableEvents,
    decode_batch,
)

SIZE = 4
PROMPT = list(range(1, 13))  # three blocks


def engine_hashes(kind: str, tokens: Sequence[int], size: int = SIZE) -> list[Any]:
    """Of an engine whose chain we know nothing about."""
    found: list[Any] = []
    for end in range(size, len(tokens) + 1, size):
        digest = hashlib.sha256(repr(tokens[:end]).encode()).digest()
        found.append(int.from_bytes(digest[-8:], "big") if kind == "int" else digest)
    return found


def stored(kind: str, form: str, tokens: Sequence[int], start: int = 0, **more: Any) -> Any:
    hashes = engine_hashes(kind, tokens)
    fields = {
        "block_hashes": hashes[start:],
        "parent_block_hash": hashes[start - 1] if start else None,
        "token_ids": list(tokens[start * SIZE :]),
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        **more,
    }
    return {"type": "BlockStored", **fields} if form == "map" else ["BlockStored", *fields.values()]


def removed(kind: str, form: str, tokens: Sequence[int], start: int) -> Any:
    hashes = engine_hashes(kind, tokens)[start:]
    if form == "map":
        return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}
    return ["BlockRemoved", hashes, "GPU", 0]


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


@pytest.mark.parametrize("kind", ["int", "bytes"])
@pytest.mark.parametrize("form", ["map", "array"])
def test_both_encodings_say_the_same(form: str, kind: str) -> None:
    blocks, ours = EngineBlocks(SIZE), block_hashes(PROMPT, SIZE)
    found = blocks.apply(decode_batch(batch(stored(kind, form, PROMPT[:4]), stored(kind, form, PROMPT, 1))))
    assert found == BlockEvents(stored=tuple(ours)), "the chain goes on behind the parent"
    found = blocks.apply(decode_batch(batch(removed(kind, form, PROMPT, 2))))
    assert found == BlockEvents(removed=(ours[2],)) and set(blocks.held()) == set(ours[:2])
    found = blocks.apply(decode_batch(batch({"type": "AllBlocksCleared"} if form == "map" else ["AllBlocksCleared"])))
    assert found == BlockEvents(cleared=True) and not blocks.held()
    blocks.check()


def test_positional_events_may_be_shorter_or_longer() -> None:
    short = ["BlockStored", engine_hashes("int", PROMPT), None, PROMPT, SIZE]
    long = [*stored("int", "array", PROMPT), "full_attention", None, "LOCAL", "later", {"a": 1}]
    unknown = ["BlockMoved", 1, 2]
    for event in (short, long):
        (found,) = decode_batch(batch(unknown, event))
        assert isinstance(found, StoredBlocks) and list(found.token_ids) == PROMPT
    (gone,) = decode_batch(batch(["BlockRemoved", [7]]))
    assert gone == RemovedBlocks((7,))


def test_what_other_engines_put_at_the_same_place_is_not_read() -> None:
    """Case: position 7 is an adapter's name in one engine and metadata in the other."""
    event = ["BlockStored", engine_hashes("int", PROMPT), None, PROMPT, SIZE, None, "GPU", {"components": ["kv"]}, 3]
    (found,) = decode_batch(batch(event), "sglang")
    assert EngineBlocks(SIZE).apply([found]).stored == tuple(block_hashes(PROMPT, SIZE))


def test_a_salt_starts_the_chain() -> None:
    keys = [["tenant-1"], None, None]
    (found,) = decode_batch(batch(stored("int", "map", PROMPT, extra_keys=keys)))
    assert EngineBlocks(SIZE).apply([found]).stored == tuple(block_hashes(PROMPT, SIZE, "tenant-1"))


@pytest.mark.parametrize(
    ("changes", "num_placed"),
    [
        ({"lora_name": "a"}, 0),
        ({"lora_id": 3}, 0),
        ({"extra_keys": [None, [["picture", 2]], None]}, 1),  # the same tokens, another picture
        ({"extra_keys": [["salt", ["picture", 0]], None, None]}, 0),
        ({"extra_keys": [[b"embedding"], None, None]}, 0),
        ({"extra_keys": [1, None, None]}, 0),  # a version of the engine that says it in another way
        ({"extra_keys": ["salt", None, None]}, 0),
        ({"extra_keys": [{"salt": "salt"}, None, None]}, 0),
        ({"extra_keys": [None, {"x": 1}, None]}, 1),
        ({"block_size": SIZE * 2}, 0),
        ({"token_ids": PROMPT[:-1]}, 0),  # some of its blocks were left out, nobody says which
        ({"parent_block_hash": 99}, 0),
        ({"kv_cache_spec_kind": "sliding_window"}, 0),
        ({"token_ids": [-1] * 12}, 0),
        ({"kv_cache_spec_kind": "mla_attention"}, 3),
    ],
)
def test_what_cannot_be_placed_is_left_out_and_counted(changes: dict[str, Any], num_placed: int) -> None:
    blocks = EngineBlocks(SIZE)
    found = blocks.apply(decode_batch(batch(stored("int", "map", PROMPT, **changes))))
    assert found.stored == tuple(block_hashes(PROMPT, SIZE)[:num_placed])
    assert blocks.num_left_out == 3 - num_placed
    blocks.apply(decode_batch(batch(removed("int", "map", PROMPT, 0))))
    assert not blocks.held()
    blocks.check()


def test_two_copies_are_gone_when_both_are() -> None:
    blocks, ours = EngineBlocks(SIZE), tuple(block_hashes(PROMPT, SIZE))
    host = stored("int", "map", PROMPT, medium="CPU")
    blocks.apply(decode_batch(batch(stored("int", "map", PROMPT), stored("int", "map", PROMPT), host)))
    gone = decode_batch(batch(removed("int", "map", PROMPT, 0)))
    assert not blocks.apply(gone) and not blocks.apply(gone), "the host's copy is left"
    hashes = tuple(engine_hashes("int", PROMPT))
    assert blocks.apply([RemovedBlocks(hashes, "CPU", 0)]) == BlockEvents(removed=ours)
    assert not blocks.apply([RemovedBlocks(hashes, "CPU", 0)]), "once more is nothing"
    blocks.check()


def test_what_comes_and_goes_within_one_batch_is_no_change() -> None:
    blocks = EngineBlocks(SIZE)
    assert not blocks.apply(decode_batch(batch(stored("int", "map", PROMPT), removed("int", "map", PROMPT, 0))))
    blocks.apply(decode_batch(batch(stored("int", "map", PROMPT))))
    found = blocks.apply(decode_batch(batch(["AllBlocksCleared"], stored("int", "map", PROMPT[:4]))))
    assert found == BlockEvents(cleared=True, stored=(block_hashes(PROMPT, SIZE)[0],))


def test_memory_is_bounded() -> None:
    blocks = EngineBlocks(SIZE, max_blocks=5)
    for start in range(10):
        blocks.apply(decode_batch(batch(stored("int", "map", [start] * 8))))
        assert len(blocks.held()) <= 5
    assert blocks.num_forgotten


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xff" * 20,
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, "x"]),
        batch(7),
        batch([]),
        batch({"type": "BlockStored"}),
        batch({"type": "BlockStored", "token_ids": [1], "block_size": 0, "block_hashes": [1]}),
        batch({"type": "BlockStored", "token_ids": [1], "block_size": 1, "block_hashes": ["x"]}),
        batch(
            {"type": "BlockStored", "token_ids": [1], "block_size": 1, "block_hashes": [1], "parent_block_hash": 1.5}
        ),
        batch({"type": "BlockStored", "token_ids": [1], "block_size": 1, "block_hashes": [1], "medium": 7}),
        batch({"type": "BlockRemoved", "block_hashes": None}),
    ],
)
def test_a_batch_that_cannot_be_read_is_one_typed_error(payload: bytes) -> None:
    with pytest.raises(UnreadableEvents):
        decode_batch(payload)


Action = tuple[str, int, int]


@given(st.lists(st.tuples(st.sampled_from(["store", "drop", "clear"]), st.integers(0, 3), st.integers(1, 4))))
def test_held_is_what_an_engine_with_these_copies_holds(actions: list[Action]) -> None:
    """An engine that stores prompts of one to four blocks, each time as fresh copies, and drops single copies."""
    blocks, log = EngineBlocks(1), set()
    copies: dict[bytes, int] = {}
    for what, which, length in actions:
        tokens = [which + 1] * length
        hashes, ours = engine_hashes("bytes", tokens, 1), block_hashes(tokens, 1)
        if what == "store":
            change = blocks.apply([StoredBlocks(tuple(hashes), None, tokens, 1)])
            for name in ours:
                copies[name] = copies.get(name, 0) + 1
        elif what == "drop":
            change = blocks.apply([RemovedBlocks((hashes[-1],))])
            copies[ours[-1]] = max(0, copies.get(ours[-1], 0) - 1)
        else:
            change = blocks.apply([Cleared()])
            copies.clear()
        log = (set() if change.cleared else log - set(change.removed)) | set(change.stored)
        blocks.check()
        held = {name for name, count in copies.items() if count}
        assert set(blocks.held()) == held == log
