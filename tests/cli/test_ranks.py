"""``--tp`` and its two kin: what a fleet's processes are told, and what is refused before one is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import preflight
from kvbaton.cli.up import Progress, Start, complete, ranks_of_roles
from kvbaton.config import FleetSettings, ModelSettings, WorkerSettings, load
from kvbaton.types import LocalError
from kvbaton.workers.process import make_worker

HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72, "head_dim": 8}


def test_each_role_has_its_number_of_ranks() -> None:
    assert ranks_of_roles(1, None, None) == {"prefill": 1, "decode": 1, "both": 1}
    assert ranks_of_roles(3, 2, None) == {"prefill": 2, "decode": 3, "both": 3}


def test_workers_are_told_their_ranks_and_get_cores_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton.cli.up._available", lambda: list(range(6)))
    start = Start(FleetSettings(), tmp_path, {}, "info", {"prefill": 2, "decode": 1, "both": 1})
    _, (prefill, decode) = start.child_specs(["prefill", "decode"])
    told = [load(environ=spec.environ).worker for spec in (prefill, decode)]
    assert [(one.tp, one.cores) for one in told] == [(2, (0, 1, 2, 3)), (1, (4, 5))]
    assert load(environ=start.one_more("prefill", "prefill-1").environ).worker.tp == 2


def test_heads_that_cannot_be_shared_are_refused_before_anything_starts(make_tiny_model: Callable[..., Path]) -> None:
    model = ModelSettings(dir=str(make_tiny_model("llama", **HEADS)), kv_blocks=8)
    fleet = FleetSettings(model=model)
    complete(fleet, [("prefill", 2), ("decode", 3)], Progress())
    with pytest.raises(LocalError, match="4") as caught:
        complete(fleet, [("prefill", 1), ("decode", 4)], Progress())
    assert caught.value.field == "tp"


def test_ranks_are_of_the_embedded_engine() -> None:
    with pytest.raises(LocalError, match="--tensor-parallel-size") as caught:
        preflight.check_ranks(Path("/nowhere"), "vllm", 2)
    assert caught.value.field == "tp"


def test_no_ranks_make_no_worker() -> None:
    with pytest.raises(LocalError) as caught:
        load(flags={"worker": {"tp": 0}})
    assert caught.value.field == "tp"
    assert load(flags={"worker": {"tp": 2}}).worker == WorkerSettings(tp=2)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"worker": {"transport": "nixl"}}, "transport"),
        ({"worker": {"kv_tier_memory_mib": 64}}, "kv_tier_memory_mib"),
        ({"worker": {"kv_tier_disk": "{directory}:1"}}, "kv_tier_disk"),
        ({"worker": {"kv_tier_store": "mooncake://127.0.0.1:9"}}, "kv_tier_store"),
        ({"model": {"backend": "native"}}, "backend"),
        ({"model": {"weights": "int8"}}, "weights"),
        ({"model": {"weights": "int4"}}, "weights"),
        ({"model": {"device": "cuda"}}, "device"),
    ],
)
def test_what_several_ranks_have_not_is_refused_with_its_field_and_a_way_out(
    make_tiny_model: Callable[..., Path], tmp_path: Path, settings: dict[str, dict[str, Any]], field: str
) -> None:
    given = {
        group: {k: v.format(directory=tmp_path) if isinstance(v, str) else v for k, v in values.items()}
        for group, values in settings.items()
    }
    model = {
        "dir": str(make_tiny_model("llama", **HEADS)),
        "kv_blocks": 8,
        "dtype": "float32",
        **given.get("model", {}),
    }
    fleet = load(flags={"model": model, "worker": {"tp": 2, **given.get("worker", {})}})
    with pytest.raises(LocalError) as caught:
        make_worker(fleet.model, fleet.worker)
    assert caught.value.field == field and caught.value.fix, str(caught.value)
