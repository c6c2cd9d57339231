"""Agents in containers, by a real podman or docker: what they see, how they end, and what is left of them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from leyden.libs.capability import KeyRing, verify
from leyden.libs.contracts.capability import Scope
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.runner.backends.base import out_of_memory
from tests.contract.runner.test_attempts import Bench, stopped
from tests.support import builders
from tests.support.containers import (
    IMAGE,
    PROGRAM,
    build_image,
    build_image_with_volume,
    containers,
    containers_only,
)

pytestmark = containers_only


@pytest.fixture(scope="session")
def image() -> str:
    build_image()
    return IMAGE


class ContainerBench(Bench):
    """The bench of `test_attempts`, whose agents are shell programs in containers."""

    async def enqueue_shell(
        self, code: str, *arguments: str, agent: dict[str, Any] | None = None, task: Any = None, **runner: Any
    ) -> tables.Rollout:
        command = ["sh", "-c", code, *arguments]
        config = builders.run_document(
            agent={"command": command, **(agent or {})},
            runner={"type": "container", "image": IMAGE, "timeout_seconds": 60, **runner},
        )
        dataset = await builders.add_dataset(self.database, [task], name=f"one {len(code)}") if task else None
        run = await builders.add_run(self.database, config=config, dataset_id=dataset.id if dataset else None)
        _, [rollout] = await builders.add_group(self.database, run, size=1)
        await self.queue.enqueue([rollout.id], "container")
        return rollout

    async def start(self, **environment: str) -> Any:
        daemon = {name: os.environ[name] for name in ("DOCKER_HOST",) if name in os.environ}
        return await super().start(RUNNER_CONTAINER_PROGRAM=PROGRAM, **daemon, **environment)

    @property
    def work_folder(self) -> Path:
        return self.folder / "attempts"

    async def until_gone(self) -> None:
        async def gone() -> bool:
            return not containers(self.work_folder)

        await self.until(gone)

    async def artifacts(self) -> Sequence[tables.Artifact]:
        async with self.database.read() as session:
            return (await session.scalars(select(tables.Artifact).order_by(tables.Artifact.path))).all()


@pytest.fixture
async def bench(database: Database, redis_url: str, tmp_path: Path, image: str) -> AsyncIterator[ContainerBench]:
    made = ContainerBench(database, redis_url, tmp_path)
    yield made
    await made.close()


SEES = r"""
fact() { printf '"%s": "%s"' "$1" "$(printf %s "$2" | tr '\n\t' '; ')"; }
echo kept > report.md; echo dropped > scratch
touch /bin/new 2>/dev/null && touch /tmp/left && root=writable || root=closed
printf '{"reward": 1, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s}\n' \
    "$(fact user "$(id -u):$(id -g)")" "$(fact rights "$(grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status)")" \
    "$(fact root $root)" "$(fact paths "$PWD $HOME $TMPDIR $LEYDEN_TASK_FILE")" "$(fact key "$OPENAI_API_KEY")" \
    "$(fact headers "$OPENAI_CUSTOM_HEADERS")" "$(fact traces "$OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")" \
    "$(fact own "$OWN")" "$(fact processes "$(ls -d /proc/[0-9]* | wc -l)")" \
    "$(fact ours "$(env | grep -c -E '^(RUNNER_|PLATFORM|LEYDEN_DATABASE)')")"
cat; cat "$LEYDEN_TASK_FILE" input.json
"""


async def test_an_agent_has_its_workspace_its_variables_and_no_rights(bench: ContainerBench) -> None:
    agent = {
        "environment": {"OWN": "in {task.trip}"},
        "task": "stdin",
        "task_file": "input.json",
        "artifacts": ["*.md"],
    }
    async with stopped(await bench.start()):
        rollout = await bench.enqueue_shell(SEES, agent=agent, task={"trip": "Bari"})
        outcome = await bench.outcome(rollout)
        assert (outcome.kind, outcome.reward, outcome.exit_code) == ("succeeded", 1.0, 0), outcome.detail
        assert [(one.path, one.content) for one in await bench.artifacts()] == [("report.md", b"kept\n")]
        assert containers(bench.work_folder) == []
    facts, place = outcome.facts, bench.work_folder / "attempt"
    assert outcome.stdout_tail.splitlines()[1:] == ['{"trip": "Bari"}' * 3]
    assert not facts["user"].startswith("0:")
    zeros = "0" * 16
    found = [" ".join(line.split()) for line in facts["rights"].split(";")]
    assert found == [f"CapEff: {zeros}", f"CapBnd: {zeros}", "NoNewPrivs: 1"]
    assert facts["root"] == "closed"
    assert facts["paths"] == f"{place}/work {place}/work {place}/tmp {place}/task.json"
    assert facts["headers"] == f"X-Rollout-Id: {rollout.id};X-Attempt: 1"
    assert facts["traces"] == f"{bench.endpoints.collector}/r/{rollout.id}/1/v1/traces"
    assert (facts["own"], facts["ours"]) == ("in Bari", "0")
    assert int(facts["processes"]) < 10
    verify(KeyRing(bench.keys), facts["key"], rollout_id=rollout.id, attempt=1, scope=Scope.MODEL)
    assert not list(bench.work_folder.glob("runner-*"))


async def test_an_agent_writes_into_no_volume_of_its_image(bench: ContainerBench) -> None:
    image = build_image_with_volume()
    async with stopped(await bench.start()):
        rollout = await bench.enqueue_shell("cat /data/kept; echo > /data/new || echo '{\"reward\": 1}'", image=image)
        outcome = await bench.outcome(rollout)
    if Path(PROGRAM).name == "podman":
        assert (outcome.kind, outcome.stdout_tail.splitlines()) == ("succeeded", ["of the image", '{"reward": 1}'])
    else:
        assert outcome.kind == "infra_error" and "declares volumes (/data)" in outcome.detail


async def test_each_end_has_its_outcome(bench: ContainerBench) -> None:
    async with stopped(await bench.start()):
        crash = await bench.enqueue_shell("echo broken >&2; exit 3")
        slow = await bench.enqueue_shell("echo begun; sleep 600", timeout_seconds=3)
        lost = await bench.enqueue_shell("true", image="localhost/leyden-no-such-image:1")
        absent = await bench.enqueue_shell("true", agent={"command": ["no-such-program"]})
        big = await bench.enqueue_shell("tail -c 200m /dev/zero", memory_bytes=2**26)
        found = [await bench.outcome(one) for one in (crash, slow, lost, absent, big)]
    crashed, timed_out, no_image, no_program, exceeded = found
    assert (crashed.kind, crashed.exit_code, crashed.stderr_tail) == ("agent_error", 3, "broken\n")
    assert (timed_out.kind, timed_out.stdout_tail) == ("timeout", "begun\n")
    assert no_image.kind == "infra_error"
    assert "is not on the runner's machine, and no registry gave it" in no_image.detail
    assert no_program.kind == "infra_error"
    assert "could not be started" in no_program.detail
    assert "no-such-program" in no_program.detail
    assert (exceeded.kind, exceeded.exit_code) == ("infra_error", 137)
    assert exceeded.detail == out_of_memory("runner.memory_bytes")
    assert containers(bench.work_folder) == []


async def test_the_next_runner_removes_the_containers_of_a_killed_one(bench: ContainerBench) -> None:
    first = await bench.start()
    rollout = await bench.enqueue_shell("echo > begun; exec sleep 600")

    async def begun() -> bool:
        return bool(list(bench.work_folder.rglob("begun")))

    await bench.until(begun)
    [container] = containers(bench.work_folder)
    first.send_signal(signal.SIGKILL)
    await first.wait()
    assert containers(bench.work_folder) == [container]
    async with stopped(await bench.start()):
        await bench.until_gone()
        after = await bench.enqueue_shell("echo '{\"reward\": 1}'")
        assert (await bench.outcome(after)).kind == "succeeded"
        assert not list(bench.work_folder.rglob("begun"))
    async with bench.database.read() as session:
        assert await session.get(tables.Outcome, (rollout.id, 1)) is None


async def test_a_stopped_runner_ends_its_containers_and_gives_them_back(bench: ContainerBench) -> None:
    async with stopped(await bench.start()):
        rollout = await bench.enqueue_shell("echo > begun; trap '' TERM; while true; do sleep 1; done")

        async def begun() -> bool:
            return bool(list(bench.work_folder.rglob("begun")))

        await bench.until(begun)
    assert containers(bench.work_folder) == []
    outcome = await bench.outcome(rollout)
    assert (outcome.kind, outcome.detail) == ("infra_error", "the runner was stopped")
