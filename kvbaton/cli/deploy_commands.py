"""``kvbaton deploy``: manifests for Kubernetes, alert rules for Prometheus, a dashboard for Grafana."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import click
import msgspec

from kvbaton.types import LocalError


@click.command("deploy")
@click.option("--model", required=True, help="Directory of the model inside the model volume.")
@click.option("--image", required=True, help="Container image of kvbaton, with a version or digest.")
@click.option("--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="Where to write.")
@click.option("--prefill", type=int, help="Prefill workers.")
@click.option("--decode", type=int, help="Decode workers.")
@click.option("--colocated", type=int, help="Workers that do both, instead of two pools.")
@click.option(
    "--plan", type=click.Path(dir_okay=False, path_type=Path), help="Pools, gates and band from a plan's JSON."
)
@click.option(
    "--growth", type=float, default=2.0, show_default=True, help="Pools may grow so many times; 1: not at all."
)
@click.option("--name", default="kvbaton", show_default=True, help="Prefix of every object.")
@click.option("--namespace", default="default", show_default=True)
@click.option("--router-replicas", type=int, default=2, show_default=True)
@click.option("--cpu", default="4", show_default=True, help="Cores of one worker.")
@click.option("--memory", default="16Gi", show_default=True, help="Memory of one worker.")
@click.option("--gpus", type=int, default=0, show_default=True, help="GPUs of one worker.")
@click.option("--rdma", type=int, default=0, show_default=True, help="RDMA devices of one worker.")
@click.option("--model-claim", default="models", show_default=True, help="PersistentVolumeClaim that holds the model.")
@click.option(
    "--key-secret", default="", help="Existing Secret with `internal-key` and `api-keys`.  [default: one is written]"
)
@click.option(
    "--allow-anonymous",
    "anonymous",
    is_flag=True,
    help="Routers ask nobody for an API key: something before them does.",
)
@click.option(
    "--engine",
    type=click.Choice(["embedded", "vllm", "sglang"]),
    default="embedded",
    show_default=True,
    help="What computes; another engine's server runs beside each worker.",
)
@click.option("--engine-image", default="", help="Container image of that server, with a version or digest.")
@click.option("--engine-args", default="", help="More flags of that server's, in quotes.")
@click.option("--drain-s", type=int, default=120, show_default=True, help="How long open requests may run at the end.")
@click.option(
    "--fabric-key", default="topology.kubernetes.io/zone", show_default=True, help="Node label of one fabric."
)
@click.option(
    "--prometheus", "prometheus_url", default="http://prometheus-operated.monitoring.svc:9090", show_default=True
)
@click.option("--ttft", "ttft_s", type=float, help="TTFT gate in seconds.  [default: the plan's, else 1]")
@click.option("--tpot", "tpot_s", type=float, help="TPOT gate in seconds.  [default: the plan's, else 0.05]")
@click.option("--overwrite", is_flag=True, help="Write into a directory that is not empty.")
@click.option("--json", "as_json", is_flag=True, help="List the files as JSON.")
def deploy_command(
    prefill: int | None,
    decode: int | None,
    colocated: int | None,
    plan: Path | None,
    output: Path,
    overwrite: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Write a deployment that `kubectl apply -k` takes: pools, routers, network policies, scaling, alerts, dashboard.

    \b
    kvbaton deploy --model SmolLM2-135M-Instruct --image registry.example/kvbaton:0.1.0 \\
        --prefill 2 --decode 4 --output manifests
    kubectl apply -k manifests
    """
    from kvbaton.deploy.rules import Gates
    from kvbaton.deploy.spec import DeploySpec, Pool, Resources
    from kvbaton.deploy.write import pools_of_plan, write

    growth = given.pop("growth")
    if growth < 1:
        raise LocalError(f"growth is {growth:g}", field="--growth", fix="1 or more")
    resources = Resources(**{name: given.pop(name) for name in ("cpu", "memory", "gpus", "rdma")})
    limits = {name: given.pop(name) for name in ("ttft_s", "tpot_s")}
    counts = {"prefill": prefill, "decode": decode, "colocated": colocated}
    named = {name: count for name, count in counts.items() if count is not None}
    gates = Gates()
    if plan is not None:
        if named:
            raise LocalError(f"--{next(iter(named))} and --plan both set the pools", field="--plan", fix="give one")
        try:
            raw = plan.read_bytes()
        except OSError as error:
            raise LocalError(f"cannot read {plan}: {error.strerror}", field="--plan") from error
        pools, gates = pools_of_plan(raw, resources, growth)
    else:
        pools = {name: Pool(count, round(count * growth), resources) for name, count in named.items()}
    told = {name: limit for name, limit in limits.items() if limit is not None}
    spec = DeploySpec(**{**pools, **given}, gates=msgspec.structs.replace(gates, **told))
    key = None if spec.key_secret else secrets.token_urlsafe(32)
    paths = write(spec, output, key, overwrite)
    if as_json:
        click.echo(json.dumps({"files": [str(path) for path in paths]}))
        return 0
    for path in paths:
        click.echo(path)
    click.echo(f"apply with: kubectl apply -k {output}", err=True)
    if key is not None:
        click.echo("secret.yaml holds the fleet's key and the API keys: do not commit it", err=True)
    return 0
