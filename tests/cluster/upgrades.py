"""Does a run go on through `helm upgrade` and `helm rollback`, and what does `helm uninstall` leave?"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import yaml

from tests.cluster.faults import evict
from tests.cluster.node import step
from tests.cluster.release import CHART, NAME, NAMESPACE, ROLLOUTS, Release
from tests.support.waiting import until

KEPT = {
    f"secret/{NAME}-secrets",
    f"persistentvolumeclaim/{NAME}-storage",
    f"persistentvolumeclaim/data-{NAME}-postgres-0",
}


def upgrade(release: Release) -> None:
    """Upgrades to another version of the chart with other values: every pod of the platform is replaced."""
    before = {pod["metadata"]["uid"] for pod in release.pods(phase="Running")}
    with tempfile.TemporaryDirectory() as folder, step("helm upgrade"):
        chart = Path(folder) / "leyden"
        shutil.copytree(CHART, chart)
        about = yaml.safe_load((chart / "Chart.yaml").read_text())
        (chart / "Chart.yaml").write_text(yaml.safe_dump(about | {"version": "99.0.0"}))
        release.upgrade("--set", "logLevel=warning,gateway.replicas=2", chart=chart)
    remaining = [pod for pod in release.pods(phase="Running") if pod["metadata"]["uid"] in before]
    components = {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in remaining}
    assert components <= {"postgres", "redis", "trainer"}, components


def check_budget(release: Release) -> None:
    """The disruption budget lets one of two gateways go at a time."""
    first, second = release.pods("gateway")
    evict(release, first)
    with pytest.raises(RuntimeError, match="disruption budget"):
        evict(release, second)
    release.ready(f"deployment/{NAME}-gateway")


def rollback(release: Release) -> None:
    """Goes back to the first revision."""
    with step("helm rollback"):
        release.node.helm("rollback", NAME, "1", "-n", NAMESPACE, "--wait", "--wait-for-jobs", "--timeout", "15m")


def uninstall(release: Release) -> None:
    """Removes the release while it trains: Secret, claims and nothing else stay, no trainer and no agent."""
    until(lambda: release.pods("trainer"), "a trainer")
    until(lambda: release.pods("agent", namespace=ROLLOUTS), "an agent")
    with step("helm uninstall"):
        release.node.helm("uninstall", NAME, "-n", NAMESPACE, "--wait", "--timeout", "5m")
        until(lambda: not _left(release) - KEPT, "the deletion of the release's objects", 120)
    print(f"  left: {', '.join(sorted(_left(release)))}", flush=True)
    assert _left(release) == KEPT, _left(release)


def _left(release: Release) -> set[str]:
    """The objects of both namespaces, but for what Kubernetes itself puts there."""
    kinds = (
        "all,secret,configmap,persistentvolumeclaim,role,rolebinding,serviceaccount,networkpolicy,poddisruptionbudget"
    )
    left = set()
    for namespace in (NAMESPACE, ROLLOUTS):
        for one in release.node.get(f"{kinds},resourcequota,horizontalpodautoscaler", "-n", namespace)["items"]:
            if (name := one["metadata"]["name"]) not in {"kube-root-ca.crt", "default"}:
                left.add(f"{one['kind'].lower()}/{name}")
    return left
