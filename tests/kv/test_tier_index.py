"""The index of a tier's level: an LRU with pins that a model agrees with, whichever process asks, and that survives."""

from __future__ import annotations

import random
import sqlite3
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from kvbaton.kv.tier_index import TierIndex, Undo


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def chain(*numbers: int, size: int = 1) -> list[tuple[bytes, int]]:
    return [(key(number), size) for number in numbers]


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


def test_the_least_recently_used_goes_and_of_a_chain_the_tail_first() -> None:
    index = TierIndex(":memory:", 4)
    index.add(chain(1, 2), 0.0)
    index.add(chain(3, 4), 0.0)
    assert index.find(keys(1, 2), 0.0, 0.0) == 2
    assert index.add(chain(5), 0.0).victims == (key(4),), "3 and 4 are older, and 4 is the tail"
    assert index.add(chain(6), 0.0).victims == (key(3),)
    assert index.find(keys(1, 2, 3), 0.0, 0.0) == 2
    index.check()


def test_what_is_being_read_does_not_go() -> None:
    index = TierIndex(":memory:", 2)
    index.add(chain(1, 2), 0.0)
    assert index.find(keys(1, 2), now_s=10.0, pin_s=5.0) == 2
    added = index.add(chain(3), 12.0)
    assert added.num_refused == 1 and not added.victims and key(3) not in index
    assert index.add(chain(3), 15.0).victims == (key(2),), "a pin ends by itself"


def test_a_pin_of_an_earlier_life_means_nothing(tmp_path: Path) -> None:
    index = TierIndex(tmp_path / "index.sqlite", 2)
    index.add(chain(1, 2), 0.0)
    index.find(keys(1), now_s=1e9, pin_s=5.0)  # the clock of a machine that has been up for longer
    index.close()
    again = TierIndex(tmp_path / "index.sqlite", 2)
    again.begin()
    assert again.add(chain(3, 4), 1.0).victims == (key(2), key(1))
    again.close()


def test_a_chain_that_is_too_long_keeps_its_head() -> None:
    index = TierIndex(":memory:", 3)
    added = index.add(chain(1, 2, 3, 4, 5), 0.0)
    assert added.num_refused == 2
    assert [key(number) in index for number in range(1, 6)] == [True, True, True, False, False]


def test_sizes_are_bytes() -> None:
    index = TierIndex(":memory:", 10)
    index.add(chain(1, size=6), 0.0)
    assert index.add(chain(2, size=5), 0.0).victims == (key(1),)
    assert index.num_bytes == 5 and len(index) == 1
    assert index.add(chain(3, size=11), 0.0).num_refused == 1


def test_a_change_that_fails_is_none() -> None:
    index = TierIndex(":memory:", 2)
    index.add(chain(1, 2), 0.0)

    def fail(_: bytes) -> NoReturn:
        raise OSError("no space")

    with pytest.raises(OSError):
        index.add(chain(3), 0.0, publish=fail)
    assert index.find(keys(1, 2), 0.0, 0.0) == 2 and key(3) not in index
    index.check()


def test_what_was_done_to_files_is_undone_last_first_and_only_when_the_change_fails(tmp_path: Path) -> None:
    index = TierIndex(tmp_path / "index.sqlite", 2)
    index.add(chain(1, 2), 0.0)
    told: list[str] = []

    def step(name: str) -> Callable[[bytes], Undo]:
        def does(block: bytes) -> Undo:
            told.append(f"{name} {block[-1]}")
            return lambda: told.append(f"undo {name} {block[-1]}")

        return does

    index._db.execute("CREATE TRIGGER broken BEFORE INSERT ON blocks BEGIN SELECT RAISE(ABORT, 'no'); END")
    with pytest.raises(sqlite3.IntegrityError):
        index.add(chain(3), 0.0, step("publish"), step("retire"))
    assert told == ["retire 2", "publish 3", "undo publish 3", "undo retire 2"]
    index._db.execute("DROP TRIGGER broken")
    told.clear()
    assert index.add(chain(3), 0.0, step("publish"), step("retire")).victims == (key(2),)
    assert told == ["retire 2", "publish 3"] and index.num_bytes == 2
    index.check()
    index.close()


def test_two_that_share_a_file_see_each_other(tmp_path: Path) -> None:
    one, other = (TierIndex(tmp_path / "index.sqlite", 3) for _ in range(2))
    one.add(chain(1, 2), 0.0)
    assert other.find(keys(1, 2), now_s=0.0, pin_s=1.0) == 2
    assert one.add(chain(3, 4), 0.5).num_refused == 1, "the other one reads 1 and 2"
    assert other.add(chain(3), 0.5).num_refused == 0 and len(other) == 3, "what is there is not counted twice"
    one.check()
    one.close()
    other.close()


def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    index = TierIndex(tmp_path / "index.sqlite", 8)
    index.add(chain(*range(8)), 0.0)
    index.close()
    again = TierIndex(tmp_path / "index.sqlite", 3)
    gone: list[bytes] = []

    def retire(block: bytes) -> Undo:
        gone.append(block)
        return gone.clear

    again.begin(retire)
    assert len(gone) == 5 and again.find(keys(0, 1, 2), 0.0, 0.0) == 3
    again.check()
    again.close()


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "index.sqlite"
    path.write_bytes(b"not a database at all" * 500)
    with pytest.raises(sqlite3.DatabaseError):
        TierIndex(path, 1)


@pytest.mark.parametrize("seed", range(3))
def test_it_does_what_an_ordered_dictionary_does(seed: int) -> None:
    rng = random.Random(seed)
    index, held = TierIndex(":memory:", 20), OrderedDict[int, None]()
    for _ in range(300):
        start = rng.randrange(40)
        numbers = list(range(start, start + rng.randint(1, 6)))
        if rng.random() < 0.5:
            count = index.find(keys(*numbers), 0.0, 0.0)
            expected = next((n for n, number in enumerate(numbers) if number not in held), len(numbers))
            assert count == expected
            numbers = numbers[:count]
        else:
            index.add(chain(*numbers), 0.0)
        for number in reversed(numbers):
            held[number] = None
            held.move_to_end(number)
        while len(held) > 20:
            held.popitem(last=False)
        assert {key(number) for number in held} == set(index.held_keys())
    index.check()
