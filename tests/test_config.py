"""Settings: sources and their order, unknown keys, ranges, and the way to a child process and back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from kvbaton.config import (
    FleetSettings,
    MemberSettings,
    ModelSettings,
    RouterSettings,
    WorkerSettings,
    load,
    to_environ,
    without_settings,
)
from kvbaton.types import LocalError

DOCS = Path(__file__).resolve().parents[1] / "docs"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_nothing_given_is_the_defaults() -> None:
    assert load(environ={}) == FleetSettings()


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    path = write(
        tmp_path, "[router]\nport = 1\nhost = 'a'\nthreshold_tokens = 5\n[worker]\nrole = 'decode'\ncores = [1, 2]"
    )
    environ = {"KVBATON_ROUTER_PORT": "2", "KVBATON_ROUTER_HOST": "b", "KVBATON_WORKER_CORES": "3"}
    fleet = load(path, environ, {"router": {"port": 3, "threshold_tokens": None}})
    assert (fleet.router.port, fleet.router.host, fleet.router.threshold_tokens) == (3, "b", 5)
    assert (fleet.worker.role, fleet.worker.cores) == ("decode", (3,))


def test_members_get_names(tmp_path: Path) -> None:
    text = "".join(
        f'[[workers]]\nurl = "http://10.0.0.{i}:1"\nrole = "{role}"\n'
        for i, role in enumerate(("decode", "decode", "prefill"))
    )
    assert [m.name for m in load(write(tmp_path, text), {}).workers] == ["decode-0", "decode-1", "prefill-0"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[router]\nprot = 1", "router.prot; did you mean router.port?"),
        ("[rooter]\n", "section rooter; did you mean router?"),
        ("[router]\nport = 'x'", "router.port"),
        ("[router]\nport = 70000", "router.port"),
        ("[router]\nthreshold_tokens = -1", "threshold_tokens"),
        ("[router]\nrequest_timeout_s = 0", "router.request_timeout_s must be above 0"),
        ("[worker]\nrole = 'x'", "worker.role"),
        ("[worker]\nmax_running = 0", "worker.max_running"),
        ("worker = 3", "[worker] must be a table"),
        ("[[workers]]\nurl = 'ftp://x'", "not http://host:port"),
        ("[[workers]]\nrole = 'both'", "workers[0]"),
        ("[[workers]]\nurl = 'http://x:1'\nrul = 1", "workers.rul; did you mean workers.url?"),
        ("[[workers]]\nurl = 'http://x:1'\nname = 'a'\n[[workers]]\nurl = 'http://y:1'\nname = 'a'", "two workers"),
        ("[router", "not valid TOML"),
    ],
)
def test_bad_files_are_refused_by_key_and_fix(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(LocalError) as caught:
        load(write(tmp_path, text), {})
    assert told in str(caught.value) and caught.value.field


def test_bad_variables_are_refused() -> None:
    with pytest.raises(LocalError, match="did you mean KVBATON_ROUTER_PORT"):
        load(environ={"KVBATON_ROUTER_PROT": "1"})
    with pytest.raises(LocalError, match=r"router\.port"):
        load(environ={"KVBATON_ROUTER_PORT": "many"})
    assert load(environ={"KVBATON_SHARED": "x", "KVBATON_INTERNAL_KEY": "k"}) == FleetSettings()


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("model", ModelSettings(dir="/a b", kv_blocks=7)),
        ("worker", WorkerSettings(role="prefill", cores=(1, 3), drain_s=2.5)),
        ("router", RouterSettings(port=9, threshold_tokens=0)),
    ],
)
def test_settings_reach_a_child_unchanged(section: str, settings: Any) -> None:
    assert getattr(load(environ=to_environ(**{section: settings})), section) == settings


def test_a_child_inherits_no_setting_and_no_key() -> None:
    environ = {"PATH": "x", "KVBATON_INTERNAL_KEY": "k", "KVBATON_ROUTER_PORT": "1", "KVBATON_SHARED": "s"}
    assert without_settings(environ) == {"PATH": "x", "KVBATON_SHARED": "s"}


def test_every_key_is_documented() -> None:
    text = (DOCS / "api.md").read_text()
    for cls in (ModelSettings, WorkerSettings, RouterSettings, MemberSettings):
        for item in dataclasses.fields(cls):
            assert f"`{item.name}`" in text, f"{cls.__name__}.{item.name}"


@pytest.mark.parametrize("key", ["canary_interval_s", "stream_stall_s"])
def test_what_may_be_never_may_be_zero_and_not_less(key: str) -> None:
    assert getattr(load(flags={"router": {key: 0.0}}).router, key) == 0.0
    with pytest.raises(LocalError, match=key):
        load(flags={"router": {key: -1.0}})
