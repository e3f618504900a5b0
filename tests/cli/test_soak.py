"""A fleet at saturation while clients leave and workers are killed: the benchmark's soak, with a tiny model.

KVBATON_SOAK_S sets how long (default 1,200 s); the seed is printed, and KVBATON_SOAK_SEED sets it.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import soak
from kvbaton.kv.layout import KVLayout
from kvbaton.kv.shared_pool import SharedPool, segment_name

HELD = ("num_blocks_used", "num_blocks_pinned", "num_leases", "num_active", "num_running", "num_waiting")


@pytest.mark.slow
def test_soak(tiny_model_dir: Path, tmp_path: Path) -> None:
    duration_s = float(os.environ.get("KVBATON_SOAK_S", "1200"))
    seed = int(os.environ.get("KVBATON_SOAK_SEED", random.randrange(2**32)))
    print(f"seed {seed}")
    result = soak.soak(
        soak.Settings(
            minutes=duration_s / 60,
            clients=16,
            kill_every_s=min(10.0, duration_s / 4),
            longest_chars=380,  # of the model's 512 tokens; the longest answer needs 96
            seed=seed,
            log=str(tmp_path / "up.log"),
            fleet=(
                *("--model", str(tiny_model_dir), "--dtype", "float32", "--kv-blocks", "64"),
                *("--threshold-tokens", "16", "--log-dir", str(tmp_path / "logs")),
            ),
        )
    )
    assert result["passed"], result
    assert result["kills"] > 0 and result["canaries"] > 0 and "hung up" in result["outcomes"], result


def member(**changes: object) -> dict[str, object]:
    return {"name": "d0", "state": "up", "stats": {**dict.fromkeys(HELD, 0), **changes}}


def test_what_is_held_is_found() -> None:
    assert soak.holding({"members": [member(), member()]}) == []
    for gauge in HELD:
        assert soak.holding({"members": [member(), member(**{gauge: 1})]}) == [f"d0: {gauge} 1"]
    assert soak.holding({"members": [{"name": "p0", "state": "down", "stats": None}]}) == ["p0 is down"]


def test_what_is_left_behind_is_found() -> None:
    name = segment_name(f"soak-{os.getpid()}")
    script = (
        "import sys; from kvbaton.kv.layout import KVLayout; from kvbaton.kv.shared_pool import SharedPool\n"
        "pool = SharedPool.create(KVLayout(1, 1, 8, 8, 'float32'), 1, sys.argv[1]); print('made', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "made\n"
        assert f"process {owner.pid}" in soak.leftovers([owner.pid], set())
        assert name not in soak.leftovers([], set()), "its owner lives"
        owner.send_signal(signal.SIGKILL)
    assert name in soak.leftovers([], set()) and name not in soak.leftovers([], soak.segments())
    pool = SharedPool.attach(name)
    assert pool.layout == KVLayout(1, 1, 8, 8, "float32")
    pool.owned = True
    pool.unlink()
    pool.close()
