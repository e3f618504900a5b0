"""Writes a deployment as files that ``kubectl apply -k`` takes, and reads a plan's pools into a spec.

Invariants: the same spec gives the same bytes; a directory with other files in it is not written to unless told so.
Knows nothing about what the manifests say.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import msgspec
import yaml

from kvbaton.deploy.kubernetes import (
    API_KEYS,
    Manifest,
    _labels,
    _object,
    render_network,
    render_pool,
    render_router,
)
from kvbaton.deploy.rules import Gates
from kvbaton.deploy.scaling import render_monitoring, render_scalers
from kvbaton.deploy.spec import DeploySpec, Pool, Resources
from kvbaton.plan.answer import Answer
from kvbaton.types import UNREADABLE, LocalError
from kvbaton.workers.vllm_server import key_for_servers

SECRET_FILE = "secret.yaml"
_DECODER = msgspec.json.Decoder(Answer)


def render_files(spec: DeploySpec) -> dict[str, list[Manifest]]:
    """File name -> the manifests in it. The secret is not among them."""
    files = {f"{name}.yaml": render_pool(spec, name, pool) for name, pool in spec.pools.items()}
    files["router.yaml"] = render_router(spec)
    files["network.yaml"] = render_network(spec)
    if scalers := render_scalers(spec):
        files["scaling.yaml"] = scalers
    files["monitoring.yaml"] = render_monitoring(spec)
    return files


def render_secret(spec: DeploySpec, key: str) -> Manifest:
    secret = _object("v1", "Secret", spec, spec.secret_name, _labels(spec, "router"))
    secret["type"] = "Opaque"
    secret["data"] = {"internal-key": base64.b64encode(key.encode()).decode()}
    if not spec.anonymous:
        secret["data"][API_KEYS] = base64.b64encode(first_api_key(key).encode()).decode()
    if spec.engine != "embedded":
        secret["data"]["engine-key"] = base64.b64encode(key_for_servers(key).encode()).decode()
    return secret


def first_api_key(key: str) -> str:
    """A line for one operator, to begin with; who has it cannot tell the fleet's key from it."""
    made = hashlib.blake2b(b"operator", key=key.encode()[:64], digest_size=24, person=b"api key").hexdigest()
    return f"operator {made}\n"


def as_yaml(manifests: list[Manifest]) -> str:
    return yaml.safe_dump_all(manifests, sort_keys=False, width=4096, allow_unicode=True)


def write(spec: DeploySpec, directory: Path, key: str | None, overwrite: bool = False) -> list[Path]:
    """Write every file and the Kustomization that lists them; ``key`` makes the secret. The paths written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not overwrite and any(directory.iterdir()):
            raise LocalError(f"{directory} is not empty", field="--output", fix="choose another, or add --overwrite")
        files = {name: as_yaml(manifests) for name, manifests in render_files(spec).items()}
        if key is not None:
            files[SECRET_FILE] = as_yaml([render_secret(spec, key)])
        kustomization: dict[str, Any] = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": sorted(files),
        }
        files["kustomization.yaml"] = as_yaml([kustomization])
        for name, text in files.items():
            path = directory / name
            path.touch(mode=0o600 if name == SECRET_FILE else 0o644)
            path.write_text(text)
        return [directory / name for name in sorted(files)]
    except OSError as error:
        raise LocalError(f"cannot write {directory}: {error.strerror}", field="--output") from error


def pools_of_plan(raw: bytes, resources: Resources, growth: float) -> tuple[dict[str, Pool], Gates]:
    """Pools and gates from the JSON of ``kvbaton plan --json``. LocalError for a verdict that names no pools."""
    try:
        answer = _DECODER.decode(raw)
    except UNREADABLE as error:
        raise LocalError(
            f"this is no plan: {error}", field="--plan", fix="give what `kvbaton plan --json` wrote"
        ) from None
    if answer.verdict == "not enough evidence":
        fix = "measure first: " + "; ".join(answer.measure_next)
        raise LocalError("the plan's verdict is `not enough evidence`", field="--plan", fix=fix)
    split = answer.verdict == "split" and answer.split is not None
    arm = answer.split if split and answer.split is not None else answer.colocated
    layout = arm.layout

    def pool(replicas: int, num_gpus: int) -> Pool:
        wanted = msgspec.structs.replace(resources, gpus=num_gpus if resources.gpus else 0)
        return Pool(replicas, max_replicas=max(replicas, round(replicas * growth)), resources=wanted)

    gates = Gates(answer.ttft_s or Gates().ttft_s, answer.tpot_s or Gates().tpot_s)
    if split and answer.drift is not None:
        gates = msgspec.structs.replace(gates, ratio_low=answer.drift.low, ratio_high=answer.drift.high)
    if not split:
        return {"colocated": pool(layout.decode, layout.decode_sharding.num_gpus)}, gates
    return {
        "prefill": pool(layout.prefill, layout.prefill_sharding.num_gpus),
        "decode": pool(layout.decode, layout.decode_sharding.num_gpus),
    }, gates
