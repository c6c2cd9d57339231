"""Does the gateway get more replicas under load, and fewer after it, without the loss of a request?"""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.isolation import agent_pod
from tests.cluster.node import step
from tests.cluster.release import NAME, NAMESPACE, ROLLOUTS, Release
from tests.support.waiting import until

FAST_SECONDS, ALL_SECONDS = 75, 200
SCALED = "gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=1,gateway.autoscaling.maxReplicas=3"


def check(release: Release) -> None:
    """Loads the gateway from an agent's pod, whose requests lack a key: each must be answered with 401."""
    node = release.node
    release.upgrade("--set", SCALED)
    # The default of five minutes is the only thing that is changed.
    behaviour = json.dumps({"spec": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 15}}}})
    node.kubectl("patch", "hpa", f"{NAME}-gateway", "-n", NAMESPACE, "--type=merge", "-p", behaviour)
    pod, script = agent_pod(release, "load"), Path(__file__).with_name("load.py").read_text()
    url = f"http://{NAME}-gateway.{NAMESPACE}.svc:8001/r/run-load.0.0/1/v1/models"
    pod["spec"]["containers"][0] |= {
        "command": ["python", "-c", script, url, str(FAST_SECONDS), str(ALL_SECONDS)],
    }
    node.kubectl("apply", "-f", "-", stdin=json.dumps(pod))
    with step("more replicas"):
        until(lambda: _replicas(release) >= 2, "a second gateway", FAST_SECONDS + 60)
    with step("fewer replicas"):
        until(lambda: _replicas(release) == 1, "one gateway again", ALL_SECONDS + 120)
    until(lambda: _phase(release) == "Succeeded", "the end of the load", ALL_SECONDS)
    found = json.loads(node.kubectl("logs", "load", "-n", ROLLOUTS))
    node.kubectl("delete", "pod", "load", "-n", ROLLOUTS, "--now")
    print(f"  answers: {found}", flush=True)
    assert set(found) == {"401"}, found


def _replicas(release: Release) -> int:
    """Gateways that are ready."""
    found = release.node.get("deployment", f"{NAME}-gateway", "-n", NAMESPACE)
    return int(found["status"].get("readyReplicas", 0))


def _phase(release: Release) -> str:
    return str(release.node.get("pod", "load", "-n", ROLLOUTS)["status"]["phase"])
