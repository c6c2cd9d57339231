"""The state of an installed release: pods, claims, readiness, and events, each with a remedy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import httpx

from leyden.libs.cli.cluster.kubectl import Kubectl, KubectlError, Object
from leyden.libs.cli.cluster.release import LASTING, PodState, Release, find_release, lasts, pod_state
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.findings import Finding

INTERNAL_PORT = 9090
SERVICES = LASTING - {"engine", "postgres", "redis"}
"""They answer `/readyz` on their internal port."""
RECENT = timedelta(minutes=15)
MOST_EVENTS = 5
REMEDIES = {
    "ImagePull": "check the image's name, its registry and global.imagePullSecrets",
    "InvalidImageName": "mend the image's name in the values",
    "CreateContainerConfigError": "create the Secret or ConfigMap that it names, or mend the value that does",
    "Unschedulable": "add a node, ask for less in resources, or mend nodeSelector and tolerations",
    "OOMKilled": "raise resources.limits.memory",
    "wait-for-schema": "see `leyden logs migrate` and `leyden logs postgres`",
    "wait-for-server": "see `leyden logs postgres`, or check postgres.external",
    "wait-for-model": "see `leyden logs model`",
}
"""By a part of the reason."""


def examine_release(kubectl: Kubectl, namespace: str | None, name: str | None) -> Iterator[Finding]:
    """Findings about the release that matches."""
    try:
        release = find_release(kubectl, namespace, name)
        states = [pod_state(pod) for pod in release.pods()]
    except CommandError as error:
        yield Finding("release", "skipped" if error.status == Exit.NOT_FOUND else "problem", str(error))
        return
    waiting = [state for state in states if state.reason]
    lasting = [state for state in states if lasts(state.component)]
    ready = sum(not state.reason for state in lasting)
    yield Finding("release", "ok", f"{release.name} in {release.namespace}: {ready} of {len(lasting)} pods ready")
    yield from once_each(finding for state in waiting for finding in _pod(release, state))
    for claim in release.listed("/api/v1", "persistentvolumeclaims"):
        if claim.get("status", {}).get("phase") != "Bound":
            detail = f"{claim['metadata']['name']} is {claim.get('status', {}).get('phase', 'unknown').lower()}"
            remedy = "check the storage class and its access modes, or set storage.existingClaim"
            yield Finding("claim", "problem", detail, remedy)
    for event in _events(release, datetime.now(UTC)):
        yield Finding("event", "warning", event, "")


def once_each(findings: Iterable[Finding]) -> Iterator[Finding]:
    """One finding for each cause and remedy; it names the first pod and counts the others."""
    causes: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        causes.setdefault((finding.status, finding.detail, finding.remedy), []).append(finding)
    for (_, detail, _), same in causes.items():
        others = f" (and {len(same) - 1} more pods)" if len(same) > 1 else ""
        yield replace(same[0], detail=f"{detail}{others}")


def _pod(release: Release, state: PodState) -> Iterator[Finding]:
    """Findings about a pod that is not ready: failed readiness checks where it answers, else the cluster's reason."""
    log = f"see `leyden logs {state.component}`"
    if state.running and state.component in SERVICES:
        causes = _failed_checks(release, state)
        for check, result in causes.items():
            remedy = REMEDIES["wait-for-schema"] if check == "schema" else log
            yield Finding(f"{state.name}: {check}", "problem", result, remedy)
        if causes:
            return
    reason = state.reason + _last_words(release, state)
    remedy = next((words for part, words in REMEDIES.items() if part in reason), log)
    # Agents and trainers wait for room as a matter of course; the run's status says it, too.
    status = "problem" if lasts(state.component) or state.phase == "Failed" else "warning"
    yield Finding(state.name, status, reason, remedy)  # type: ignore[arg-type]  # one of the statuses


def _failed_checks(release: Release, state: PodState) -> dict[str, str]:
    """The readiness checks that fail, by name; none where the pod does not answer."""
    try:
        with (
            release.kubectl.forward(state.namespace, f"pod/{state.name}", INTERNAL_PORT) as url,
            httpx.Client(trust_env=False, timeout=5.0) as client,
        ):
            checks = client.get(f"{url}/readyz").json()["checks"]
    except (KubectlError, httpx.TransportError, ValueError, KeyError):
        return {}
    return {check: result for check, result in checks.items() if result != "ok"}


def _last_words(release: Release, state: PodState) -> str:
    """The last line of an init container that waits."""
    container = state.reason.partition(":")[0]
    if not container.startswith("wait-for-"):
        return ""
    path = f"/api/v1/namespaces/{state.namespace}/pods/{state.name}/log?container={container}&tailLines=1"
    try:
        return f"; {release.kubectl.run('get', '--raw', path).strip()}"
    except KubectlError:
        return ""


def _events(release: Release, now: datetime) -> list[str]:
    """The newest warnings of the cluster, one for each object and reason."""
    found: dict[tuple[str, str], tuple[datetime, str]] = {}
    for namespace in release.namespaces:
        path = f"/api/v1/namespaces/{namespace}/events?fieldSelector={quote('type=Warning')}"
        try:
            events = release.kubectl.items(path)
        except KubectlError:
            continue
        for event in events:
            moment, subject = _time(event), event["involvedObject"]
            key = (f"{subject.get('kind', '').lower()}/{subject.get('name', '')}", event.get("reason", ""))
            if moment is not None and now - moment < RECENT and moment > found.get(key, (now - RECENT, ""))[0]:
                # The cluster's clock may be ahead.
                minutes = max((now - moment).total_seconds(), 0.0) // 60
                message = event.get("message", "").strip().partition("\n")[0]
                found[key] = (moment, f"{minutes:.0f} min ago, {key[0]}: {key[1]}: {message}")
    newest = sorted(found.values(), reverse=True)[:MOST_EVENTS]
    return [text for _, text in newest]


def _time(event: Object) -> datetime | None:
    text = event.get("lastTimestamp") or event.get("eventTime") or event["metadata"].get("creationTimestamp")
    return None if text is None else datetime.fromisoformat(text)
