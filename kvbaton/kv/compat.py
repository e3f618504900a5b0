"""May KV move between two workers? Fingerprints, their differences, and which layout differences can be converted.

A fingerprint names what decides the *meaning* of the bytes: any difference is a refusal, before a byte moves, with the
fields that differ; but for how many ranks share the heads. A layout names where the bytes *are*: block size and order
may differ, the rest may not. What may differ, ``kv/reshard`` converts. Knows nothing about connections or about who
asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from kvbaton.kv.layout import KVLayout
from kvbaton.types import PROTOCOL_VERSION, Fingerprint

DIGEST_BYTES = 16
CONVERTIBLE_FIELDS = frozenset({"block_size", "order", "tp_size"})


class FieldDifference(msgspec.Struct, frozen=True):
    """One field that differs, in words that can be sent and shown."""

    field: str
    ours: str
    theirs: str
    convertible: bool = False

    def __str__(self) -> str:
        return f"{self.field}: ours {self.ours}, theirs {self.theirs}"


def fingerprint_of(layout: KVLayout, model_revision: str, rope: str, tp_size: int = 1) -> Fingerprint:
    """The fingerprint of a worker. ``layout`` must be the one in effect, not the one that was asked for.

    ``layout.num_kv_heads`` are those of one rank; the fingerprint carries those of the model.
    """
    return Fingerprint(
        protocol_version=PROTOCOL_VERSION,
        model_revision=model_revision,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads * tp_size,
        head_dim=layout.head_dim,
        kv_dtype=layout.dtype,
        rope=rope,
        tp_size=tp_size,
    )


def digest(fingerprint: Fingerprint) -> bytes:
    """Equal on every machine and Python for fingerprints between which KV may move."""
    one_rank = msgspec.structs.replace(fingerprint, tp_size=1)
    return blake2b(msgspec.json.encode(one_rank, order="deterministic"), digest_size=DIGEST_BYTES).digest()


def differences(ours: Fingerprint, theirs: Fingerprint) -> list[FieldDifference]:
    """The fields that differ, in the order of the struct; those not ``convertible`` forbid a transfer."""
    return _differences(ours, theirs)


def layout_differences(ours: KVLayout, theirs: KVLayout) -> list[FieldDifference]:
    """The layout fields that differ; those not ``convertible`` forbid a transfer."""
    return _differences(ours, theirs)


def blocking(found: Sequence[FieldDifference]) -> list[FieldDifference]:
    """Those that no conversion bridges."""
    return [difference for difference in found if not difference.convertible]


def describe(found: Sequence[FieldDifference]) -> str:
    """One line for a log or an error: every field with both values."""
    return "; ".join(str(difference) for difference in found)


def _differences(ours: msgspec.Struct, theirs: msgspec.Struct) -> list[FieldDifference]:
    found = []
    for field in ours.__struct_fields__:
        our_value, their_value = getattr(ours, field), getattr(theirs, field)
        if our_value != their_value:
            found.append(FieldDifference(field, str(our_value), str(their_value), field in CONVERTIBLE_FIELDS))
    return found
