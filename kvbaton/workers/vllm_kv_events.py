"""KV events of vLLM and its like, made into this fleet's own block hashes: decoding, and who holds what.

    payload of one batch ---decode_batch---> StoredBlocks, RemovedBlocks, Cleared
                         ---EngineBlocks---> the change of this worker's cache, in hashes that the router computes too

An engine's hashes depend on its version, its seed and its settings, so none is ever computed here: an event brings the
tokens and its parent's hash, and the chain is made again from those. Invariants: what cannot be placed (an adapter's
blocks, pictures, a parent nobody told of, a block of another size) is left out and counted, so the index may know less
than the engine has and never more; one block that an engine holds twice is gone when both are; no answer of a server
raises anything but ``UnreadableEvents``; at most ``max_blocks`` are remembered. Pure. Knows nothing about sockets or
sequence numbers (``vllm_kv_order``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.kv.blocks import BlockEvents, extend_hashes, root_hash
from kvbaton.types import UNREADABLE, LocalError

EngineHash = int | bytes
MAX_BLOCKS = 1 << 20
# Where a positional event has which field. Versions append fields, so an event may be shorter or longer than this.
_VLLM = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
# What follows the medium means other things there, so it is not read.
_SGLANG = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
LAYOUTS: dict[str, dict[str, tuple[str, ...]]] = {"vllm": _VLLM, "sglang": _SGLANG}
# Layers that see only part of a prompt cache only part of it: what is missing there must not hide what is not.
_WHOLE_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")
_UNREADABLE = (*UNREADABLE, ValueError)


class UnreadableEvents(ValueError):
    """A batch that is not what it should be. Nothing of it was applied."""


@dataclass(frozen=True)
class StoredBlocks:
    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    token_ids: Sequence[int]
    block_size: int
    medium: str | None = None
    extra_keys: Sequence[Any] | None = None  # for each block what else its hash stands for: salt, picture, adapter
    group: int | None = None
    kind: str | None = None  # of the layers of that group
    adapter: object = None


@dataclass(frozen=True)
class RemovedBlocks:
    hashes: tuple[EngineHash, ...]
    medium: str | None = None
    group: int | None = None


@dataclass(frozen=True)
class Cleared:
    pass


EngineEvent = StoredBlocks | RemovedBlocks | Cleared


def decode_batch(payload: bytes, engine: str = "vllm") -> list[EngineEvent]:
    """Events as maps with a ``type`` or as arrays with one in front, hashes as numbers or bytes. Others are skipped."""
    try:
        batch = msgspec.msgpack.decode(payload)
    except _UNREADABLE as error:
        raise UnreadableEvents(f"a batch of KV events cannot be read: {error}") from None
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise UnreadableEvents("a batch of KV events is not [time, [event, ...]]")
    events: list[EngineEvent] = []
    for raw in batch[1]:
        name, fields = _named(raw, LAYOUTS[engine])
        match name:
            case "BlockStored":
                events.append(_stored(fields))
            case "BlockRemoved":
                group = _optional(fields, "group_idx", int)
                events.append(RemovedBlocks(_hashes(fields), _optional(fields, "medium", str), group))
            case "AllBlocksCleared":
                events.append(Cleared())
    return events


def _named(raw: Any, layout: dict[str, tuple[str, ...]]) -> tuple[str, dict[str, Any]]:
    if isinstance(raw, dict):
        return str(raw.get("type")), raw
    if isinstance(raw, list) and raw and isinstance(raw[0], str):
        return raw[0], dict(zip(layout.get(raw[0], ()), raw[1:], strict=False))
    raise UnreadableEvents("a KV event is neither a map nor an array with its name in front")


def _stored(fields: dict[str, Any]) -> StoredBlocks:
    token_ids, block_size, keys = fields.get("token_ids"), fields.get("block_size"), fields.get("extra_keys")
    if not isinstance(token_ids, list) or not isinstance(block_size, int) or block_size < 1:
        raise UnreadableEvents("BlockStored without token_ids or block_size")
    parent = fields.get("parent_block_hash")
    if parent is not None and not isinstance(parent, int | bytes):
        raise UnreadableEvents("BlockStored: parent_block_hash is neither a number nor bytes")
    return StoredBlocks(
        _hashes(fields),
        parent,
        token_ids,
        block_size,
        _optional(fields, "medium", str),
        keys if isinstance(keys, list) else None,
        _optional(fields, "group_idx", int),
        _optional(fields, "kv_cache_spec_kind", str),
        fields.get("lora_name") or fields.get("lora_id"),
    )


def _hashes(fields: dict[str, Any]) -> tuple[EngineHash, ...]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list) or not all(isinstance(one, int | bytes) for one in hashes):
        raise UnreadableEvents("a KV event whose block_hashes are neither numbers nor bytes")
    return tuple(hashes)


def _optional(fields: dict[str, Any], name: str, kind: type) -> Any:
    value = fields.get(name)
    if value is not None and not isinstance(value, kind):
        raise UnreadableEvents(f"a KV event whose {name} is {str(value)[:40]!r}")
    return value


class _Block:
    """One block of one group of layers: its hash here, and how often each medium holds it."""

    __slots__ = ("copies", "name")

    def __init__(self, name: bytes) -> None:
        self.name = name
        self.copies: dict[str | None, int] = {}


class EngineBlocks:
    """The prefix cache of one server, by its events."""

    def __init__(self, block_size: int, max_blocks: int = MAX_BLOCKS) -> None:
        self.block_size = block_size
        self._max_blocks = max_blocks
        self._blocks: dict[tuple[int, EngineHash], _Block] = {}
        self._held: dict[bytes, int] = {}  # copies of each, over groups and media
        self.num_left_out = 0  # blocks that could not be placed
        self.num_forgotten = 0  # times that everything was, for want of memory

    def held(self) -> list[bytes]:
        return list(self._held)

    def clear(self) -> BlockEvents:
        """Nothing is known any more."""
        self._blocks.clear()
        self._held.clear()
        return BlockEvents(cleared=True)

    def apply(self, events: Sequence[EngineEvent]) -> BlockEvents:
        """The change that all of them together make."""
        cleared = False
        touched: dict[bytes, bool] = {}  # name -> whether it was held before
        for event in events:
            match event:
                case StoredBlocks():
                    names = self._store(event)
                case RemovedBlocks():
                    names = self._remove(event)
                case Cleared():
                    cleared, touched, names = True, {}, []
                    self.clear()
            if len(self._blocks) > self._max_blocks:
                self.num_forgotten += 1
                cleared, touched, names = True, {}, []
                self.clear()
            for name, held_before in names:
                touched.setdefault(name, held_before)
        stored = tuple(name for name, before in touched.items() if not before and name in self._held)
        removed = tuple(name for name, before in touched.items() if before and name not in self._held)
        return BlockEvents(cleared, removed, stored)

    def _store(self, event: StoredBlocks) -> list[tuple[bytes, bool]]:
        """Names whose count changed, each with whether it was held before."""
        names = self._names(event)
        self.num_left_out += len(event.hashes) - len(names)
        changed = []
        for engine_hash, name in zip(event.hashes, names, strict=False):
            block = self._blocks.setdefault((event.group or 0, engine_hash), _Block(name))
            block.copies[event.medium] = block.copies.get(event.medium, 0) + 1
            changed.append((block.name, block.name in self._held))
            self._held[block.name] = self._held.get(block.name, 0) + 1
        return changed

    def _names(self, event: StoredBlocks) -> list[bytes]:
        """Of the leading blocks that can be placed."""
        same_size = event.block_size == self.block_size and len(event.token_ids) == len(event.hashes) * self.block_size
        if not same_size or event.kind not in _WHOLE_KINDS or event.adapter:
            return []
        salt, num_plain = _salt_of(event)
        if event.parent is None:
            parent = root_hash(salt)
        elif (block := self._blocks.get((event.group or 0, event.parent))) is not None:
            parent = block.name
        else:
            return []
        try:
            return extend_hashes(parent, event.token_ids[: num_plain * self.block_size], self.block_size)
        except LocalError:
            return []  # not token ids: embeddings have none

    def _remove(self, event: RemovedBlocks) -> list[tuple[bytes, bool]]:
        changed = []
        for engine_hash in event.hashes:
            key = (event.group or 0, engine_hash)
            block = self._blocks.get(key)
            if block is None or event.medium not in block.copies:
                continue
            changed.append((block.name, True))
            if block.copies[event.medium] > 1:
                block.copies[event.medium] -= 1
            else:
                del block.copies[event.medium]
            if not block.copies:
                del self._blocks[key]
            if self._held[block.name] > 1:
                self._held[block.name] -= 1
            else:
                del self._held[block.name]
        return changed

    def check(self) -> None:
        """The two views agree."""
        counted: dict[bytes, int] = {}
        for block in self._blocks.values():
            assert block.copies and min(block.copies.values()) > 0
            counted[block.name] = counted.get(block.name, 0) + sum(block.copies.values())
        assert counted == self._held


def _salt_of(event: StoredBlocks) -> tuple[str, int]:
    """The salt that the chain starts with, and how many leading blocks stand for their tokens and that salt alone."""
    keys = list(event.extra_keys or ())
    salt, num_plain = "", len(event.hashes)
    for index, key in enumerate(keys[: len(event.hashes)]):
        if not key:
            continue
        match key:
            case [str(alone)] if index == 0 and event.parent is None:
                salt = alone  # an engine puts it before the first block only
                continue
        num_plain = index
        break
    return salt, num_plain
