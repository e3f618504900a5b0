"""Chains of block hashes, native and in Python: the same bytes for every block size and length."""

from __future__ import annotations

import random
from array import array
from hashlib import blake2b

import pytest

from kvbaton.kv import blocks, native_hashes
from kvbaton.kv.blocks import HASH_BYTES, block_hashes, extend_hashes, root_hash
from kvbaton.kv.native_hashes import MIN_BLOCKS, chain_hashes

needs_library = pytest.mark.skipif(
    chain_hashes(bytes(HASH_BYTES), array("I", range(MIN_BLOCKS)), 1, HASH_BYTES) is None,
    reason="the native chain of hashes was not built",
)


def by_definition(parent: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    found = []
    for start in range(0, len(tokens) - block_size + 1, block_size):
        content = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + block_size])
        parent = blake2b(parent + content, digest_size=HASH_BYTES).digest()
        found.append(parent)
    return found


@pytest.mark.parametrize("native", [pytest.param(True, marks=needs_library), False])
@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 27, 28, 29, 32, 59, 60, 61, 64, 100, 512])
def test_every_way_gives_the_same_chain(native: bool, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(blocks, "chain_hashes", lambda *_: None)
    monkeypatch.setattr(native_hashes, "SLICE_BLOCKS", 5)
    rng = random.Random(block_size)
    for num_tokens in (0, 1, block_size, 3 * block_size, 4 * block_size - 1, 4 * block_size, 17 * block_size + 1):
        tokens = [rng.randrange(2**32) for _ in range(num_tokens)]
        for parent in (root_hash(), root_hash("tenant"), rng.randbytes(HASH_BYTES)):
            wanted = by_definition(parent, tokens, block_size)
            assert extend_hashes(parent, tokens, block_size) == wanted
            assert extend_hashes(parent, array("I", tokens), block_size) == wanted


@needs_library
def test_a_long_prompt_is_hashed_natively() -> None:
    tokens = array("I", range(1000))
    assert chain_hashes(root_hash(), tokens, 16, HASH_BYTES) == block_hashes(tokens, 16)
    assert chain_hashes(root_hash(), tokens[:3], 1, HASH_BYTES) is None, "as fast without"
