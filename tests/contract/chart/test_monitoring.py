"""Dashboards and alerts in the chart are the files that other tests evaluate."""

from __future__ import annotations

import json

import yaml

from tests.contract.chart.chart import CHART, objects, of_kind


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
