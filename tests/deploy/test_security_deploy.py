"""What is written for Kubernetes agrees with what routers and workers ask for: keys, and where they are read."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deploy.test_kubernetes import SPECS

from kvbaton.cli.router import router_command
from kvbaton.cli.worker import worker_command
from kvbaton.config import load
from kvbaton.deploy.kubernetes import render_pool, render_router
from kvbaton.deploy.spec import DeploySpec
from kvbaton.deploy.write import render_secret
from kvbaton.router.api_keys import load as load_api_keys
from kvbaton.router.door import OPERATOR, check_reach
from kvbaton.transfer.reach import require_secret
from kvbaton.types import LocalError
from kvbaton.workers.process import is_closed

FLEET_KEY = "a key of a fleet, made by deploy"


def pod_of(manifests: list[dict[str, Any]]) -> dict[str, Any]:
    pod: dict[str, Any] = next(each for each in manifests if each["kind"] == "Deployment")["spec"]["template"]["spec"]
    return pod


def settings_of(command: Any, container: dict[str, Any]) -> Any:
    """The flags, read as the process will read them."""
    arguments = [argument.replace("$(POD_IP)", "10.0.0.7") for argument in container["args"][1:]]
    given = command.make_context("x", arguments).params
    flags: dict[str, dict[str, Any]] = {"router": {}, "worker": {}}
    for section, names in (("router", ("host", "api_keys", "allow_anonymous")), ("worker", ("host", "kv_host"))):
        for name in names:
            key = "api_keys_file" if name == "api_keys" else name
            flags[section][key] = given.get(name)
    return load(environ={}, flags=flags)


@pytest.mark.parametrize("name", SPECS)
def test_routers_start_with_the_keys_that_are_written(name: str, tmp_path: Path) -> None:
    """Mounted as files, so that a change of the Secret is read again; not readable for everybody in the pod."""
    spec = SPECS[name]
    pod = pod_of(render_router(spec))
    router = settings_of(router_command, pod["containers"][0]).router
    mount = next(each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "api-keys")
    volume = next(each for each in pod["volumes"] if each["name"] == "api-keys")["secret"]
    assert mount["readOnly"] and volume["secretName"] == spec.secret_name and volume["defaultMode"] & 0o007 == 0
    file = f"{mount['mountPath']}/{volume['items'][0]['path']}"
    assert router.api_keys_file == file and not router.allow_anonymous
    data = render_secret(spec, FLEET_KEY)["data"]
    path = tmp_path / "api-keys"
    path.write_bytes(base64.b64decode(data[volume["items"][0]["key"]]))
    path.chmod(volume["defaultMode"])
    keys = load_api_keys(str(path), {})
    assert keys is not None
    check_reach(router, keys, base64.b64decode(data["internal-key"]).decode())
    tenant, key = path.read_text().split()
    found = keys.find(key.encode())
    assert tenant == OPERATOR and found is not None and found.tenant == OPERATOR
    assert FLEET_KEY not in key


def test_anonymous_routers_are_so_by_a_word(tmp_path: Path) -> None:
    spec: DeploySpec = msgspec.structs.replace(next(iter(SPECS.values())), anonymous=True)
    pod = pod_of(render_router(spec))
    router = settings_of(router_command, pod["containers"][0]).router
    check_reach(router, None, FLEET_KEY)
    assert "api-keys" not in render_secret(spec, FLEET_KEY)["data"] and "api-keys" not in str(pod)
    with pytest.raises(LocalError, match="--api-keys"):
        check_reach(msgspec.convert({**vars(router), "allow_anonymous": False}, type(router)), None, FLEET_KEY)


@pytest.mark.parametrize("name", SPECS)
def test_workers_have_the_secret_and_generate_for_routers_alone(name: str) -> None:
    spec = SPECS[name]
    for pool, what in spec.pools.items():
        pod = pod_of(render_pool(spec, pool, what))
        container = next(each for each in pod["containers"] if each["name"] == "worker")
        worker = settings_of(worker_command, container).worker
        with pytest.raises(LocalError, match="KVBATON_INTERNAL_KEY"):
            require_secret("the worker", worker.host, b"")
        assert is_closed(worker)
        variable = next(each for each in container["env"] if each["name"] == "KVBATON_INTERNAL_KEY")
        assert variable["valueFrom"]["secretKeyRef"] == {"name": spec.secret_name, "key": "internal-key"}
