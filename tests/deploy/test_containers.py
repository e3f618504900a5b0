"""The container files: pinned, without root, and what the manifests expect of an image."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from deploy.test_kubernetes import SPECS

from kvbaton.deploy import kubernetes
from kvbaton.deploy.write import render_files

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy" / "containers").glob("Dockerfile.*"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


def instructions(path: Path) -> list[tuple[str, str]]:
    """(instruction, rest) with continued lines joined and comments left out."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    found = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    return [(name.upper(), rest.strip()) for name, _, rest in (line.partition(" ") for line in found if line.strip())]


def last(path: Path, name: str) -> str:
    return [rest for found, rest in instructions(path) if found == name][-1]


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert [path.name for path in FILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


@each_file
def test_every_base_is_one_version(path: Path) -> None:
    bases = [rest.split()[0] for name, rest in instructions(path) if name == "FROM"]
    assert len(bases) == 2, "the compiler stays behind in a stage of its own"
    for base in bases:
        image, _, tag = base.partition(":")
        version = re.match(r"(\d+)\.(\d+)\.\d+-", tag)
        assert image == "python" and version is not None, f"{base} can be another image tomorrow"
        assert (int(version[1]), int(version[2])) >= (3, 11)


@each_file
def test_it_runs_as_the_user_of_the_manifests(path: Path) -> None:
    uid = last(path, "USER").split(":")[0]
    assert uid.isdigit() and int(uid) == kubernetes._UID != 0, "runAsNonRoot needs a number"
    after = [name for name, _ in instructions(path)]
    assert "RUN" not in after[len(after) - after[::-1].index("USER") :]


@each_file
@pytest.mark.parametrize("name", SPECS)
def test_ports_entry_and_folders_are_what_the_manifests_expect(path: Path, name: str) -> None:
    exposed = {int(port) for port in last(path, "EXPOSE").split()}
    assert json.loads(last(path, "ENTRYPOINT")) == ["kvbaton"], "the manifests give arguments only"
    variables = dict(pair.split("=", 1) for pair in last(path, "ENV").split())
    pods = [
        item["spec"]["template"]["spec"]
        for found in render_files(SPECS[name]).values()
        for item in found
        if item["kind"] == "Deployment"
    ]
    for container in (container for pod in pods for container in pod["containers"]):
        assert {port["containerPort"] for port in container["ports"]} <= exposed
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        given = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert given["KVBATON_CACHE"] == variables["KVBATON_CACHE"] == variables["HOME"]
        assert variables["KVBATON_CACHE"] in {mount["mountPath"] for mount in container["volumeMounts"]}


@each_file
def test_docker_alone_can_tell_whether_it_is_well(path: Path) -> None:
    check = last(path, "HEALTHCHECK")
    assert "KVBATON_HEALTH_URL" in check and "--start-period" in check
    assert f"KVBATON_HEALTH_URL=http://127.0.0.1:{kubernetes.ROUTER_PORT}/health" in last(path, "ENV")


@each_file
def test_only_what_is_named_goes_in(path: Path) -> None:
    assert (ROOT / ".dockerignore").read_text().splitlines()[1] == "*"
    for name, rest in instructions(path):
        assert name != "ADD"
        if name == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert source != "." and (ROOT / source).exists(), source
    extras = re.findall(r'"\.\[([a-z,]+)\]"', path.read_text())
    assert extras and set(extras[0].split(",")) <= PROJECT["optional-dependencies"].keys()


def test_the_torch_with_cuda_is_the_version_that_is_tested() -> None:
    path = ROOT / "deploy" / "containers" / "Dockerfile.cuda"
    wanted = dict(rest.split("=", 1) for name, rest in instructions(path) if name == "ARG")["TORCH"]
    assert [wanted] == PROJECT["optional-dependencies"]["engine"]


def hadolint() -> str | None:
    beside = Path(sys.executable).parent / "hadolint"
    return str(beside) if beside.exists() else shutil.which("hadolint")


@each_file
@pytest.mark.skipif(hadolint() is None, reason="hadolint comes with the extra `dev`")
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    tool = hadolint()
    assert tool is not None
    done = subprocess.run([tool, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
