"""The chain of block hashes in one native call: half the time of a ``blake2b`` for each block, and the same bytes.

Invariant: the hashes are those of ``blocks.extend_hashes`` in plain Python, which is used where the library was not
built. A call holds Python's lock, as short as ``SLICE_BLOCKS`` make it: letting go of it and waiting for it again may
cost an event loop more than the call. Pure; knows nothing about what is in a block.
"""

from __future__ import annotations

import ctypes
import functools
from array import array

from kvbaton.native_library import quick_library

SLICE_BLOCKS = 2048
MIN_BLOCKS = 4  # fewer are as fast without


@functools.cache
def _library() -> ctypes.PyDLL | None:
    library = quick_library(__file__, "_hashes")
    if library is None:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    library.kvb_chain_hashes.argtypes = [ctypes.c_char_p, pointer, integer, integer, pointer]
    library.kvb_chain_hashes.restype = None
    return library


def chain_hashes(parent: bytes, tokens: array[int], block_size: int, hash_bytes: int) -> list[bytes] | None:
    """Of the full blocks of ``tokens`` (type "I"), which follow ``parent``. None: not here, or not worth it."""
    library, num_blocks = _library(), len(tokens) // block_size
    if library is None or num_blocks < MIN_BLOCKS or len(parent) != hash_bytes or hash_bytes != 16:
        return None
    hashes: list[bytes] = []
    block_bytes = block_size * tokens.itemsize
    content = tokens.buffer_info()[0]
    for first in range(0, num_blocks, SLICE_BLOCKS):
        count = min(SLICE_BLOCKS, num_blocks - first)
        found = array("B", bytes(count * hash_bytes))  # ctypes would make a class, and keep it, for each length
        library.kvb_chain_hashes(parent, content + first * block_bytes, count, block_bytes, found.buffer_info()[0])
        raw = found.tobytes()
        hashes += [raw[at : at + hash_bytes] for at in range(0, len(raw), hash_bytes)]
        parent = hashes[-1]
    return hashes
