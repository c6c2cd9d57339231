"""Alerts: Prometheus' own tool accepts the rules and raises each one where it should, and each has a runbook."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml

from leyden.libs.contracts.alarms import ALARM_RULES
from tests.support.shared import PROMETHEUS, ROOT

RULES = ROOT / "helm" / "leyden" / "alerts.yaml"


def promtool(*arguments: str | Path, folder: Path) -> None:
    """Raises: AssertionError: promtool found a mistake"""
    done = subprocess.run([PROMETHEUS / "promtool", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_in_its_trouble_alone(tmp_path: Path) -> None:
    shutil.copy(RULES, tmp_path)
    promtool("check", "rules", "alerts.yaml", folder=tmp_path)
    shutil.copy(Path(__file__).with_name("alerts_test.yaml"), tmp_path)
    promtool("test", "rules", "alerts_test.yaml", folder=tmp_path)


def test_each_rule_of_the_table_of_alarms_is_an_alert_with_its_severity(tmp_path: Path) -> None:
    alerts = {"warning": "LeydenRunInAlarm", "critical": "LeydenRunInCriticalAlarm"}
    series = [{"series": "controller_leading", "values": "1x30"}]
    expected = []
    for rule in ALARM_RULES.values():
        labels = f'alarm="{rule.name}", severity="{rule.severity}"'
        series.append({"series": f"controller_run_alarms{{{labels}}}", "values": "1x30"})
        names = f'alertname="{alerts[rule.severity]}", alertstate="firing"'
        expected.append({"labels": f"ALERTS{{{names}, {labels}}}", "value": 1})
    found = {"expr": 'ALERTS{alertstate="firing"}', "eval_time": "20m", "exp_samples": expected}
    case = {"name": "every alarm", "interval": "1m", "input_series": series, "promql_expr_test": [found]}
    shutil.copy(RULES, tmp_path)
    document = {"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": [case]}
    (tmp_path / "alarms_test.yaml").write_text(yaml.safe_dump(document))
    promtool("test", "rules", "alarms_test.yaml", folder=tmp_path)


def test_each_alert_has_a_runbook() -> None:
    rules = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    page = (ROOT / "docs" / "how-to" / "alerts.md").read_text()
    headings = {line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")}
    assert {rule["alert"] for rule in rules} == headings
    for rule in rules:
        assert rule["annotations"]["runbook"] == f"docs/how-to/alerts.md#{rule['alert'].lower()}"
