"""Server and client over real sockets, real shared memory and real threads."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest
from prefill_process import expected_kv, make_request, read_kv

from kvbaton.kv.layout import KVLayout
from kvbaton.transfer.client import Completed, FirstToken
from kvbaton.types import CapacityError, LocalError

LAYOUT = KVLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype="bfloat16")


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 160, 333])
async def test_every_byte_arrives_and_bytes_are_the_layouts_arithmetic(make_pair, num_tokens, transport):
    pair = await make_pair()
    request = make_request("r", num_tokens)
    blocks = pair.dst_blocks(num_tokens)
    first, completed = await pair.pull_all(request, blocks=blocks)
    assert first.output.token_id == sum(request.prompt_token_ids) % 1000
    assert completed.num_bytes == LAYOUT.blocks_for(num_tokens) * LAYOUT.block_bytes
    assert completed.num_remote_tokens == num_tokens and completed.transport == transport
    pair.assert_arrived(request, blocks)
    await pair.settled()
    assert pair.server.stats().num_bytes_sent == (completed.num_bytes if transport == "tcp" else 0)
    assert ("release", "r") in pair.backend.calls
