"""`make test-cluster CLUSTER=…`: installs the chart on a real node, trains there, breaks things, and uninstalls.

Each module beside this one answers one question. The output says how long each part took. `--long` adds what takes
too long for every change, and `--only` asks one of those questions alone. The make variable CPU_TORCH of `make images`
may come from the environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from leyden.libs.client import Client
from tests.cluster import commands, faults, grading, isolation, rights, scaling, sharing, training, upgrades, versions
from tests.cluster.node import Node, step
from tests.cluster.release import SERVICES, Release
from tests.support.tools import fetch

RUN_SECONDS = 1800.0
FEW_STEPS = 2
LONG: dict[str, tuple[str, Callable[[Release, Client], None]]] = {
    "grading": ("containers that grade", grading.check),
    "sharing": ("pods that attempts share", sharing.check),
    "versions": ("versions in an object store", versions.check),
}
"""Questions that take too long for every change, by their names in `--only`."""


def main() -> int:
    """Raises AssertionError where the platform did not do what the docs say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster", required=True, type=Path, help="the program that starts the node")
    parser.add_argument("--built", action="store_true", help="the images are in the node already; start no cluster")
    parser.add_argument("--stay", action="store_true", help="leave the cluster running")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--long", action="store_true", help="also every fault, upgrade, rollback and scaling; an image for each service"
    )
    parser.add_argument("--only", choices=sorted(LONG), help="install the chart and ask this question alone")
    arguments = parser.parse_args()
    fetch()
    node = Node(arguments.cluster)
    try:
        with step("all"):
            if not arguments.built:
                start(node, arguments.long, _needs_store(arguments))
            release = Release(node, one_image=not arguments.long)
            install(release, arguments)
            if arguments.only:
                with release.client() as client:
                    training.upload(client)
                    LONG[arguments.only][1](release, client)
            else:
                check(release, arguments.steps, arguments.long)
    except Exception as error:
        error.add_note(node.state())
        raise
    finally:
        if not arguments.stay:
            node.down()
    return 0


def start(node: Node, long: bool, store: bool) -> None:
    """The node, with every image; the object store's only where one is asked for."""
    node.up()
    node.images(SERVICES, each=long)
    if store:
        node.store_image()


def _needs_store(arguments: argparse.Namespace) -> bool:
    """Whether a question needs the image of the object store's server."""
    return arguments.long or arguments.only == "versions"


def install(release: Release, arguments: argparse.Namespace) -> None:
    """Installs the chart. A node on which not even the stores start is no evidence against it: a new one is, once."""
    try:
        release.install()
    except RuntimeError as error:
        if arguments.built or release.has_a_store():
            raise
        print(f"no store became ready, so the node is started again: {error}\n{release.node.state()}", flush=True)
        start(release.node, arguments.long, _needs_store(arguments))
        release.install()


def check(release: Release, steps: int, long: bool) -> None:
    """Every question in turn."""
    with step("rights"):
        rights.check(release.node)
    with step("isolation"):
        isolation.check(release)
    with release.client() as client:
        training.upload(client)
        with step("the leyden command"):
            commands.check(release)
        with step("an image that cannot be pulled"):
            faults.check_start_failures(release, client)
        if not long:
            with step("a run with kills"):
                train_with_kills(release, client)
        else:
            with step("a run with faults"):
                train_with_faults(release, client, steps)
            with step("a run through upgrade and rollback"):
                train_through_upgrade(release, client, steps)
            for title, ask in LONG.values():
                with step(title):
                    ask(release, client)
            with step("scaling"):
                scaling.check(release)
        client.create_run(training.document("uninstall", 1))
    upgrades.uninstall(release)


def train_with_kills(release: Release, client: Client) -> None:
    """An agent and the trainer die, and the run completes."""
    run = client.create_run(training.document("kills", FEW_STEPS))
    faults.kill_agent(release)
    faults.kill_trainer(release)
    training.finish(release, client, run.id, FEW_STEPS, RUN_SECONDS)


def train_with_faults(release: Release, client: Client, steps: int) -> None:
    """Everything dies once, and the run completes."""
    with step("a full quota"), faults.full_quota(release):
        run = client.create_run(training.document("faults", steps))
        faults.check_quota_reason(client, run.id)
        faults.restart_api_server(release)
    faults.kill_agent(release)
    faults.kill_trainer(release)
    faults.delete_each(release, ("engine", "redis", "postgres"))
    faults.evict_trainer(release)
    # On a quick machine the run may end before the last of them.
    faults.delete_each(release, SERVICES)
    training.finish(release, client, run.id, steps, RUN_SECONDS)


def train_through_upgrade(release: Release, client: Client, steps: int) -> None:
    """The release changes under a run, and goes back."""
    run = client.create_run(training.document("upgrade", steps))
    upgrades.upgrade(release)
    faults.still_runs(client, run.id)
    upgrades.check_budget(release)
    upgrades.rollback(release)
    training.finish(release, client, run.id, steps, RUN_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
