"""Do runs train in pods that attempts share, through kills too, do siblings stay apart, and how fast do they start?"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

from leyden.libs.client import Client
from leyden.libs.sandbox.pod_server import FOLDER
from leyden.services.runner.backends.kubernetes.shared_job import SHARED
from tests.cluster import training
from tests.cluster.cpu import Accounts
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
SLOW_AGENT = ["/bin/sh", "-c", "sleep 20; exec python agent.py"]
SEVERAL = 4
"""So many attempts are in flight in a pod that is killed."""
SLEEP = "date +%s.%N; sleep 60; date +%s.%N; echo '{\"reward\": 0}'"


def check(release: Release, client: Client) -> None:
    """Trains with a thief in front of each agent, then starts many attempts that sleep."""
    values = f"rollouts.attemptsPerPod={AT_ONCE},runner.concurrency={MANY},runner.resources.limits.memory=2Gi"
    release.upgrade("--set", values)
    with step("a run whose attempts share a pod"):
        command = ["/bin/sh", "-c", 'python -c "$THIEF" && exec python agent.py']
        run = client.create_run(document("sharing", command, {"THIEF": THIEF}, 8))
        training.finish(release, client, run.id, STEPS, SECONDS)
    with step("a run through kills"):
        kill(release, client)
    with step(f"{MANY} attempts in flight"):
        measure(release, client)
    until(lambda: _all_over(release), "the end of unused pods")
    release.upgrade()


def _all_over(release: Release) -> bool:
    """Whether the runner has deleted its Jobs. One whose runner was killed ends by itself, and stays for a while."""
    return all(job["status"].get("succeeded") for job in release.node.get("jobs", "-n", ROLLOUTS)["items"])


def document(name: str, command: list[str], environment: dict[str, str], attempts: int) -> dict[str, Any]:
    """The flight agent's run, with another command, in shared pods."""
    found = training.document(name, STEPS)
    found["agent"] = {"command": command, "environment": environment}
    # The flight agent needs more than an eighth of what values-dev.yaml gives a pod.
    found["runner"] |= {"attempts_per_pod": attempts, "resources": {"limits": {"memory": "4Gi"}}}
    return found


def kill(release: Release, client: Client) -> None:
    """Kills a pod with several attempts at work, and then the runner. The run completes, and each attempt ends once."""
    run = client.create_run(document("sharing through kills", SLOW_AGENT, {}, 8))
    with step("kill a shared pod"):
        killed = until(lambda: _busy_pod(release, []), "a pod with attempts", SECONDS)
        release.delete_pod(killed, "--grace-period=0", "--force")
    with step("kill the runner"):
        orphaned = until(lambda: _busy_pod(release, [killed]), "another pod with attempts", SECONDS)
        for runner in release.pods("runner"):
            release.delete_pod(runner, "--grace-period=0", "--force")
        until(lambda: _at_work(release, orphaned) == 0, "the end of attempts whose runner is gone", 60)
    training.finish(release, client, run.id, STEPS, SECONDS)
    rollouts = [client.rollout(one.id) for one in client.rollouts(run=run.id)]
    ends = Counter(one.outcome.kind if one.outcome else one.state for all_ in rollouts for one in all_.attempts)
    verdicts = [
        sum(one.outcome is not None and one.outcome.exit_code is not None for one in all_.attempts) for all_ in rollouts
    ]
    print(f"  {len(rollouts)} rollouts, attempts by their end: {dict(ends)}", flush=True)
    assert ends["infra_error"] >= SEVERAL, ends
    assert ends["expired"] >= SEVERAL, ends
    assert max(verdicts) == 1, verdicts


def _busy_pod(release: Release, without: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """A shared pod with several attempts at work."""
    known = {pod["metadata"]["uid"] for pod in without}
    new = [pod for pod in release.pods(SHARED, ROLLOUTS, "Running") if pod["metadata"]["uid"] not in known]
    return next((pod for pod in new if (_at_work(release, pod) or 0) >= SEVERAL), None)


def _at_work(release: Release, pod: dict[str, Any]) -> int | None:
    """The attempts in a shared pod, 0 where it is gone; None: it does not answer."""
    name = pod["metadata"]["name"]
    if all(one["metadata"]["name"] != name for one in release.pods(SHARED, ROLLOUTS, "Running")):
        return 0
    try:
        return len(release.node.kubectl("exec", name, "-n", ROLLOUTS, "-c", "agent", "--", "ls", FOLDER).split())
    except RuntimeError as error:
        print(f"  {name}: {error}", flush=True)
        return None


def measure(release: Release, client: Client) -> None:
    """Prints how many attempts a second begin and how many run at once, by the agents' own clocks, and the CPU of each
    part for one start."""
    many = document("many", ["/bin/sh", "-c", SLEEP], {}, AT_ONCE)
    many["sampling"] |= {"group_size": 8, "groups_per_step": MANY // 8}
    accounts, parts = Accounts(release.node), dict[str, str]()
    with accounts.reading():
        created = time.time()
        run = client.create_run(many)
        until(lambda: len(release.pods(SHARED, ROLLOUTS, "Running")) >= MANY // AT_ONCE, "the pods", SECONDS)
        for pod in [*release.pods(), *release.pods(namespace=ROLLOUTS)]:
            parts[pod["metadata"]["uid"]] = pod["metadata"].get("labels", {}).get("app.kubernetes.io/component", "?")
        until(partial(_all_ended, client, run.id), f"the end of {MANY} attempts", SECONDS)
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
    for name, since in ("the run's creation", created), ("the first start", begun[0]):
        used = accounts.between(since, begun[-1], parts)
        costs = ", ".join(f"{part} {1000 * seconds / MANY:.1f}" for part, seconds in used if seconds * 1000 > MANY / 20)
        print(f"  ms of CPU for a start, from {name} to the last start: {costs}", flush=True)


def _all_ended(client: Client, run_id: str) -> bool:
    """By one small request every five seconds: a list of all rollouts would take CPU from their starts."""
    time.sleep(5)
    counts = client.run(run_id).progress.rollouts
    return sum(count for state, count in counts.items() if state not in {"queued", "running"}) >= MANY
