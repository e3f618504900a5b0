"""Which backend runs a model, what happens where the kernels refuse one, and what is said about it."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engine import native
from kvbaton.engine.loader import LoadedModel, LoadOptions, check_model_dir, load
from kvbaton.types import LocalError

MakeModel = Callable[..., Path]


@pytest.fixture
def loaded() -> Any:
    made: list[LoadedModel] = []

    def make(path: Path, **options: Any) -> LoadedModel:
        made.append(load(LoadOptions(model_dir=path, dtype="float32", num_kv_blocks=4, device="cpu", **options)))
        return made[-1]

    yield make
    for model in made:
        model.pool.close()


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_the_kernels_run_what_they_can(tiny_model_dir: Path, loaded: Any, caplog: pytest.LogCaptureFixture) -> None:
    if (reason := native.available()) is not None:
        pytest.skip(reason)
    assert loaded(tiny_model_dir).backend.startswith("native float32")
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        ({"head_dim": 24}, {}, "head_dim 24 is no multiple of 16"),
        ({}, {"kv_dtype": "float16"}, "KV dtype float16 is none of float32, bfloat16, float8_e4m3"),
    ],
)
def test_what_the_kernels_refuse_torch_runs_and_one_line_says_why(
    make_tiny_model: MakeModel,
    loaded: Any,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    options: dict[str, Any],
    told: str,
) -> None:
    if (reason := native.available()) is not None:
        told = reason
    assert loaded(make_tiny_model("llama", **changes), **options).backend == "torch float32 on cpu"
    assert warnings_in(caplog) == [f"plain torch runs the model: {told}"]


def test_without_kernels_torch_runs_the_model(
    tiny_model_dir: Path, loaded: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_library", lambda: "no compiler was here")
    assert loaded(tiny_model_dir).backend == "torch float32 on cpu"
    assert warnings_in(caplog) == ["plain torch runs the model: no compiler was here"]


def test_torch_that_was_asked_for_is_no_reason_to_warn(
    tiny_model_dir: Path, loaded: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert loaded(tiny_model_dir, backend="torch").backend == "torch float32 on cpu"
    assert warnings_in(caplog) == []


@pytest.mark.parametrize(
    ("options", "field", "told"),
    [
        ({"backend": "native"}, "backend", "head_dim 24.*auto or torch"),
        ({"weights": "int8"}, "weights", "int8.*native kernels.*head_dim 24"),
        ({"weights": "int4", "backend": "torch"}, "weights", "int4.*torch was asked for"),
    ],
)
def test_what_only_the_kernels_could_do_is_refused_by_name(
    make_tiny_model: MakeModel, options: dict[str, Any], field: str, told: str
) -> None:
    if native.available() is not None:
        told = "native kernels"
    with pytest.raises(LocalError, match=told) as caught:
        load(LoadOptions(model_dir=make_tiny_model("llama", head_dim=24), device="cpu", num_kv_blocks=4, **options))
    assert caught.value.field == field


def test_a_directory_is_judged_by_the_engine_it_is_for(make_tiny_model: MakeModel, tmp_path: Path) -> None:
    """Another engine may know more architectures and read other weights; a tokenizer the router needs in any case."""
    path = tmp_path / "other"
    shutil.copytree(make_tiny_model("llama"), path)
    (path / "model.safetensors").unlink()
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    with pytest.raises(LocalError, match="MambaForCausalLM"):
        check_model_dir(path)
    check_model_dir(path, embedded=False)
    (path / "tokenizer.json").unlink()
    with pytest.raises(LocalError, match="tokenizer.json"):
        check_model_dir(path, embedded=False)


def test_without_kernels_and_without_torch_it_says_what_to_install(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "_library", lambda: "no compiler was here")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(LocalError, match="no compiler was here, and torch is not installed.*pip install"):
        load(LoadOptions(model_dir=tiny_model_dir, device="cpu", num_kv_blocks=4))


@pytest.mark.parametrize("device", ["cuda:99", "toaster"])
def test_a_device_that_is_not_there(tiny_model_dir: Path, device: str) -> None:
    with pytest.raises(LocalError, match=f"'{device}'") as caught:
        load(LoadOptions(model_dir=tiny_model_dir, backend="torch", device=device, num_kv_blocks=4))
    assert caught.value.field == "device"
