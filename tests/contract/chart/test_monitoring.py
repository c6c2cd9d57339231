"""Dashboards and alerts in the chart are the files that other tests evaluate."""

from __future__ import annotations

import json

import pytest
import yaml

from tests.contract.chart.chart import CHART, FULLNAME, Object, containers, objects, of_kind, template

ON = "monitoring.podMonitor.enabled=true"


def test_the_chart_carries_each_dashboard_for_grafanas_sidecar() -> None:
    found = {}
    for one in of_kind("all-on", "ConfigMap"):
        if one["metadata"].get("labels", {}).get("grafana_dashboard") == "1":
            assert one["metadata"]["annotations"] == {"grafana_folder": "Leyden"}
            found |= {name: json.loads(text) for name, text in one["data"].items()}
    files = sorted((CHART / "dashboards").glob("*.json"))
    assert found == {f"leyden-{path.name}": json.loads(path.read_text()) for path in files}
    assert len({one["uid"] for one in found.values()}) == len(files) == 4


def test_the_chart_carries_the_alerts() -> None:
    (rule,) = of_kind("all-on", "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((CHART / "alerts.yaml").read_text())
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_neither_is_there_by_default() -> None:
    kinds = {one["kind"] for one in objects("minimal")}
    assert "PrometheusRule" not in kinds
    assert not any(
        one["metadata"].get("labels", {}).get("grafana_dashboard") for one in of_kind("minimal", "ConfigMap")
    )


@pytest.mark.parametrize("case", ["all-on", "cpu-monitored", "pools-monitored"])
def test_every_container_that_has_metrics_is_scraped_and_open_to_prometheus(case: str) -> None:
    files = {"cpu-monitored": ["cpu-engine"], "pools-monitored": ["pools"]}.get(case, [case])
    options = [f"--values={CHART / 'ci' / f'{name}-values.yaml'}" for name in files]
    found = [one for one in yaml.safe_load_all(template(*options, "--set", ON).stdout) if one]
    monitors = [one["spec"] for one in found if one["kind"] == "PodMonitor"]
    policies = {
        one["metadata"]["name"].removeprefix(f"{FULLNAME}-"): one["spec"]
        for one in found
        if one["kind"] == "NetworkPolicy"
    }
    for one in found:
        if one["kind"] in {"Deployment", "StatefulSet"}:
            labels = one["spec"]["template"]["metadata"]["labels"]
            component = labels["app.kubernetes.io/component"]
            if component in {"postgres", "redis"}:
                continue
            ports = {port["name"]: port["containerPort"] for port in containers(one["spec"]["template"])[-1]["ports"]}
            scraped = [
                ports[endpoint["port"]]
                for monitor in monitors
                if selects(monitor["selector"], labels)
                for endpoint in monitor["podMetricsEndpoints"]
                if endpoint["port"] in ports
            ]
            assert len(scraped) == 1, component
            opened = [
                port["port"]
                for rule in policies[component]["ingress"]
                if any("prometheus" in str(peer) or "monitoring" in str(peer) for peer in rule["from"])
                for port in rule["ports"]
            ]
            assert scraped[0] in opened, component


def selects(selector: Object, labels: dict[str, str]) -> bool:
    expressions = selector.get("matchExpressions", [])
    return selector["matchLabels"].items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )
