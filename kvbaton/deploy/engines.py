"""The server of another engine beside a worker in one pod: vLLM's or SGLang's, as a sidecar.

Invariants: the server starts before the worker and ends after it, so that a drain still has somebody to compute; what
it is called, its key and its parallelism agree with what the worker and its peers expect. Knows nothing about pools,
policies or probes of our own processes. Its flags were read from the engines' documentation; where they are the same as
those of a server that a worker starts itself, a test compares them.
"""

from __future__ import annotations

import json
import shlex
from typing import Any

from kvbaton.deploy.spec import DeploySpec, EngineName, PoolName, Resources

ENGINE_PORT = 8200
SIDE_CHANNEL_PORT = 5600  # vLLM: where peers ask for what a transfer needs
BOOTSTRAP_PORT = 8998  # SGLang: the same
EVENTS_DIR = "/run/kvbaton"  # sockets in a folder that only the two containers of the pod share
# What serves a worker that computes nothing itself: HTTP, tokenizing, one task for each request.
ADAPTER = Resources(cpu="2", memory="2Gi")
KEY_NAMES: dict[EngineName, str] = {"vllm": "VLLM_API_KEY", "sglang": "SGLANG_API_KEY"}
_KV_ROLES: dict[PoolName, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "colocated": "kv_both"}
_START_S, _PERIOD_S = 1800, 5  # compiling a large model takes many minutes
# It takes its key as an argument only, and whoever sees a list of processes reads arguments: it is added inside.
_SGLANG = (
    f"import os, runpy, sys; sys.argv += ['--api-key', os.environ['{KEY_NAMES['sglang']}']]; "
    "runpy.run_module('sglang.launch_server', run_name='__main__')"
)


def model_name(spec: DeploySpec) -> str:
    """As the worker calls a model without another name: its directory's."""
    return spec.model.rstrip("/").rpartition("/")[2]


def worker_arguments(spec: DeploySpec) -> list[str]:
    """What a worker is told of the server beside it."""
    if spec.engine == "embedded":
        return []
    found = ["--engine", spec.engine, "--engine-url", f"http://127.0.0.1:{ENGINE_PORT}"]
    if spec.engine == "vllm":
        found += ["--engine-events", f"ipc://{EVENTS_DIR}/live,ipc://{EVENTS_DIR}/replay"]
    return found


def key_of_servers(spec: DeploySpec) -> list[dict[str, Any]]:
    """The environment variable with the key of the fleet's servers, for the server and for whoever asks it."""
    if spec.engine == "embedded":
        return []
    reference = {"secretKeyRef": {"name": spec.secret_name, "key": "engine-key"}}
    return [{"name": KEY_NAMES[spec.engine], "valueFrom": reference}]


def server(spec: DeploySpec, name: PoolName, resources: dict[str, Any], num_gpus: int) -> dict[str, Any]:
    """The container. ``resources`` as Kubernetes wants them."""
    command, arguments = (_vllm if spec.engine == "vllm" else _sglang)(spec, name, num_gpus)
    probe = {"httpGet": {"path": "/health", "port": "engine"}, "periodSeconds": _PERIOD_S, "timeoutSeconds": 5}
    return {
        "name": "server",
        "image": spec.engine_image,
        "restartPolicy": "Always",  # a sidecar: ready before the worker starts, told to end when the worker has
        "command": command,
        "args": [*arguments, *shlex.split(spec.engine_args)],
        "env": [*key_of_servers(spec), *_environment(spec)],
        "ports": [{"name": "engine", "containerPort": ENGINE_PORT}],
        "startupProbe": {**probe, "failureThreshold": _START_S // _PERIOD_S},
        "livenessProbe": {**probe, "periodSeconds": 10, "failureThreshold": 6},
        "resources": resources,
        "volumeMounts": [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "events", "mountPath": EVENTS_DIR},
        ],
    }


def _vllm(spec: DeploySpec, name: PoolName, num_gpus: int) -> tuple[list[str], list[str]]:
    transfer = {"kv_connector": "NixlConnector", "kv_role": _KV_ROLES[name], "kv_load_failure_policy": "fail"}
    if not num_gpus:
        transfer["kv_buffer_device"] = "cpu"
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{EVENTS_DIR}/live",
        "replay_endpoint": f"ipc://{EVENTS_DIR}/replay",
    }
    arguments = [
        *("--model", f"/models/{spec.model}", "--served-model-name", model_name(spec), "--dtype", spec.dtype),
        *("--host", "0.0.0.0", "--port", str(ENGINE_PORT)),
        *("--kv-transfer-config", json.dumps(transfer)),
        "--enable-prompt-tokens-details",
        *("--kv-events-config", json.dumps(events)),
    ]
    if num_gpus > 1:
        arguments += ["--tensor-parallel-size", str(num_gpus)]
    return ["python3", "-m", "vllm.entrypoints.openai.api_server"], arguments


def _sglang(spec: DeploySpec, name: PoolName, num_gpus: int) -> tuple[list[str], list[str]]:
    arguments = [
        *("--model-path", f"/models/{spec.model}", "--served-model-name", model_name(spec), "--dtype", spec.dtype),
        *("--host", "0.0.0.0", "--port", str(ENGINE_PORT)),
        "--enable-metrics",  # the worker judges its load by them
    ]
    if name != "colocated":
        arguments += ["--disaggregation-mode", name]
    if name == "prefill":
        arguments += ["--disaggregation-bootstrap-port", str(BOOTSTRAP_PORT)]
    if num_gpus > 1:
        arguments += ["--tp-size", str(num_gpus)]
    return ["python3", "-c", _SGLANG], arguments


def _environment(spec: DeploySpec) -> list[dict[str, Any]]:
    address = {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    # The images know no user of our number; caches go where something may be written.
    home = [{"name": "HOME", "value": "/cache"}, {"name": "USER", "value": "kvbaton"}]
    offline = {"name": "HF_HUB_OFFLINE", "value": "1"}
    if spec.engine == "sglang":
        return [{"name": "SGLANG_HOST_IP", **address}, *home, offline]
    return [
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", **address},  # its default, localhost, fails between pods without a word
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_CHANNEL_PORT)},
        *home,
        offline,
        {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
    ]
