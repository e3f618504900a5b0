"""The shared tier's levels: what is read is what was written or nothing, bounded, private, and whole after any kill."""

from __future__ import annotations

import os
import secrets
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kv.tier_memory import assert_goes

from kvbaton.kv.compat import fingerprint_of
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.tier import MIB, Tier, TierOptions, memory_name, namespace, open_tier, parse_disk, tier_options
from kvbaton.kv.tier_directory import TierDirectory, memory_directory, sweep_tiers
from kvbaton.kv.tier_level import BlockToWrite, TierLevel, file_bytes
from kvbaton.types import LocalError

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
FINGERPRINT = fingerprint_of(LAYOUT, "revision", "rope")
BLOCK_BYTES = file_bytes(LAYOUT.block_bytes)


def content(number: int) -> np.ndarray:
    """A block: uint8 [layer][bytes]."""
    size = (LAYOUT.num_layers, LAYOUT.layer_block_bytes)
    return np.random.default_rng(number).integers(0, 256, size=size, dtype=np.uint8)


def name_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


def write(tier: Tier, *numbers: int, is_valid: bool = True) -> None:
    blocks = [
        BlockToWrite(tier.key(name_of(number)), [memoryview(row) for row in content(number)], lambda: is_valid)
        for number in numbers
    ]
    tier.write(blocks, now_s=0.0)


def read(tier: Tier, number: int) -> str | None:
    """Where from; what was read is what was written."""
    found = np.zeros_like(content(number))
    where = tier.read(name_of(number), [memoryview(row) for row in found])
    assert where is None or np.array_equal(found, content(number))
    return where


def found(tier: Tier, *numbers: int, pin_s: float = 0.0) -> int:
    return tier.find([name_of(number) for number in numbers], 0.0, pin_s)


@pytest.fixture
def memory() -> Iterator[str]:
    """A name for a level in memory, of which nothing may be left."""
    name = secrets.token_hex(8)
    yield name
    assert_goes(memory_directory(name))


def opened(memory: str = "", disk: Path | None = None, blocks: int = 4, disk_blocks: int = 8, **changes: str) -> Tier:
    options = TierOptions(blocks * BLOCK_BYTES if memory else 0, memory, disk, disk_blocks * BLOCK_BYTES)
    tier = open_tier(options, FINGERPRINT, LAYOUT, changes.get("computed_by", "test"))
    assert tier is not None
    return tier


def test_a_block_is_read_as_it_was_written_by_anybody(memory: str) -> None:
    one, other = opened(memory), opened(memory)
    write(one, 1, 2, 3)
    assert found(other, 1, 2, 3, 4) == 3
    assert [read(other, number) for number in (1, 2, 3, 4)] == ["memory"] * 3 + [None]
    one.close()
    assert read(other, 1) == "memory", "it outlives its writer"
    other.close()


def test_what_leaves_memory_is_on_disk_and_what_leaves_disk_is_gone(memory: str, tmp_path: Path) -> None:
    tier = opened(memory, tmp_path)
    for number in range(15):
        write(tier, number)
    held = [read(tier, number) for number in range(15)]
    assert held == [None] * 3 + ["disk"] * 8 + ["memory"] * 4
    assert found(tier, *range(3, 15)) == 12, "a chain may lie in both"
    stats = tier.stats()
    assert (stats.num_memory_bytes, stats.num_disk_bytes) == (4 * BLOCK_BYTES, 8 * BLOCK_BYTES)
    for level, most in zip(tier.levels, (4, 8), strict=True):
        assert sum(path.stat().st_blocks * 512 for path in level.directory.block_files()) <= most * BLOCK_BYTES
        assert not list((level.directory.path / "new").iterdir())
    tier.close()


def test_disk_alone_outlives_every_process(tmp_path: Path) -> None:
    tier = opened(disk=tmp_path)
    write(tier, 1, 2)
    tier.close()
    again = opened(disk=tmp_path)
    assert found(again, 1, 2) == 2 and read(again, 2) == "disk"
    again.close()


@pytest.mark.parametrize("what", ["a byte", "the end", "another block", "a pipe"])
def test_what_is_not_what_it_says_is_not_read_and_goes(memory: str, what: str) -> None:
    tier = opened(memory)
    write(tier, 1, 2)
    directory = tier.levels[0].directory
    path, other = (directory.block_path(tier.key(name_of(number))) for number in (1, 2))
    raw = bytearray(path.read_bytes())
    if what == "a byte":
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)
    elif what == "the end":
        path.write_bytes(raw[:-1])
    elif what == "another block":
        path.write_bytes(other.read_bytes())
    else:
        path.unlink()
        os.mkfifo(path)
    assert read(tier, 1) is None
    assert found(tier, 1) == 0 and not path.exists() and tier.stats().num_wrong == 1
    assert read(tier, 2) == "memory"
    write(tier, 1)
    assert read(tier, 1) == "memory"
    tier.close()


def test_a_file_that_is_gone_is_forgotten(memory: str) -> None:
    tier = opened(memory)
    write(tier, 1)
    tier.levels[0].directory.block_path(tier.key(name_of(1))).unlink()
    assert found(tier, 1) == 1, "the index does not know yet"
    assert tier.levels[0].read(tier.key(name_of(1)), [memoryview(row) for row in content(1)]) == "missing"
    assert found(tier, 1) == 0
    tier.close()


def test_bytes_that_changed_under_the_copy_are_not_kept(memory: str) -> None:
    tier = opened(memory)
    write(tier, 1, is_valid=False)
    assert found(tier, 1) == 0 and tier.stats().num_refused == 1
    assert not list((tier.levels[0].directory.path / "new").iterdir())
    tier.close()


def test_an_open_file_is_read_though_its_name_has_gone(memory: str) -> None:
    tier = opened(memory, blocks=1)
    write(tier, 1)
    with tier.levels[0].directory.block_path(tier.key(name_of(1))).open("rb") as file:
        write(tier, 2)
        assert found(tier, 1) == 0
        assert file.read().endswith(content(1).tobytes())
    tier.close()


def test_only_the_user_can_read_it(memory: str, tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        tier = opened(memory, tmp_path, blocks=1)
        write(tier, 1)
        write(tier, 2)
    finally:
        os.umask(old)
    for level in tier.levels:
        for path in (level.directory.path, *level.directory.path.rglob("*")):
            assert stat.S_IMODE(path.lstat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    tier.close()


def test_a_directory_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvbaton-tier").mkdir(mode=0o755)
    with pytest.raises(LocalError, match="chmod 700"):
        opened(disk=tmp_path)
    (tmp_path / "kvbaton-tier").rmdir()
    (tmp_path / "kvbaton-tier").symlink_to(tmp_path)
    with pytest.raises(LocalError, match="this user"):
        opened(disk=tmp_path)


def test_more_than_there_is_room_for_is_refused(tmp_path: Path, memory: str) -> None:
    with pytest.raises(LocalError, match="has room for"):
        open_tier(TierOptions(disk_dir=tmp_path, disk_bytes=1 << 60), FINGERPRINT, LAYOUT, "test")
    with pytest.raises(LocalError, match="has room for") as told:
        open_tier(TierOptions(1 << 60, memory), FINGERPRINT, LAYOUT, "test")
    assert told.value.field == "kv_tier_memory_mib"


def test_keys_differ_by_all_that_decides_the_bytes(tmp_path: Path) -> None:
    other_model = fingerprint_of(LAYOUT, "another revision", "rope")
    other_layout = KVLayout(3, 2, 16, 32, "float32")
    names = {
        namespace(FINGERPRINT, LAYOUT, "test"),
        namespace(other_model, LAYOUT, "test"),
        namespace(FINGERPRINT, other_layout, "test"),
        namespace(FINGERPRINT, LAYOUT, "int8"),
    }
    assert len(names) == 4
    one, other = opened(disk=tmp_path), opened(disk=tmp_path, computed_by="int8")
    write(one, 1)
    assert found(other, 1) == 0 and read(other, 1) is None
    one.close()
    other.close()


def test_the_name_in_memory_is_the_fleets_secret() -> None:
    assert memory_name("key", "") == memory_name("key", "") != memory_name("another key", "")
    assert memory_name("", "") != memory_name("", "/disk:1")
    assert memory_directory(memory_name("key", "")).name.startswith("kvbaton-tier-")
    with pytest.raises(LocalError):
        memory_directory("../etc")


def test_the_size_on_disk_is_read_or_refused(tmp_path: Path) -> None:
    assert parse_disk("") == (None, 0)
    assert parse_disk("/a/b:c:0.5") == (Path("/a/b:c"), 1 << 29)
    for wrong in ("/a/b", "/a/b:", ":4", "/a/b:-1", "/a/b:many", "/a/b:nan", "/a/b:inf"):
        with pytest.raises(LocalError, match="DIR:GiB"):
            parse_disk(wrong)
    assert tier_options(3, "", "", "key").memory_bytes == 3 * MIB


def test_a_damaged_index_begins_anew(tmp_path: Path) -> None:
    tier = opened(disk=tmp_path)
    write(tier, 1)
    tier.close()
    for path in (tmp_path / "kvbaton-tier").glob("index.sqlite*"):
        path.write_bytes(b"damage" * 1000)
    again = opened(disk=tmp_path)
    assert found(again, 1) == 0 and not list(again.levels[0].directory.block_files())
    write(again, 1)
    assert read(again, 1) == "disk"
    again.close()


def break_index(level: TierLevel, how: str) -> None:
    """From now on no block is let in: ``full`` once a page more would be needed, ``commit`` not before the very end."""
    database = level.index._db
    match how:
        case "insert":
            database.execute("CREATE TRIGGER broken BEFORE INSERT ON blocks BEGIN SELECT RAISE(ABORT, 'no'); END")
        case "delete":
            database.execute("CREATE TRIGGER broken BEFORE DELETE ON blocks BEGIN SELECT RAISE(ABORT, 'no'); END")
        case "full":
            num_pages = database.execute("PRAGMA page_count").fetchone()[0]
            database.execute(f"PRAGMA max_page_count = {num_pages}")
        case "commit":
            database.execute("CREATE TABLE nobody (key BLOB PRIMARY KEY)")
            database.execute("CREATE TABLE pending (key REFERENCES nobody DEFERRABLE INITIALLY DEFERRED)")
            database.execute(
                "CREATE TRIGGER broken AFTER INSERT ON blocks BEGIN INSERT INTO pending VALUES (new.key); END"
            )
            database.execute("PRAGMA foreign_keys = ON")


def mend_index(level: TierLevel) -> None:
    level.index._db.execute("DROP TRIGGER IF EXISTS broken")
    level.index._db.execute("PRAGMA max_page_count = 1000000")


def assert_agree(level: TierLevel) -> None:
    """What has a name is in the index and within the bound, and nothing else lies about."""
    held = {key.hex() for key in level.index.held_keys()}
    assert {path.name for path in level.directory.block_files()} == held
    assert not list((level.directory.path / "new").iterdir())
    taken = sum(path.stat().st_blocks * 512 for path in level.directory.block_files())
    assert taken <= level.index.max_bytes and level.index.num_bytes == len(held) * BLOCK_BYTES
    level.index.check()


@pytest.mark.parametrize("how", ["insert", "commit", "delete"])
def test_a_change_of_the_index_that_fails_changes_no_file(memory: str, tmp_path: Path, how: str) -> None:
    """Case: the disk is full, or another process hangs with its lock, when files have their names already."""
    tier = opened(memory, tmp_path, blocks=2, disk_blocks=2)
    for number in range(4):
        write(tier, number)
    for broken, where in zip(tier.levels, ("memory", "disk"), strict=True):
        before = tier.stats()
        break_index(broken, how)
        write(tier, 7)
        assert tier.stats().num_errors == before.num_errors + 1
        for level in tier.levels:
            assert_agree(level)
        assert [read(tier, number) for number in (0, 1)] == ["disk"] * 2, "its victims are back"
        if where == "memory":
            assert tier.lacks(name_of(7)) and [read(tier, number) for number in (2, 3)] == ["memory"] * 2
        mend_index(broken)
    for number in (8, 9):
        write(tier, number)
        assert read(tier, number) == "memory"
    for level in tier.levels:
        assert_agree(level)
    tier.close()


def test_a_full_index_lets_nothing_in_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    """SQLite gives up such a change by itself."""
    tier = opened(disk=tmp_path, disk_blocks=400)
    level, number = tier.levels[0], 0
    break_index(level, "full")
    while not level.counts.num_errors:
        write(tier, number)
        number += 1
    assert_agree(level)
    assert tier.lacks(name_of(number - 1)) and len(level.index) == number - 1
    mend_index(level)
    write(tier, number - 1)
    assert read(tier, number - 1) == "disk"
    assert_agree(level)
    tier.close()


def test_a_wrong_block_goes_though_the_index_keeps_it(memory: str) -> None:
    tier = opened(memory)
    write(tier, 1)
    level = tier.levels[0]
    path = level.directory.block_path(tier.key(name_of(1)))
    path.write_bytes(path.read_bytes()[:-1])
    break_index(level, "delete")
    assert read(tier, 1) is None and not path.exists()
    mend_index(level)
    assert read(tier, 1) is None and found(tier, 1) == 0
    write(tier, 1)
    assert read(tier, 1) == "memory"
    assert_agree(level)
    tier.close()


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[4])
from pathlib import Path
import kvbaton.kv.tier_level as tier_level
from kv.test_tier import opened, write
tier = opened(disk=Path(sys.argv[1]), disk_blocks=3)
write(tier, 1, 2)
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
level = tier.levels[0]
publish, retire = level._publish, level._retire
match sys.argv[2]:
    case "before it has its name":
        level._publish = die
    case "after it has its name":
        level._publish = lambda key: (publish(key), die())
    case "after a victim lost its name":
        level._retire = lambda key: (retire(key), die())
    case "before the victim's file is gone":
        level.let_go = die
if sys.argv[3] == "full":
    write(tier, 3)
    tier.find([(3).to_bytes(16, "big")], 0.0, 0.0)
write(tier, 4)
"""


@pytest.mark.parametrize(
    ("moment", "fill"),
    [
        ("before it has its name", "room"),
        ("after it has its name", "room"),
        ("after a victim lost its name", "full"),
        ("before the victim's file is gone", "full"),
    ],
)
def test_a_writer_that_is_killed_leaves_nothing_wrong(tmp_path: Path, moment: str, fill: str) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), moment, fill, str(Path(__file__).parents[1])]
    killed = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    tier = opened(disk=tmp_path, disk_blocks=3)
    level = tier.levels[0]
    held = [number for number in range(1, 5) if read(tier, number)]
    assert {1, 2, 3, 4}.issuperset(held) and len(held) >= 2
    assert not list((level.directory.path / "new").iterdir())
    assert {path.name for path in level.directory.block_files()} == {tier.key(name_of(n)).hex() for n in held}
    for number in range(1, 5):
        write(tier, number)
    assert [read(tier, number) for number in (2, 3, 4)] == ["disk"] * 3
    level.index.check()
    tier.close()


def test_memory_of_killed_processes_is_swept_and_of_living_ones_is_not() -> None:
    dead, living = secrets.token_hex(8), secrets.token_hex(8)
    script = (
        "import os, signal, sys; from kvbaton.kv.tier_directory import TierDirectory, memory_directory;"
        "TierDirectory(memory_directory(sys.argv[1]), True); assert memory_directory(sys.argv[1]).exists();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", script, dead], timeout=120).returncode == -signal.SIGKILL
    directory = TierDirectory(memory_directory(living), passing=True)
    directory.settle()
    swept = sweep_tiers()
    assert_goes(memory_directory(dead))
    assert memory_directory(living).exists()
    assert memory_directory(living).name not in swept
    directory.close()
    assert_goes(memory_directory(living))


def test_the_last_one_takes_the_memory_away(memory: str) -> None:
    first = TierDirectory(memory_directory(memory), passing=True)
    assert first.alone
    first.settle()
    second = TierDirectory(memory_directory(memory), passing=True)
    assert not second.alone
    level = TierLevel("memory", second, BLOCK_BYTES)
    first.close()
    assert memory_directory(memory).exists()
    level.close()
