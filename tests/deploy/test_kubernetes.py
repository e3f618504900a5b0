"""The manifests: valid for the last Kubernetes versions, closed to strangers, with time to drain, always the same."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import msgspec
import pytest
import yaml
from plan.test_verdict import profile_scenario

from kvbaton.cli.main import kvbaton, main
from kvbaton.deploy.rules import Gates
from kvbaton.deploy.spec import DeploySpec, Pool, Resources
from kvbaton.deploy.write import as_yaml, render_files, render_secret
from kvbaton.plan.scenario import load
from kvbaton.plan.verdict import plan as plan_of
from kvbaton.types import LocalError

HERE = Path(__file__).resolve().parent
GOLDEN = HERE / "golden"
VERSIONS = ("1.35", "1.36", "1.37")
# What KEDA 2.18's definition of a ScaledObject says of the fields written here: types and enumerations.
SCALED_OBJECT = json.loads((HERE / "scaledobject.schema.json").read_text())
CUSTOM = {"keda.sh/v1alpha1", "monitoring.coreos.com/v1", "kustomize.config.k8s.io/v1beta1"}

GPU = Resources(cpu="8", memory="64Gi", gpus=1, rdma=1)
SPECS = {
    "split": DeploySpec(
        model="SmolLM2-135M-Instruct",
        image="registry.example/kvbaton:0.1.0",
        prefill=Pool(2, 4, GPU),
        decode=Pool(4, 8, GPU),
        gates=Gates(ratio_low=4.0, ratio_high=16.0),
    ),
    "colocated": DeploySpec(
        model="m",
        image="r/k@sha256:00",
        name="one",
        namespace="ml",
        colocated=Pool(3),
        router_replicas=1,
        key_secret="s",
    ),
    "vllm": DeploySpec(
        model="Llama-3.1-70B-Instruct",
        image="registry.example/kvbaton:0.1.0",
        engine="vllm",
        engine_image="vllm/vllm-openai:v0.32.0",
        engine_args="--gpu-memory-utilization 0.92",
        prefill=Pool(2, 4, msgspec.structs.replace(GPU, gpus=2)),
        decode=Pool(4, 8, msgspec.structs.replace(GPU, gpus=2)),
    ),
    "sglang": DeploySpec(
        model="team/Qwen3-32B",
        image="registry.example/kvbaton:0.1.0",
        engine="sglang",
        engine_image="lmsysorg/sglang:v0.6.0",
        prefill=Pool(1, resources=GPU),
        decode=Pool(1, resources=GPU),
    ),
}


def manifests(spec: DeploySpec) -> list[dict[str, Any]]:
    return [item for found in render_files(spec).values() for item in found]


def by_kind(spec: DeploySpec, kind: str) -> dict[str, dict[str, Any]]:
    return {item["metadata"]["name"]: item for item in manifests(spec) if item["kind"] == kind}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", SPECS)
def test_kubernetes_takes_every_manifest(name: str, version: str) -> None:
    spec = SPECS[name]
    num_checked = 0
    for item in [*manifests(spec), render_secret(spec, "key")]:
        if item["apiVersion"] not in CUSTOM:
            kubernetes_validate.validate(item, version, strict=True)
            num_checked += 1
    assert num_checked >= 8


def test_the_check_would_notice_a_wrong_field() -> None:
    item = next(iter(by_kind(SPECS["split"], "Deployment").values()))
    item["spec"]["template"]["spec"]["containers"][0]["port"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(item, VERSIONS[-1], strict=True)


def test_keda_takes_the_scalers() -> None:
    scalers = by_kind(SPECS["split"], "ScaledObject")
    assert set(scalers) == {"kvbaton-prefill", "kvbaton-decode"}
    for scaler in scalers.values():
        jsonschema.validate(scaler, SCALED_OBJECT)
        for trigger in scaler["spec"]["triggers"]:
            assert "busy" not in trigger["metadata"]["query"], "never on utilisation"
    assert not by_kind(SPECS["colocated"], "ScaledObject")
    prefill = json.dumps(scalers["kvbaton-prefill"])
    assert 'blocks_free{role=\\"decode\\"}' in prefill.replace("\\\\", "\\"), "no prefill growth while decode is full"


def test_kedas_own_definition_takes_the_scalers() -> None:
    """config/crd/bases/keda.sh_scaledobjects.yaml of the KEDA that is run; 2.20's was looked at like this."""
    path = os.environ.get("KVBATON_KEDA_CRD")
    if path is None:
        pytest.skip("KVBATON_KEDA_CRD names no definition")
    versions = yaml.safe_load(Path(path).read_text())["spec"]["versions"]
    schema = next(each for each in versions if each["name"] == "v1alpha1")["schema"]["openAPIV3Schema"]
    closed(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    for spec in (SPECS["split"], SPECS["vllm"]):
        for scaler in by_kind(spec, "ScaledObject").values():
            jsonschema.validate(scaler, schema)


def closed(schema: Any) -> None:
    """As the API server with strict validation: a field that is not declared is an error."""
    if isinstance(schema, dict):
        if "properties" in schema and schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
        for each in schema.values():
            closed(each)
    elif isinstance(schema, list):
        for each in schema:
            closed(each)


def test_a_scaled_pool_leaves_its_size_to_the_scaler() -> None:
    assert "replicas" not in by_kind(SPECS["split"], "Deployment")["kvbaton-prefill"]["spec"]
    assert by_kind(SPECS["colocated"], "Deployment")["one-colocated"]["spec"]["replicas"] == 3


@pytest.mark.parametrize("name", SPECS)
def test_ending_takes_as_long_as_draining(name: str) -> None:
    for deployment in by_kind(SPECS[name], "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["terminationGracePeriodSeconds"] > SPECS[name].drain_s
        for server in pod.get("initContainers", []):
            assert server["restartPolicy"] == "Always", "a sidecar: it is told to end when the worker has drained"
        container = pod["containers"][0]
        assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
        assert container["livenessProbe"]["httpGet"]["path"] == "/health"
        if "--drain-s" in container["args"]:
            assert container["args"][container["args"].index("--drain-s") + 1] == str(SPECS[name].drain_s)


@pytest.mark.parametrize("name", SPECS)
def test_nothing_is_open_that_need_not_be(name: str) -> None:
    spec = SPECS[name]
    text = "".join(as_yaml(found) for found in render_files(spec).values())
    assert "secretKeyRef" in text
    policies = by_kind(spec, "NetworkPolicy")
    assert {f"{spec.name}-{pool}" for pool in spec.pools} == set(policies)
    for policy in policies.values():
        for rule in policy["spec"]["ingress"]:
            assert rule["from"]
            if "ports" not in rule:  # servers of other engines choose theirs: for the other pool of the pair alone
                assert spec.engine != "embedded"
                roles = [peer["podSelector"]["matchLabels"]["kvbaton.dev/role"] for peer in rule["from"]]
                assert roles == ["decode" if policy["metadata"]["name"].endswith("prefill") else "prefill"]
            elif any(port["port"] == 8102 for port in rule["ports"]):
                assert [peer["podSelector"]["matchLabels"]["kvbaton.dev/role"] for peer in rule["from"]] == ["decode"]
    for deployment in by_kind(spec, "Deployment").values():
        pod = deployment["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] is True and context["allowPrivilegeEscalation"] is False
            assert context["capabilities"]["drop"] == ["ALL"]


def test_the_alert_on_wrong_tokens_has_canaries_to_go_by() -> None:
    for name, spec in SPECS.items():
        router = by_kind(spec, "Deployment")[f"{spec.name}-router"]["spec"]["template"]["spec"]["containers"][0]
        assert ("--canary-interval" in router["args"]) == (spec.engine == "embedded"), name


def test_the_pools_prefer_one_fabric_and_spread_over_hosts() -> None:
    for name, other in (("prefill", "decode"), ("decode", "prefill")):
        pod = by_kind(SPECS["split"], "Deployment")[f"kvbaton-{name}"]["spec"]["template"]["spec"]
        term = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["podAffinityTerm"]
        assert term["labelSelector"]["matchLabels"]["kvbaton.dev/role"] == other
        assert pod["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
        assert pod["containers"][0]["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"


@pytest.mark.parametrize("name", SPECS)
def test_the_files_are_those_that_were_reviewed(name: str) -> None:
    """After a wanted change: python -m deploy.write_golden in tests, and read the difference."""
    for file, found in render_files(SPECS[name]).items():
        if file != "monitoring.yaml":  # the rules and the dashboard have their own tests
            assert as_yaml(found) == (GOLDEN / name / file).read_text(), file


# -- the command


def deploy(*arguments: str) -> int:
    return main(["deploy", "--model", "m", "--image", "r/k:1", *arguments])


def test_the_command_writes_what_kubectl_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "manifests"
    assert deploy("--prefill", "1", "--decode", "2", "--output", str(out), "--json") == 0
    written = {Path(path).name for path in json.loads(capsys.readouterr().out)["files"]}
    kustomization = yaml.safe_load((out / "kustomization.yaml").read_text())
    assert set(kustomization["resources"]) | {"kustomization.yaml"} == written
    assert stat.S_IMODE((out / "secret.yaml").stat().st_mode) == 0o600
    key = yaml.safe_load((out / "secret.yaml").read_text())["data"]["internal-key"]
    assert all(key not in (out / name).read_text() for name in written - {"secret.yaml"})
    assert deploy("--prefill", "1", "--decode", "2", "--output", str(out)) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert deploy("--colocated", "1", "--output", str(out), "--overwrite") == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--prefill", "1"], "decode"),
        (["--decode", "1"], "prefill"),
        ([], "colocated"),
        (["--colocated", "1", "--prefill", "1", "--decode", "1"], "colocated"),
        (["--colocated", "0"], "replicas"),
        (["--colocated", "1", "--name", "Bad_Name"], "name"),
        (["--colocated", "1", "--image", "r/k:latest"], "image"),
        (["--colocated", "1", "--cpu", "four"], "cpu"),
        (["--colocated", "1", "--growth", "0.5"], "--growth"),
        (["--colocated", "1", "--ttft", "0"], "ttft"),
        (["--colocated", "1", "--engine", "vllm"], "engine_image"),
        (["--colocated", "1", "--engine", "vllm", "--engine-image", "vllm/vllm-openai:latest"], "engine_image"),
        (["--colocated", "1", "--engine-args", "--enforce-eager"], "engine"),
        (["--colocated", "1", "--engine", "sglang", "--engine-image", "s:1", "--engine-args", "'"], "engine_args"),
        (["--plan", "/no/such/file"], "--plan"),
    ],
)
def test_bad_input_names_the_field(
    arguments: list[str], word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy(*arguments, "--output", str(tmp_path / "out")) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1


def test_a_plan_goes_straight_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = plan_of(load(profile_scenario(tmp_path)))
    assert answer.split is not None and answer.drift is not None
    path, out = tmp_path / "plan.json", tmp_path / "out"
    path.write_bytes(msgspec.structs.replace(answer, verdict="split").encode())
    assert deploy("--plan", str(path), "--growth", "1", "--gpus", "1", "--output", str(out)) == 0
    for pool, wanted in (("prefill", answer.split.layout.prefill), ("decode", answer.split.layout.decode)):
        deployment = next(yaml.safe_load_all((out / f"{pool}.yaml").read_text()))
        assert deployment["spec"]["replicas"] == wanted
    rules = (out / "monitoring.yaml").read_text()
    assert (
        f"< {answer.drift.low:g}" in rules and f"> {answer.ttft_s:g}\n" in rules and f"> {answer.tpot_s:g}\n" in rules
    )
    router = (out / "router.yaml").read_text()
    assert f"{answer.drift.low:g},{answer.drift.high:g}" in router and f"- '{answer.ttft_s:g}'" in router
    capsys.readouterr()
    assert deploy("--plan", str(path), "--prefill", "1", "--output", str(out)) == 2
    path.write_bytes(msgspec.structs.replace(answer, verdict="stay").encode())
    assert deploy("--plan", str(path), "--output", str(out), "--overwrite") == 0
    replicas = next(yaml.safe_load_all((out / "colocated.yaml").read_text()))["spec"].get("replicas")
    assert replicas in (None, answer.colocated.layout.decode)
    unsure = msgspec.structs.replace(answer, verdict="not enough evidence", measure_next=("measure the link",))
    path.write_bytes(unsure.encode())
    assert deploy("--plan", str(path), "--output", str(tmp_path / "other")) == 2
    assert "measure the link" in capsys.readouterr().err


def test_a_spec_file_can_be_read_as_it_is_written() -> None:
    spec = SPECS["split"]
    assert msgspec.json.decode(msgspec.json.encode(spec), type=DeploySpec) == spec
    with pytest.raises(msgspec.ValidationError, match="typo"):
        msgspec.json.decode(b'{"model":"m","image":"i:1","typo":1}', type=DeploySpec)
    with pytest.raises(LocalError):
        DeploySpec(model="m", image="i:1")


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl on this machine")
def test_kubectl_reads_the_kustomization(tmp_path: Path) -> None:
    assert deploy("--prefill", "1", "--decode", "2", "--output", str(tmp_path / "out")) == 0
    done = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path / "out")], capture_output=True, text=True, timeout=60, check=True
    )
    kinds = [item["kind"] for item in yaml.safe_load_all(done.stdout)]
    assert kinds.count("Deployment") == 3 and kinds.count("ScaledObject") == 2 and "Secret" in kinds


def test_every_flag_is_documented() -> None:
    text = (HERE.parents[1] / "docs" / "kubernetes.md").read_text()
    command = kvbaton.get_command(None, "deploy")  # type: ignore[arg-type]
    assert command is not None
    for parameter in command.params:
        assert f"`{parameter.opts[0]}`" in text, parameter.opts[0]
