"""Waits, inside a pod of an agent or a grader and before it begins, until NetworkPolicies hold for the pod.

Some network plugins start a pod first and close its network up to a second later. An agent would reach the metadata
address, the API server and the internet meanwhile. The canary is an address that nothing but the policies closes: by
default the API server; where agents may reach the internet and the API server's address is public, the operator names
another one. Once it is closed while the gateway is open, the network works and the policies hold. A grader's pod
reaches nothing, so that a closed canary is all that it can see.

It runs with the standard library alone, as the init container `wait-for-policies`. Its last words are the reason of an
attempt that could not start.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

PROBE_SECONDS = 0.3
GATEWAY_SECONDS = 2.0
PAUSE_SECONDS = 0.1
TRIES = 2
"""A lost packet looks like a closed address; two in a row are unlikely."""
LAST_WORDS = Path("/dev/termination-log")


def is_open(address: str, seconds: float) -> bool:
    """Whether somebody accepts a connection there within this time."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()
    except OSError:
        return False
    return True


def resolves(address: str) -> bool:
    """Whether the host of an address is known."""
    try:
        socket.getaddrinfo(address.rpartition(":")[0].strip("[]"), None)
    except OSError:
        return False
    return True


def obstacle(canary: str, gateway: str | None) -> str | None:
    """The reason why the agent may not begin yet.

    The gateway comes first: while the pod has no network at all, every address looks closed. Args: gateway: None where
    the policies close it, and name lookups, too
    """
    if gateway is not None and not is_open(gateway, GATEWAY_SECONDS):
        return f"the gateway {gateway} is closed to the agent's pod"
    if gateway is not None and not resolves(canary):
        return f"the canary address {canary} has no such host: correct rollouts.policyWait.canary"
    if any(is_open(canary, PROBE_SECONDS) for _ in range(TRIES)):
        return (
            f"the canary address {canary} is open: the network plugin does not enforce NetworkPolicies, or a value"
            " opens it: rollouts.allowInternet a public address, rollouts.extraEgress those that it names. Then name a"
            " private address that answers and that only the policies close in rollouts.policyWait.canary"
        )
    return None


def wait(canary: str, gateway: str | None, seconds: float) -> str | None:
    """None once the policies hold; after this time, the reason why the agent may not begin."""
    ends = time.monotonic() + seconds
    while (reason := obstacle(canary, gateway)) is not None:
        if time.monotonic() > ends:
            return f"policies did not hold within {seconds:g} s: {reason}"
        time.sleep(PAUSE_SECONDS)
    return None


def main() -> int:
    """Exit status 1 where the policies never held, with the reason as the container's last words."""
    server = f"{os.environ.get('KUBERNETES_SERVICE_HOST', '')}:{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    canary = os.environ.get("POLICY_CANARY") or server
    reason = wait(canary, os.environ.get("POLICY_GATEWAY"), float(os.environ["POLICY_SECONDS"]))
    if reason is None:
        return 0
    LAST_WORDS.write_text(reason)
    return 1


if __name__ == "__main__":
    sys.exit(main())
