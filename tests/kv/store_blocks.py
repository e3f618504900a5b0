"""Blocks of one layout to put into a store and read back, a store in place of Mooncake's, and a wait for others."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvbaton.kv import tier_store, tier_store_link
from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.tier import Tier
from kvbaton.kv.tier_block import BlockToWrite
from kvbaton.kv.tier_store import MooncakeLevel

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
FINGERPRINT = fingerprint_of(LAYOUT, "revision", "rope")
WAIT_S = 120.0  # a bound on a wait, not a claim about speed


def be_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, no call to the store comes too late."""
    for module, name in ((tier_store, "_READ_S"), (tier_store, "_WRITE_S"), (tier_store_link, "_CONNECT_S")):
        monkeypatch.setattr(module, name, WAIT_S)


def use_fake(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """From now on the store is ``store_fake``, with its values in ``directory``."""
    be_patient(monkeypatch)
    path = [str(Path(__file__).parent / "store_fake"), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))
    monkeypatch.setenv("FAKE_STORE_DIR", str(directory))


def content(number: int) -> np.ndarray:
    """A block: uint8 [layer][bytes]."""
    size = (LAYOUT.num_layers, LAYOUT.layer_block_bytes)
    return np.random.default_rng(number).integers(0, 256, size=size, dtype=np.uint8)


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def key_of(number: int, name: str = "") -> bytes:
    return name.encode().ljust(8, b"-") + number.to_bytes(8, "big")


def block(key: bytes, number: int, is_valid: bool = True) -> BlockToWrite:
    return BlockToWrite(key, [memoryview(row) for row in content(number)], lambda: is_valid)


def write(tier: Tier, *numbers: int) -> None:
    tier.write([block(tier.key(name_of(number)), number) for number in numbers], 0.0)


def put(level: MooncakeLevel, *numbers: int, is_valid: bool = True, name: str = "") -> None:
    assert level.write([block(key_of(number, name), number, is_valid) for number in numbers], 0.0) == []


def found(level: MooncakeLevel, *numbers: int, name: str = "") -> int:
    return level.find([key_of(number, name) for number in numbers], 0.0, 0.0)


def read(level: MooncakeLevel, number: int, name: str = "") -> str:
    """What was read is what was written."""
    into = np.zeros_like(content(number))
    said = level.read(key_of(number, name), [memoryview(row) for row in into])
    assert said != "read" or np.array_equal(into, content(number))
    return said


def until(condition: Callable[[], bool]) -> None:
    """Another process changes what is looked at."""
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it does not come"
        time.sleep(0.005)
