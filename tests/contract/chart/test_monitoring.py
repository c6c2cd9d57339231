"""Dashboards and alerts in the chart are the files that other tests evaluate."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.contract.chart.chart import (
    CHART,
    FULLNAME,
    NAMESPACE,
    RELEASE,
    Object,
    containers,
    objects,
    of_kind,
    template,
)
from tests.support.shared import PROMETHEUS

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
    own = f'absent(controller_leading{{namespace="{NAMESPACE}", app_kubernetes_io_instance="{RELEASE}"}})'
    volumes = (
        f'{{namespace="{NAMESPACE}", persistentvolumeclaim=~'
        f'"{FULLNAME}-storage|data-{FULLNAME}-postgres-0|{FULLNAME}-postgres-[0-9]+(-wal)?"}}'
    )
    text = (CHART / "alerts.yaml").read_text().replace("absent(controller_leading)", own)
    text = text.replace('{persistentvolumeclaim=~".*leyden.*"}', volumes)
    assert (rule["spec"], text.count(own)) == (yaml.safe_load(text), 1)
    assert rule["metadata"]["labels"]["release"] == "prometheus"


def test_a_release_without_a_leader_is_named_beside_one_that_has_one(tmp_path: Path) -> None:
    (rule,) = of_kind("all-on", "PrometheusRule")
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rule["spec"]))
    other = f'controller_leading{{namespace="{NAMESPACE}", app_kubernetes_io_instance="other"}}'
    labels = f'alertname="LeydenNoLeader", app_kubernetes_io_instance="{RELEASE}", namespace="{NAMESPACE}"'
    found = {
        "expr": "count by (alertname, app_kubernetes_io_instance, namespace) (ALERTS)",
        "eval_time": "20m",
        "exp_samples": [{"labels": f"{{{labels}}}", "value": 1}],
    }
    case = {
        "name": "no controller of this release",
        "interval": "1m",
        "input_series": [{"series": other, "values": "1x30"}],
        "promql_expr_test": [found],
    }
    document = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "leader_test.yaml").write_text(yaml.safe_dump(document))
    tool = [PROMETHEUS / "promtool", "test", "rules", "leader_test.yaml"]
    done = subprocess.run(tool, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


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
