"""The tier's level that hosts share over a real Mooncake store; `make test-mooncake`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv.mooncake_master import Master, master_of
from kv.store_blocks import LAYOUT, be_patient, found, key_of, put, read, until

from kvbaton.clock import ManualClock
from kvbaton.kv.tier_store import MooncakeLevel, parse_store
from kvbaton.kv.tier_store_link import REST_S

pytestmark = pytest.mark.peer


@pytest.fixture
def master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Master]:
    be_patient(monkeypatch)
    with master_of(tmp_path) as found:
        yield found


def level_of(master: Master, clock: ManualClock | None = None) -> MooncakeLevel:
    address = parse_store(master.flag)
    assert address is not None
    level = MooncakeLevel(address, LAYOUT.block_bytes, clock)
    assert level.is_up
    return level


def test_a_block_is_read_as_it_was_written_by_anybody(master: Master) -> None:
    one, other = level_of(master), level_of(master)
    numbers = range(20)
    put(one, *numbers)
    assert found(other, *numbers, 99) == 20 and found(other, 99, 1) == 0
    assert [read(other, number) for number in (*numbers, 99)] == ["read"] * 20 + ["missing"]
    put(other, 1, 2, 30)
    assert other.counts.num_written == 1 and read(one, 30) == "read"
    assert one.counts.num_errors == other.counts.num_errors == 0
    one.close()
    assert read(other, 30) in ("read", "missing"), "where a block lies is the store's choice"
    other.close()


@pytest.mark.parametrize("value", [b"short", bytes(48 + LAYOUT.block_bytes), bytes(100 + LAYOUT.block_bytes)])
def test_what_is_not_what_it_says_is_not_read_and_goes(master: Master, value: bytes) -> None:
    level = level_of(master)
    put(level, 1, 2)
    master.put(f"kvbaton-{key_of(1).hex()}", value)
    assert found(level, 1, 2) == 2
    assert read(level, 1) == "wrong" and level.counts.num_wrong == 1
    assert found(level, 1) == 0 and read(level, 2) == "read"
    put(level, 1)
    assert read(level, 1) == "read" and level.counts.num_errors == 0
    level.close()


def test_more_than_fits_is_refused_or_pushes_others_out(master: Master) -> None:
    level = level_of(master)
    most = 2 * (64 << 20) // LAYOUT.block_bytes
    for start in range(0, most, 500):
        put(level, *range(start, start + 500), name="many")
    assert level.counts.num_errors == 0 and 0 < level.counts.num_refused < most
    kept = [number for number in range(0, most, 97) if read(level, number, "many") == "read"]
    assert kept and level.counts.num_wrong == 0
    level.close()


def test_a_master_that_is_killed_is_away_and_one_that_comes_back_is_used(master: Master) -> None:
    clock = ManualClock()
    level, other = level_of(master, clock), level_of(master, clock)
    put(level, 1)
    master.kill()
    assert found(level, 1) == 0 and read(level, 1) == "missing"
    put(level, 2)
    until(lambda: not level.is_up and not other.is_up)
    master.start()

    def written() -> bool:
        clock.advance(REST_S)
        put(level, 3)
        return found(other, 3) == 1

    until(written)
    assert read(other, 3) == "read"
    assert found(other, 1) == 0, "what a master knew is gone with it"
    level.close()
    other.close()


def test_a_master_that_is_killed_holds_nobody_at_the_end(master: Master) -> None:
    level = level_of(master)
    master.kill()
    process = level.link.process
    level.close()
    assert process.returncode is not None


def test_a_worker_that_is_killed_takes_blocks_along_and_nothing_else(master: Master) -> None:
    clock = ManualClock()
    one, other = level_of(master, clock), level_of(master, clock)
    numbers = range(40)
    put(one, *numbers)
    one.link.process.kill()
    one.link.process.wait()
    for number in numbers:
        assert read(other, number) in ("read", "missing")
        clock.advance(REST_S)
    put(other, 50)
    assert found(other, 50) == 1 and read(other, 50) == "read" and other.counts.num_wrong == 0
    one.close()
    other.close()
