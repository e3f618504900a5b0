"""kv/shared_pool: real segments, a real second process, a real kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid

import numpy as np
import pytest

from kvbaton.kv import shared_pool
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool, segment_name, sweep_stale
from kvbaton.types import LocalError, RemoteError

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")


@pytest.fixture
def name():
    name = segment_name(uuid.uuid4().hex)
    yield name
    (shared_pool.SHM_DIR / name).unlink(missing_ok=True)


def test_anonymous_pool_has_the_size_of_its_layout_and_no_name():
    pool = SharedPool.create(LAYOUT, 5)
    assert pool.name is None and pool.buffer.nbytes == LAYOUT.pool_bytes(5) and not pool.buffer.any()
    assert pool.generations.shape == (5,)
    pool.buffer[:] = 1
    pool.close()


def test_a_second_mapping_sees_bytes_and_generations_and_cannot_write(name):
    owner = SharedPool.create(LAYOUT, 5, name, incarnation="abc")
    reader = SharedPool.attach(name)
    assert (reader.layout, reader.num_blocks, reader.incarnation) == (LAYOUT, 5, "abc")
    owner.view()[2, 3, :] = 7
    owner.generations[4] = 9
    assert (reader.view()[2, 3] == 7).all() and reader.generations[4] == 9
    with pytest.raises(ValueError, match="read-only"):
        reader.buffer[0] = 1
    owner.unlink()
    owner.close()
    assert reader.generations[4] == 9, "a reader's mapping outlives its owner"
    reader.close()


def test_the_segment_is_private(name):
    pool = SharedPool.create(LAYOUT, 1, name)
    assert (shared_pool.SHM_DIR / name).stat().st_mode & 0o777 == 0o600
    pool.unlink()
    pool.close()


def test_a_taken_name_is_refused(name):
    pool = SharedPool.create(LAYOUT, 1, name)
    with pytest.raises(LocalError, match="exists already"):
        SharedPool.create(LAYOUT, 1, name)
    pool.unlink()
    pool.close()


def test_a_pool_larger_than_shared_memory_is_an_error_at_start_and_leaves_nothing(name):
    status = os.statvfs(shared_pool.SHM_DIR)
    too_many = 2 * status.f_blocks * status.f_frsize // LAYOUT.block_bytes
    with pytest.raises(LocalError, match="too small"):
        SharedPool.create(LAYOUT, too_many, name)
    assert not (shared_pool.SHM_DIR / name).exists()


@pytest.mark.parametrize("bad", ["../etc/passwd", "kvbaton-../x", "other", "kvbaton-", "kvbaton-a/b", "kvbaton-a\0b"])
def test_a_peer_cannot_name_a_file_elsewhere(bad):
    with pytest.raises(LocalError, match="bad shared memory name"):
        SharedPool.attach(bad)


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"x" * 8192, b"KVBATON1\xff\xff\xff\xff" + b"\xc1" * 9000])
def test_a_segment_that_is_not_ours_is_refused(name, content):
    (shared_pool.SHM_DIR / name).write_bytes(content)
    with pytest.raises(RemoteError):
        SharedPool.attach(name)


def test_a_truncated_segment_is_refused(name):
    pool = SharedPool.create(LAYOUT, 5, name)
    pool.close()
    os.truncate(shared_pool.SHM_DIR / name, 8192)
    with pytest.raises(RemoteError, match="bytes"):
        SharedPool.attach(name)


def test_a_missing_segment_is_refused(name):
    with pytest.raises(RemoteError, match="cannot open"):
        SharedPool.attach(name)


OWNER = """
import sys
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool
pool = SharedPool.create(KVLayout(1, 1, 8, 4, "float32"), 2, sys.argv[1])
print("made", flush=True)
sys.stdin.read()
"""


def test_sweep_removes_only_what_a_dead_owner_left(name):
    living = SharedPool.create(LAYOUT, 1, segment_name(uuid.uuid4().hex))
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout.readline() == "made\n"
        assert name not in sweep_stale()
        reader = SharedPool.attach(name)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        removed = sweep_stale()
    assert name in removed and living.name not in removed
    assert (shared_pool.SHM_DIR / living.name).exists() and not (shared_pool.SHM_DIR / name).exists()
    assert int(reader.generations.sum()) == 0, "the reader's mapping stays valid after the sweep"
    reader.close()
    living.unlink()
    living.close()


ENDS_AT_ONCE = """
import os, sys
from kvbaton.kv import shared_pool
from kvbaton.kv.layout import KVLayout
pool = shared_pool.SharedPool.create(KVLayout(1, 1, 8, 4, "float32"), 2, sys.argv[1])
fd = shared_pool._create_locked(shared_pool.SHM_DIR / sys.argv[2])  # as far as a thread may have come
peers = shared_pool.SharedPool.attach(sys.argv[3])
shared_pool.unlink_own()
os._exit(7)
"""


def test_one_that_ends_at_once_takes_its_own_names_and_no_peers(name):
    half_made = segment_name(uuid.uuid4().hex)
    peers = SharedPool.create(LAYOUT, 1, segment_name(uuid.uuid4().hex))
    assert subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, name, half_made, peers.name]).returncode == 7
    assert not (shared_pool.SHM_DIR / name).exists() and not (shared_pool.SHM_DIR / half_made).exists()
    assert (shared_pool.SHM_DIR / peers.name).exists()
    peers.unlink()
    peers.close()


def test_views_held_elsewhere_survive_close():
    pool = SharedPool.create(LAYOUT, 2)
    view = np.asarray(pool.buffer)
    pool.close()
    view[:] = 3
    assert (view == 3).all()
