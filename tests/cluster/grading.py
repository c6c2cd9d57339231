"""Do containers grade a run's rollouts, with their network closed, while graders die?"""

from __future__ import annotations

from typing import Any

from leyden.libs.client import Client
from tests.cluster import faults, training
from tests.cluster.node import step
from tests.cluster.release import NAME, NAMESPACE, ROLLOUTS, Release
from tests.support.waiting import until

STEPS = 1
SECONDS = 1200.0
# The agent's image stands in for one with tests: it has Python and a shell.
SCRIPT = """
import json, socket, sys
opened = 0
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        opened += 1
    except OSError:
        pass
trajectory = json.load(open("/logs/agent/trajectory.json"))
whole = trajectory["schema_version"].startswith("ATIF") and any(s["source"] == "agent" for s in trajectory["steps"])
json.dump({"reward": float(whole), "opened": opened}, open("/logs/verifier/reward.json", "w"))
sys.exit(1)
"""
CLOSED = (f"{NAME}-gateway.{NAMESPACE}.svc:8001", f"{NAME}-api.{NAMESPACE}.svc:8000", "kubernetes.default.svc:443")


def check(release: Release, client: Client) -> None:
    """Trains a step with a metric of containers; the grader dies while they run."""
    release.upgrade("--set=grader.containers.enabled=true")
    run = client.create_run(document())
    with step("a grader dies"):
        until(lambda: release.pods("verifier", ROLLOUTS), "a container that grades", SECONDS)
        faults.delete_each(release, ("grader",))
    training.finish(release, client, run.id, STEPS, SECONDS)
    graded = [client.rollout(one.id) for one in client.rollouts(run=run.id, state="finished")]
    found = [one for rollout in graded for one in rollout.components if one.component == "tests"]
    assert found, "no rollout was graded"
    wrong = [one for one in found if one.value != 1.0 or "opened 0" not in one.explanation]
    assert not wrong, wrong[:3]
    until(lambda: not release.pods("verifier", ROLLOUTS), "the Jobs are gone")
    release.upgrade()


def document() -> dict[str, Any]:
    """The run of the flight agent, whose reward line counts, and a container that measures."""
    command = ["python", "-c", SCRIPT, *CLOSED]
    grader = {"type": "container", "image": training.AGENT_IMAGE, "command": command, "timeout_seconds": 120}
    components = [{"name": "line", "from": "agent"}, {"name": "tests", "weight": 0, "grader": grader}]
    return {**training.document("containers", STEPS), "reward": {"components": components}}
