"""What does an agent's pod reach, and which pods do the namespaces refuse?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.release import NAME, NAMESPACE, ROLLOUTS, Release
from tests.cluster.training import AGENT_IMAGE

ALLOWED = {
    f"{NAME}-{name}.{NAMESPACE}.svc:{port}"
    for name, port in (("gateway", 8001), ("collector", 8003), ("collector", 4317))
}

PODS_AT_ONCE = 5


def check(release: Release) -> None:
    """Connects from an agent's pod: gateway and collector answer, and nothing else does."""
    node, pod = release.node, agent_pod(release, "probe")
    pod["spec"]["containers"][0] |= {"command": ["sleep", "600"]}
    node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    node.kubectl("wait", "pod/probe", "-n", ROLLOUTS, "--for=condition=Ready", "--timeout=180s")
    script = Path(__file__).with_name("probe.py").read_text()
    arguments = ("exec", "-i", "-n", ROLLOUTS, "probe", "--", "python", "-", *ALLOWED, *_closed(release))
    found = json.loads(node.kubectl(*arguments, stdin=script))
    node.kubectl("delete", "pod", "probe", "-n", ROLLOUTS, "--now")
    assert set(found) == ALLOWED, found
    check_first_instant(release)
    check_restricted(release)


def check_first_instant(release: Release) -> None:
    """Agents that connect as their first act reach no more: each begins after its pod's policies hold."""
    script = Path(__file__).with_name("probe.py").read_text()
    closed = ("169.254.169.254:80", "203.0.113.10:80", "kubernetes.default.svc:443")
    names = [f"first-{number}" for number in range(PODS_AT_ONCE)]
    for name in names:
        pod = agent_pod(release, name)
        pod["spec"]["containers"][0] |= {"command": ["python", "-c", script, *closed]}
        release.node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    for name in names:
        succeeded = "--for=jsonpath={.status.phase}=Succeeded"
        release.node.kubectl("wait", f"pod/{name}", "-n", ROLLOUTS, succeeded, "--timeout=180s")
        found = json.loads(release.node.kubectl("logs", "-n", ROLLOUTS, name, "-c", "agent"))
        assert found == [], (name, found)
    release.node.kubectl("delete", "pod", *names, "-n", ROLLOUTS, "--now")


def check_restricted(release: Release) -> None:
    """The agents' namespace refuses a pod that asks for more than the level `restricted` grants."""
    pod = agent_pod(release, "privileged")
    pod["spec"]["containers"][0]["securityContext"] = {"privileged": True}
    with pytest.raises(RuntimeError, match="violates PodSecurity"):
        release.node.kubectl("apply", "--dry-run=server", "-f", "-", stdin=json.dumps(pod))


def agent_pod(release: Release, name: str) -> dict[str, Any]:
    """A pod of the template that the runner uses."""
    templates = release.node.get("configmap", f"{NAME}-pod-templates", "-n", NAMESPACE)
    pod: dict[str, Any] = yaml.safe_load(templates["data"]["agent.yaml"])
    pod |= {"apiVersion": "v1", "kind": "Pod"}
    pod["metadata"] |= {"name": name, "namespace": ROLLOUTS}
    pod["spec"]["containers"][0]["image"] = AGENT_IMAGE
    return pod


def _closed(release: Release) -> set[str]:
    stores = (("api", 8000), ("postgres", 5432), ("redis", 6379))
    nodes = release.node.get("nodes")["items"]
    addresses = [one["address"] for node in nodes for one in node["status"]["addresses"] if one["type"] == "InternalIP"]
    return {
        *(f"{NAME}-{name}.{NAMESPACE}.svc:{port}" for name, port in stores),
        f"{NAME}-engine-0.{NAME}-engine.{NAMESPACE}.svc:30000",
        *("kubernetes.default.svc:443", "169.254.169.254:80", "203.0.113.10:80"),
        *(f"{one['status']['podIP']}:9090" for one in release.pods(phase="Running")),
        *(f"{address}:10250" for address in addresses),
    }
