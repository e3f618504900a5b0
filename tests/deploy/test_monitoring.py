"""What the Prometheus operator gets: objects as its definitions want them, which select what the other files make."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from deploy.test_kubernetes import SPECS

from kvbaton.deploy.scaling import render_monitoring
from kvbaton.deploy.spec import DeploySpec
from kvbaton.deploy.write import render_files

SCHEMA = json.loads((Path(__file__).resolve().parent / "monitoring.schema.json").read_text())


def of_the_operator(spec: DeploySpec) -> dict[str, dict[str, Any]]:
    return {item["kind"]: item for item in render_monitoring(spec) if item["apiVersion"] == "monitoring.coreos.com/v1"}


@pytest.mark.parametrize("name", SPECS)
def test_the_operator_takes_monitor_and_rules(name: str) -> None:
    found = of_the_operator(SPECS[name])
    assert set(found) == {"ServiceMonitor", "PrometheusRule"}
    for item in found.values():
        jsonschema.validate(item, SCHEMA)


def test_the_check_would_notice_a_wrong_field() -> None:
    found = of_the_operator(SPECS["split"])
    wrong = copy.deepcopy(found["ServiceMonitor"])
    wrong["spec"]["endpoints"][0]["interval"] = "5 seconds"
    misspelt = copy.deepcopy(found["PrometheusRule"])
    misspelt["spec"]["groups"][0]["rules"][0]["forr"] = "5m"
    for item in (wrong, misspelt):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(item, SCHEMA)


@pytest.mark.parametrize("name", SPECS)
def test_the_monitor_selects_every_service_by_a_port_that_it_has(name: str) -> None:
    spec = SPECS[name]
    monitor = of_the_operator(spec)["ServiceMonitor"]["spec"]
    services = [item for found in render_files(spec).values() for item in found if item["kind"] == "Service"]
    assert len(services) == len(spec.pools) + 1
    for service in services:
        labels = service["metadata"]["labels"]
        assert monitor["selector"]["matchLabels"].items() <= labels.items(), "this service is scraped by nobody"
        ports = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= ports
    assert {endpoint["path"] for endpoint in monitor["endpoints"]} == {"/metrics"}
