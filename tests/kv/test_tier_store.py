"""The tier's level that hosts share, over a store whose faults can be told: whatever it does, right blocks or none."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from kv.store_blocks import (
    FINGERPRINT,
    LAYOUT,
    WAIT_S,
    block,
    found,
    key_of,
    name_of,
    put,
    read,
    until,
    use_fake,
    write,
)
from kv.tier_memory import assert_goes

from kvbaton.clock import ManualClock
from kvbaton.kv import tier_store, tier_store_link
from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.tier import MIB, Tier, TierOptions, open_tier, tier_options
from kvbaton.kv.tier_directory import memory_directory
from kvbaton.kv.tier_store import MooncakeLevel, StoreAddress, parse_store
from kvbaton.kv.tier_store_link import REST_S
from kvbaton.types import LocalError


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the values are."""
    use_fake(monkeypatch, tmp_path)
    return tmp_path


@pytest.fixture
def master() -> Iterator[StoreAddress]:
    """Of it, only that it can be reached is looked at here."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        yield StoreAddress("127.0.0.1", listener.getsockname()[1], MIB)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


Open = Callable[[], MooncakeLevel]


@pytest.fixture
def opened(store: Path, master: StoreAddress, clock: ManualClock) -> Iterator[Open]:
    levels: list[MooncakeLevel] = []

    def open_one() -> MooncakeLevel:
        levels.append(MooncakeLevel(master, LAYOUT.block_bytes, clock))
        assert levels[-1].is_up
        return levels[-1]

    yield open_one
    for level in levels:
        process = level.link.process
        level.close()
        assert process.returncode is not None and not level.is_up


def value(store: Path, number: int) -> Path:
    return store / f"kvbaton-{key_of(number).hex()}"


def test_the_address_is_read_or_refused() -> None:
    assert parse_store("") is None
    assert parse_store("mooncake://master.local:50051") == StoreAddress("master.local", 50051, 256 * MIB)
    assert parse_store("mooncake://10.0.0.1:1?segment_mib=1024") == StoreAddress("10.0.0.1", 1, 1024 * MIB)
    for wrong in (
        "10.0.0.1:50051", "http://10.0.0.1:50051", "mooncake://10.0.0.1", "mooncake://:50051", "mooncake://a:0",
        "mooncake://a:70000", "mooncake://a:b", "mooncake://u@a:1", "mooncake://a:1/path", "mooncake://a:1?segment_mib=0",
        "mooncake://a:1?segment_mib=x", "mooncake://a:1?segment_mib=", "mooncake://a:1?what=1", "mooncake://a:1?what",
        "mooncake://a:1#b", "mooncake://[::1]:1", "mooncake://a:1?segment_mib=1_0", "mooncake://a:1?segment_mib=\u0663",
        "mooncake://a:1?segment_mib=99999999999999999999",
    ):  # fmt: skip
        with pytest.raises(LocalError, match="is not mooncake://HOST:PORT") as told:
            parse_store(wrong)
        assert told.value.field == "kv_tier_store" and told.value.fix


def test_the_longest_prompt_is_asked_about_without_waiting(
    store: Path, master: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a process that is stopped no socket takes it all: the deadline has to hold for the sending too."""
    level = MooncakeLevel(master, LAYOUT.block_bytes)
    try:
        until(lambda: level.link.is_settled("read") and level.is_up)
        chain = [index.to_bytes(16, "big") for index in range(20_000)]
        assert level.find(chain, 0.0, 1.0) == 0
        monkeypatch.setattr(tier_store, "_READ_S", 0.1)
        os.kill(level.link.process.pid, signal.SIGSTOP)
        try:
            assert level.find(chain, 0.0, 1.0) == 0 and level.counts.num_errors == 1
        finally:
            os.kill(level.link.process.pid, signal.SIGCONT)
    finally:
        level.close()


def test_without_the_package_it_is_said_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LocalError, match=r"kvbaton\[mooncake\].*libibverbs1") as told:
        tier_options(0, "", "mooncake://127.0.0.1:1", "key")
    assert told.value.field == "kv_tier_store"


def test_without_the_systems_library_it_says_which(store: Path, master: StoreAddress) -> None:
    (store / "no library").touch()
    with pytest.raises(LocalError, match=r"libibverbs.so.1: cannot open.*apt install libibverbs1"):
        MooncakeLevel(master, LAYOUT.block_bytes)


def test_ranks_have_none() -> None:
    several = fingerprint_of(LAYOUT, "revision", "rope", tp_size=2)
    with pytest.raises(LocalError, match="ranks") as told:
        open_tier(TierOptions(store=StoreAddress("127.0.0.1", 1)), several, LAYOUT, "test")
    assert told.value.field == "kv_tier_store"


def test_a_block_is_read_as_it_was_written_by_anybody(opened: Open) -> None:
    one, other = opened(), opened()
    put(one, 1, 2, 3)
    assert found(other, 1, 2, 3, 4, 1) == 3
    assert [read(other, number) for number in (1, 2, 3, 4)] == ["read"] * 3 + ["missing"]
    assert (one.counts.num_written, other.counts.num_read) == (3, 3)
    put(other, 3, 4)
    assert other.counts.num_written == 1, "what is there is not written again"
    assert one.counts.num_errors == other.counts.num_errors == 0


def test_more_than_there_is_room_for_at_once_is_put_in_parts(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_store, "_BATCH_BYTES", 3 * LAYOUT.block_bytes)
    level = opened()
    put(level, *range(7))
    assert found(level, *range(8)) == 7 and [read(level, number) for number in range(7)] == ["read"] * 7


@pytest.mark.parametrize("what", ["a byte", "the end", "another block", "more"])
def test_what_is_not_what_it_says_is_not_read_and_goes(opened: Open, store: Path, what: str) -> None:
    level = opened()
    put(level, 1, 2)
    raw = bytearray(value(store, 1).read_bytes())
    raw[len(raw) // 2] ^= 1
    wrong = {"a byte": raw, "the end": raw[:-1], "another block": value(store, 2).read_bytes(), "more": raw + b"."}
    value(store, 1).write_bytes(wrong[what])
    assert read(level, 1) == "wrong" and level.counts.num_wrong == 1
    assert found(level, 1) == 0 and read(level, 2) == "read"
    put(level, 1)
    assert read(level, 1) == "read" and level.counts.num_errors == 0


def test_what_does_not_fit_or_has_changed_is_refused(opened: Open, store: Path) -> None:
    level = opened()
    put(level, 1, is_valid=False)
    (store / "full").touch()
    put(level, 2)
    assert found(level, 1) == found(level, 2) == 0
    assert (level.counts.num_refused, level.counts.num_errors) == (2, 0)


def test_an_error_is_counted_and_nothing_asked_for_a_while(opened: Open, store: Path, clock: ManualClock) -> None:
    level = opened()
    put(level, 1)
    (store / "broken").touch()
    assert found(level, 1) == 0 and level.counts.num_errors == 1 and not level.may_have(key_of(1))
    (store / "broken").unlink()
    assert found(level, 1) == 0 and read(level, 1) == "missing"
    put(level, 2)
    assert level.counts.num_errors == 1, "it was not asked"
    clock.advance(REST_S)
    assert level.may_have(key_of(1)) and found(level, 1) == 1 and found(level, 2) == 0


def test_a_late_answer_is_not_taken_for_another(
    opened: Open, store: Path, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = opened()
    put(level, 1)
    (store / "hang").touch()
    with monkeypatch.context() as soon:
        soon.setattr(tier_store, "_READ_S", 0.01)
        assert found(level, 2) == 0 and level.counts.num_errors == 1
    clock.advance(REST_S)
    assert found(level, 1) == 0 and read(level, 1) == "missing", "the first answer is still to come"
    assert level.counts.num_errors == 1
    (store / "hang").unlink()
    until(lambda: level.link.is_settled("read"))
    assert found(level, 1) == 1 and read(level, 1) == "read"


def test_while_the_master_is_away_nobody_asks(opened: Open, store: Path) -> None:
    level = opened()
    (store / "away").touch()
    until(lambda: not level.is_up)
    assert not level.may_have(key_of(1)) and found(level, 1) == 0
    (store / "away").unlink()
    until(lambda: level.is_up)
    put(level, 1)
    assert found(level, 1) == 1 and level.counts.num_errors == 0


def test_a_worker_begins_without_a_master_and_finds_it_later(
    store: Path, master: StoreAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_store_link, "_CONNECT_S", 0.0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        address = StoreAddress("127.0.0.1", taken.getsockname()[1], MIB)
        level = MooncakeLevel(address, LAYOUT.block_bytes)
        assert not level.may_have(key_of(1)) and found(level, 1) == 0
        put(level, 1)
        assert level.counts.num_errors == 0
        taken.listen(1000)
        until(lambda: level.is_up and level.link.is_settled("read") and level.link.is_settled("write"))
        put(level, 1)
        assert found(level, 1) == 1
        level.close()


def test_a_process_that_dies_is_started_anew(opened: Open, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_store_link, "REST_S", 0.05)
    level = opened()
    put(level, 1)
    first = level.link.process
    first.send_signal(signal.SIGKILL)
    until(lambda: level.link.process is not first)
    clock.advance(REST_S)
    until(lambda: level.is_up and level.link.is_settled("read") and level.link.is_settled("write"))
    assert found(level, 1) == 1 and read(level, 1) == "read"


def test_a_process_whose_client_hangs_for_good_is_ended(
    opened: Open, store: Path, monkeypatch: pytest.MonkeyPatch, clock: ManualClock
) -> None:
    monkeypatch.setattr(tier_store_link, "_WATCH_S", 0.05)
    level = opened()
    (store / "hang").touch()
    with monkeypatch.context() as soon:
        soon.setattr(tier_store, "_READ_S", 0.01)
        assert found(level, 1) == 0
    clock.advance(tier_store_link._STUCK_S + 1)
    assert level.link.process.wait(WAIT_S) == -signal.SIGKILL


def test_one_that_dies_while_it_is_asked_is_an_error(opened: Open, store: Path) -> None:
    level = opened()
    put(level, 1)
    (store / "hang").touch()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(found, level, 1)
        until(lambda: level.link.is_owed("read"))
        level.link.process.kill()
        assert asked.result() == 0
    assert level.counts.num_errors == 1 and not level.may_have(key_of(1))


PARENT = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from kv.store_blocks import LAYOUT
from kvbaton.kv import tier_store_link
from kvbaton.kv.tier_store import MooncakeLevel, StoreAddress
tier_store_link._CONNECT_S = float(sys.argv[3])
level = MooncakeLevel(StoreAddress("127.0.0.1", int(sys.argv[1])), LAYOUT.block_bytes)
print(level.link.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("connect_s", [60.0, 0.0])
def test_it_ends_with_a_worker_that_is_killed(store: Path, connect_s: float) -> None:
    """With a master, and while it still waits for one."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if connect_s:
            listener.listen(1000)
        port = listener.getsockname()[1]
        command = [sys.executable, "-c", PARENT, str(port), str(Path(__file__).parents[1]), str(connect_s)]
        killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        until(lambda: not runs(int(killed.stdout)))


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_it_knows_no_secret(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVBATON_INTERNAL_KEY", "secret")
    level = opened()
    assert not [name for name in psutil.Process(level.link.process.pid).environ() if name.startswith("KVBATON_")]


def tier(store: StoreAddress, memory: str = "") -> Tier:
    found = open_tier(TierOptions(MIB if memory else 0, memory, store=store), FINGERPRINT, LAYOUT, "test")
    assert found is not None
    return found


def where(tier: Tier, number: int) -> str | None:
    into = [bytearray(LAYOUT.layer_block_bytes) for _ in range(LAYOUT.num_layers)]
    said = tier.read(name_of(number), into)
    assert said is None or b"".join(into) == b"".join(block(b"", number).pieces)
    return said


def test_what_is_written_to_memory_is_in_the_store_for_another_host(store: Path, master: StoreAddress) -> None:
    """Case: two memories of different names, as of two hosts."""
    names = [secrets.token_hex(8) for _ in range(2)]
    one, other, bare = tier(master, names[0]), tier(master, names[1]), tier(master)
    write(one, 1, 2)
    assert [where(one, 1), where(other, 1), where(bare, 1)] == ["memory", "store", "store"]
    write(other, 1)
    assert where(other, 1) == "memory"
    assert other.find([name_of(number) for number in (1, 2, 3)], 0.0, 0.0) == 2, "a chain may lie in both"
    assert not one.lacks(name_of(1)) and one.lacks(name_of(3)) and bare.lacks(name_of(3))
    stats = [each.stats() for each in (one, other)]
    assert [each.num_store_read for each in stats] == [0, 1] and all(each.store_is_up for each in stats)
    assert stats[0].num_store_written_bytes * 2 == stats[0].num_written_bytes > 0
    assert stats[1].num_store_written_bytes == 0
    for each in (one, other, bare):
        each.close()
    for name in names:
        assert_goes(memory_directory(name))
