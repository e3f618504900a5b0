"""Servers of other engines beside workers: they start first and end last, and agree with what the worker expects."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from deploy.test_kubernetes import SPECS, by_kind

from kvbaton.cli.main import main
from kvbaton.deploy import engines, kubernetes
from kvbaton.deploy.spec import DeploySpec
from kvbaton.deploy.write import render_secret
from kvbaton.types import LocalError, Role
from kvbaton.workers.vllm_kv_follow import parse_endpoints
from kvbaton.workers.vllm_server import ServerSpec, key_for_servers

OTHERS = ("vllm", "sglang")


def pods(name: str) -> dict[str, dict[str, Any]]:
    """By pool."""
    found = by_kind(SPECS[name], "Deployment")
    return {pool: found[f"kvbaton-{pool}"]["spec"]["template"]["spec"] for pool in SPECS[name].pools}


def flags(arguments: list[str]) -> dict[str, str]:
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return {flag: value for flag, value in pairs if flag.startswith("--")}


@pytest.mark.parametrize("name", OTHERS)
def test_the_server_has_the_gpus_and_is_there_before_the_worker(name: str) -> None:
    for pool, pod in pods(name).items():
        (server,), (worker,) = pod["initContainers"], pod["containers"]
        assert server["restartPolicy"] == "Always" and server["startupProbe"]["httpGet"]["path"] == "/health"
        wanted = SPECS[name].pools[pool].resources
        limits = server["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == str(wanted.gpus) and limits["rdma/hca_shared_devices_a"] == "1"
        assert server["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
        assert not any("gpu" in resource for resource in worker["resources"]["limits"])
        assert worker["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", OTHERS)
def test_worker_and_server_speak_of_one_port_one_key_and_one_model(name: str) -> None:
    spec = SPECS[name]
    for pool, pod in pods(name).items():
        (server,), (worker,) = pod["initContainers"], pod["containers"]
        asked, told = flags(worker["args"]), flags(server["args"])
        assert asked["--engine"] == name and asked["--engine-url"] == f"http://127.0.0.1:{told['--port']}"
        assert told["--host"] == "0.0.0.0", "peers reach it at the pod's address"
        assert asked["--kv-host"] == "$(POD_IP)", "the server's own address, localhost, means nothing to peers"
        assert told["--served-model-name"] == spec.model.rpartition("/")[2] and told["--dtype"] == asked["--dtype"]
        key = {"secretKeyRef": {"name": spec.secret_name, "key": "engine-key"}}
        for container in (server, worker):
            values = {each["name"]: each.get("valueFrom") for each in container["env"]}
            assert values[engines.KEY_NAMES[spec.engine]] == key
        assert "KVBATON_INTERNAL_KEY" not in {each["name"] for each in server["env"]}
        mounts = {each["name"] for container in (server, worker) for each in container["volumeMounts"]}
        assert mounts <= {each["name"] for each in pod["volumes"]}
        assert pool in spec.pools
    secret = render_secret(spec, "fleet")["data"]["engine-key"]
    assert base64.b64decode(secret).decode() == key_for_servers("fleet") != "fleet"


def test_vllm_gets_what_a_worker_gives_a_vllm_of_its_own(tmp_path: Path) -> None:
    spec, roles = SPECS["vllm"], dict[str, Role](prefill="prefill", decode="decode")
    for pool, pod in pods("vllm").items():
        server, worker = pod["initContainers"][0], pod["containers"][0]
        own = ServerSpec(
            "python3", Path("/models") / spec.model, spec.model, roles[pool], "0.0.0.0", engines.ENGINE_PORT, 0,
            spec.dtype, 1, 1, (), "key", tmp_path, events_dir=tmp_path,
        )  # fmt: skip
        given = flags(server["args"])
        # A pod has a whole device, so its server finds out by itself how much fits.
        assert flags(own.command()[3:]).keys() - given.keys() == {"--max-model-len"}
        transfer = json.loads(given["--kv-transfer-config"])
        assert transfer == {
            "kv_connector": "NixlConnector",
            "kv_role": f"kv_{ {'prefill': 'producer'}.get(pool, 'consumer') }",
            "kv_load_failure_policy": "fail",
        }
        events = json.loads(given["--kv-events-config"])
        followed = parse_endpoints(flags(worker["args"])["--engine-events"])
        assert (events["endpoint"], events["replay_endpoint"]) == (followed.live, followed.replay)
        assert given["--tensor-parallel-size"] == "2" and given["--gpu-memory-utilization"] == "0.92"
        named = {each["name"]: each for each in server["env"]}
        assert named["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        assert own.environ().keys() - {*named, "VLLM_CPU_KVCACHE_SPACE"} <= set(os.environ)


def test_a_vllm_without_gpus_keeps_its_buffers_on_the_cpu_and_one_pool_both_lends_and_reads() -> None:
    spec = DeploySpec("m", "k:1", engine="vllm", engine_image="v:1", colocated=SPECS["colocated"].colocated)
    pod = by_kind(spec, "Deployment")["kvbaton-colocated"]["spec"]["template"]["spec"]
    transfer = json.loads(flags(pod["initContainers"][0]["args"])["--kv-transfer-config"])
    assert transfer == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",  # as those that a worker starts
        "kv_buffer_device": "cpu",
    }


def test_sglang_is_started_for_the_role_of_its_pool() -> None:
    for pool, pod in pods("sglang").items():
        given = flags(pod["initContainers"][0]["args"])
        assert given["--disaggregation-mode"] == pool and "--enable-metrics" in given
        assert ("--disaggregation-bootstrap-port" in given) == (pool == "prefill")
        assert "--api-key" not in given and "SGLANG_API_KEY" not in str(pod["initContainers"][0]["args"])
    spec = msgspec.structs.replace(SPECS["sglang"], prefill=None, decode=None, colocated=SPECS["colocated"].colocated)
    pod = by_kind(spec, "Deployment")["kvbaton-colocated"]["spec"]["template"]["spec"]
    assert "--disaggregation-mode" not in flags(pod["initContainers"][0]["args"])


def test_the_key_of_sglang_is_on_no_command_line(tmp_path: Path) -> None:
    """The command as it is written, and a server that tells its arguments and what others see of them."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "launch_server.py").write_text(
        "import json, pathlib, sys\n"
        "if __name__ == '__main__':\n"
        "    seen = pathlib.Path('/proc/self/cmdline').read_text()\n"
        "    print(json.dumps([sys.argv[1:], seen]))\n"
    )
    server = pods("sglang")["prefill"]["initContainers"][0]
    key = next(each for each in server["env"] if each["name"] == "SGLANG_API_KEY")
    assert "secretKeyRef" in key["valueFrom"]
    done = subprocess.run(
        [sys.executable, *server["command"][1:], *server["args"]], capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(tmp_path), "SGLANG_API_KEY": "in confidence"},
    )  # fmt: skip
    arguments, seen = json.loads(done.stdout)
    assert arguments == [*server["args"], "--api-key", "in confidence"] and "in confidence" not in seen


def test_the_pools_of_a_pair_reach_each_other_at_every_port_and_nobody_else_does() -> None:
    policies = by_kind(SPECS["vllm"], "NetworkPolicy")
    for pool, other in (("prefill", "decode"), ("decode", "prefill")):
        whole = [rule for rule in policies[f"kvbaton-{pool}"]["spec"]["ingress"] if "ports" not in rule]
        assert [rule["from"][0]["podSelector"]["matchLabels"]["kvbaton.dev/role"] for rule in whole] == [other]
        for rule in policies[f"kvbaton-{pool}"]["spec"]["ingress"]:
            assert all(port["port"] == kubernetes.WORKER_PORT for port in rule.get("ports", []))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"engine": "vllm"}, "engine_image"),
        ({"engine_image": "v:1"}, "engine"),
        ({"engine": "sglang", "engine_image": "s:1", "transport": "shm"}, "transport"),
        ({"engine": "vllm", "engine_image": "v:latest"}, "engine_image"),
    ],
)
def test_what_does_not_fit_an_engine_is_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(LocalError) as caught:
        DeploySpec("m", "k:1", colocated=SPECS["colocated"].colocated, **given)
    assert caught.value.field == field


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "m", "--image", "k:1", "--prefill", "1", "--decode", "1", "--output", str(tmp_path / "o")]
    assert main(["deploy", *arguments, "--engine", "vllm", "--engine-image", "vllm/vllm-openai:v0.32.0"]) == 0
    assert "image: vllm/vllm-openai:v0.32.0" in (tmp_path / "o" / "decode.yaml").read_text()
    assert "engine-key" in (tmp_path / "o" / "secret.yaml").read_text()
