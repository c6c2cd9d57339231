"""What may the accounts of controller and runner do?"""

from __future__ import annotations

import subprocess

from tests.cluster.node import Node
from tests.cluster.release import NAME, NAMESPACE, ROLLOUTS
from tests.support.tools import KUBECTL

Right = tuple[str, str, str]
"""Verb, resource, subresource."""

ALLOWED: dict[tuple[str, str], set[Right]] = {
    ("controller", NAMESPACE): {("create", "jobs", ""), ("delete", "jobs", ""), ("list", "pods", "")},
    ("runner", ROLLOUTS): {
        *(("create", "jobs", ""), ("delete", "jobs", ""), ("list", "pods", "")),
        *(("get", "pods", "log"), ("create", "secrets", "")),
    },
}
REFUSED: set[Right] = {
    *(("get", "secrets", ""), ("list", "secrets", ""), ("create", "pods", ""), ("create", "pods", "exec")),
    *(("get", "configmaps", ""), ("create", "rolebindings", ""), ("list", "nodes", "")),
}


def check(node: Node) -> None:
    """Asks the API server about each account, in each namespace."""
    asked = REFUSED.union(*ALLOWED.values())
    for account in ("controller", "runner"):
        for namespace in (NAMESPACE, ROLLOUTS, "default"):
            found = {right for right in asked if _can(node, account, namespace, *right)}
            assert found == ALLOWED.get((account, namespace), set()), (account, namespace, found)


def _can(node: Node, account: str, namespace: str, verb: str, resource: str, subresource: str) -> bool:
    user = f"system:serviceaccount:{NAMESPACE}:{NAME}-{account}"
    command = [str(KUBECTL), "auth", "can-i", verb, resource, f"--subresource={subresource}", "-n", namespace]
    done = subprocess.run([*command, "--as", user], env=node.environment, capture_output=True, text=True)
    return done.stdout.strip() == "yes"
