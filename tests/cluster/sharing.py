"""Does a run train in pods that attempts share, do siblings stay apart there, and how many start a second?"""

from __future__ import annotations

from typing import Any

from leyden.libs.client import Client
from tests.cluster import training
from tests.cluster.node import step
from tests.cluster.release import ROLLOUTS, Release
from tests.support.waiting import until

STEPS = 1
SECONDS = 1200.0
MANY, AT_ONCE = 1000, 250
"""Attempts in flight, and those of one pod."""
# Before each attempt's agent; what it gets is printed, and fails the attempt.
THIEF = """
import os, socket, sys
got, own = [], os.getuid()
def attempt(what, theft):
    try:
        got.append(what) if theft() else None
    except OSError:
        pass
for pid in filter(str.isdigit, os.listdir("/proc")):
    attempt(f"pid {pid}", lambda: os.stat(f"/proc/{pid}").st_uid != own and os.kill(int(pid), 0) is None)
    for name in ("environ", "mem", "cwd/", "fd/1"):
        attempt(name, lambda: os.stat(f"/proc/{pid}").st_uid != own and open(f"/proc/{pid}/{name}"))
attempt("siblings", lambda: os.listdir("/var/run/leyden-attempts"))
attempt("a folder", lambda: any(os.listdir(f"/var/run/leyden-attempts/{uid}/work")
        for uid in range(30000, 50000) if uid != own))
attempt("the server", lambda: socket.create_connection((socket.gethostname(), 8010), 5).recv(1))
attempt("root", lambda: os.setuid(0) is None)
attempt("left behind", lambda: any(os.listdir(one) for one in (os.environ["HOME"], os.environ["TMPDIR"])))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
attempt("rights", lambda: int(status["CapEff"], 16) or int(status["CapPrm"], 16) or status["NoNewPrivs"].strip() != "1")
sys.exit(f"{own} got {got}" if own == 10001 or got else 0)
"""
SLEEP = "date +%s.%N; sleep 60; date +%s.%N; echo '{\"reward\": 0}'"


def check(release: Release, client: Client) -> None:
    """Trains with a thief in front of each agent, then starts many attempts that sleep."""
    values = f"rollouts.attemptsPerPod={AT_ONCE},runner.concurrency={MANY},runner.resources.limits.memory=2Gi"
    release.upgrade("--set", values)
    with step("a run whose attempts share a pod"):
        command = ["/bin/sh", "-c", 'python -c "$THIEF" && exec python agent.py']
        run = client.create_run(document("sharing", command, {"THIEF": THIEF}, 8))
        training.finish(release, client, run.id, STEPS, SECONDS)
    with step(f"{MANY} attempts in flight"):
        measure(release, client)
    until(lambda: not release.node.get("jobs", "-n", ROLLOUTS)["items"], "the end of unused pods")
    release.upgrade()


def document(name: str, command: list[str], environment: dict[str, str], attempts: int) -> dict[str, Any]:
    """The flight agent's run, with another command, in shared pods."""
    found = training.document(name, STEPS)
    found["agent"] = {"command": command, "environment": environment}
    # The flight agent needs more than an eighth of what values-dev.yaml gives a pod.
    found["runner"] |= {"attempts_per_pod": attempts, "resources": {"limits": {"memory": "4Gi"}}}
    return found


def measure(release: Release, client: Client) -> None:
    """Prints how many attempts a second begin and how many run at once, by the agents' own clocks."""
    many = document("many", ["/bin/sh", "-c", SLEEP], {}, AT_ONCE)
    many["sampling"] |= {"group_size": 8, "groups_per_step": MANY // 8}
    run = client.create_run(many)
    until(lambda: _ended(client, run.id) >= MANY, f"the end of {MANY} attempts", SECONDS)
    client.cancel_run(run.id)
    outcomes = [
        attempt.outcome
        for rollout in client.rollouts(run=run.id)
        for attempt in client.rollout(rollout.id).attempts
        if attempt.outcome is not None
    ]
    times = [tuple(map(float, one.stdout_tail.split()[:2])) for one in outcomes if one.exit_code == 0]
    assert len(times) >= MANY, len(times)
    begun = sorted(began for began, _ in times)[:MANY]
    events = sorted([(began, 1) for began, _ in times] + [(ended, -1) for _, ended in times])
    running = most = 0
    for _, change in events:
        running += change
        most = max(most, running)
    print(f"  {MANY / (begun[-1] - begun[0]):.0f} starts a second, {most} at once", flush=True)


def _ended(client: Client, run_id: str) -> int:
    return sum(one.state not in {"queued", "running"} for one in client.rollouts(run=run_id))
