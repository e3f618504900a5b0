"""The canary on real engines: right answers on every pair, and a worker with other weights under the same name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from router.fleet import KEY
from router.test_real_fleet import RealFleet, real_fleet
from safetensors.numpy import load_file, save_file

from kvbaton.router.canary import Canary


def make_canary(real: RealFleet) -> Canary:
    fleet = real.fleet
    gateway = fleet.gateway
    return Canary(fleet.registry, fleet.http, gateway._tokenizer, KEY, fleet.metrics)


async def turns(canary: Canary, num: int) -> list[str | None]:
    return [await canary.turn() for _ in range(num)]


async def test_every_pair_says_the_same_and_bytes_move(tiny_model_dir: Path) -> None:
    roles = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}
    async with real_fleet(tiny_model_dir, roles) as real:  # type: ignore[arg-type]
        canary = make_canary(real)
        num_probes = len(list(canary._probes()))
        assert num_probes == 3 * 2 * (1 + 2)
        assert set(await turns(canary, num_probes)) == {"right"}
        assert real.fleet.counter('kvbaton_router_canary_total{result="right"}') == num_probes
        for name in ("d0", "d1"):
            assert real.workers[name].stats().transfer_bytes_received > 0
        assert real.fleet.counter("kvbaton_router_inflight_requests") == 0


@pytest.fixture
def other_model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The same configuration and name; one tensor differs."""
    for path in tiny_model_dir.iterdir():
        if path.suffix != ".safetensors":
            (tmp_path / path.name).write_bytes(path.read_bytes())
            continue
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith("down_proj.weight"))
        tensors[name] = np.asarray(tensors[name]) * -3
        save_file(tensors, tmp_path / path.name)
    return tmp_path


async def test_a_worker_that_computes_something_else_is_found(tiny_model_dir: Path, other_model_dir: Path) -> None:
    async with real_fleet(tiny_model_dir, {"b0": "both"}) as good, real_fleet(other_model_dir, {"b1": "both"}) as bad:
        canary = make_canary(good)
        num_probes = len(list(canary._probes()))
        assert set(await turns(canary, num_probes)) == {"right"}
        bad_worker, good_worker = bad.fleet.registry.members[0], good.fleet.registry.members[0]
        assert bad_worker.reported is not None and good_worker.reported is not None
        # What a broken kernel looks like: the worker says it has the same weights.
        bad_worker.reported.info = good_worker.reported.info
        good.fleet.registry._members["b1"] = bad_worker
        assert "wrong" in await turns(canary, 2 * num_probes)
        del good.fleet.registry._members["b1"]


async def test_no_answer_is_a_failure_and_never_a_hang(tiny_model_dir: Path) -> None:
    async with real_fleet(tiny_model_dir, {"b0": "both"}) as real:
        canary = make_canary(real)
        assert await canary.turn() == "right"
        member = real.fleet.registry.members[0]
        accepted: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda reader, writer: accepted.append(writer), "127.0.0.1", 0)
        port = silent.sockets[0].getsockname()[1]
        canary._deadline_s = 0.2
        real.fleet.registry._members[member.name].settings = member.settings.__class__(
            f"http://127.0.0.1:{port}", member.settings.role, member.settings.name
        )
        assert await canary.turn() == "failed"
        for writer in accepted:
            writer.close()
            await writer.wait_closed()
        silent.close()


async def test_an_empty_fleet_is_not_probed(tiny_model_dir: Path) -> None:
    async with real_fleet(tiny_model_dir, {"b0": "both"}) as real:
        canary = make_canary(real)
        real.fleet.registry.set_members([])
        assert await canary.turn() is None


@pytest.mark.parametrize("result", ["right", "wrong", "failed"])
def test_the_results_are_those_the_alert_knows(result: str) -> None:
    from kvbaton.deploy.queries import metric

    assert result in metric("kvbaton_router_canary_total").help
