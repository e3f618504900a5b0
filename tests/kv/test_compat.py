"""Fingerprints, their differences, and what a conversion can bridge (cases KV-01, KV-02, KV-19)."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.kv.compat import (
    FieldDifference,
    blocking,
    describe,
    differences,
    digest,
    fingerprint_of,
    layout_differences,
)
from kvbaton.kv.layout import KVLayout
from kvbaton.types import Fingerprint

LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
FINGERPRINT = fingerprint_of(LAYOUT, model_revision="abc", rope="theta=10000")


def test_equal_fingerprints_have_no_difference_and_one_digest() -> None:
    other = fingerprint_of(LAYOUT, model_revision="abc", rope="theta=10000")
    assert differences(FINGERPRINT, other) == []
    assert digest(FINGERPRINT) == digest(other)


@pytest.mark.parametrize("field", Fingerprint.__struct_fields__)
def test_every_field_counts(field: str) -> None:
    value = getattr(FINGERPRINT, field)
    other = msgspec.structs.replace(FINGERPRINT, **{field: value + 1 if isinstance(value, int) else value + "x"})
    found = differences(FINGERPRINT, other)
    assert [difference.field for difference in found] == [field]
    assert (found[0].ours, found[0].theirs) == (str(value), str(getattr(other, field)))
    may_differ = field == "tp_size"  # who has which heads is told by other means, and converted
    assert blocking(found) == ([] if may_differ else found)
    assert (digest(FINGERPRINT) == digest(other)) is may_differ
    assert field in describe(found) and found[0].theirs in describe(found)


def test_block_size_and_order_are_not_in_the_fingerprint() -> None:
    other = msgspec.structs.replace(LAYOUT, block_size=32, order="NHD")
    assert differences(FINGERPRINT, fingerprint_of(other, "abc", "theta=10000")) == []


def test_a_rank_fingerprint_carries_the_heads_of_the_model() -> None:
    rank = msgspec.structs.replace(LAYOUT, num_kv_heads=2)
    assert fingerprint_of(rank, "abc", "r", tp_size=4).num_kv_heads == 8


def test_layout_differences_say_what_can_be_converted() -> None:
    other = msgspec.structs.replace(LAYOUT, block_size=32, order="NHD", dtype="float8_e4m3")
    found = layout_differences(LAYOUT, other)
    assert {difference.field: difference.convertible for difference in found} == {
        "block_size": True,
        "order": True,
        "dtype": False,
    }
    assert [difference.field for difference in blocking(found)] == ["dtype"]
    assert describe(blocking(found)) == "dtype: ours bfloat16, theirs float8_e4m3"


def test_differences_can_be_sent() -> None:
    found = layout_differences(LAYOUT, msgspec.structs.replace(LAYOUT, order="NHD"))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=list[FieldDifference]) == found
