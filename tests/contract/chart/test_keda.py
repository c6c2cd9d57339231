"""Runner and credit by the length of their queues: the queries count what Postgres holds."""

from __future__ import annotations

from sqlalchemy import text

from leyden.libs.store import tables
from leyden.libs.store.attempts import RUNNER_TYPE
from leyden.libs.store.database import Database
from leyden.libs.store.demonstrations import claim_supervised
from tests.contract.chart.chart import FULLNAME, NAMESPACE, Object, of_kind
from tests.support import builders


def scaler(name: str) -> Object:
    found = {one["metadata"]["name"]: one["spec"] for one in of_kind("keda", "ScaledObject")}
    return found[f"{FULLNAME}-{name}"]


def query(name: str) -> str:
    (trigger,) = scaler(name)["triggers"]
    return str(trigger["metadata"]["query"])


async def count(database: Database, name: str) -> int:
    async with database.read() as session:
        return int(await session.scalar(text(query(name))))


def test_keda_scales_the_deployments_alone() -> None:
    deployments = {one["metadata"]["name"]: one["spec"] for one in of_kind("keda", "Deployment")}
    for name, target, bounds in (("runner", "100", (2, 6)), ("credit", "16", (0, 8))):
        spec = scaler(name)
        assert set(spec) == {
            "scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod", "triggers",
        }  # fmt: skip
        assert "replicas" not in deployments[spec["scaleTargetRef"]["name"]]
        assert (spec["minReplicaCount"], spec["maxReplicaCount"]) == bounds
        (trigger,) = spec["triggers"]
        assert trigger["metadata"]["targetQueryValue"] == target
        container = deployments[spec["scaleTargetRef"]["name"]]["template"]["spec"]["containers"][0]
        variables = {one["name"]: one for one in container["env"]}
        # KEDA calls from a namespace of its own, where a short name means nothing.
        assert (
            trigger["metadata"]["host"]
            == variables["LEYDEN_DATABASE_HOST"]["value"]
            == f"{FULLNAME}-postgres.{NAMESPACE}.svc"
        )
        assert "secretKeyRef" in variables[trigger["metadata"]["passwordFromEnv"]]["valueFrom"]
    assert not list(of_kind("keda", "HorizontalPodAutoscaler"))


async def test_the_runners_query_counts_rollouts_for_jobs(database: Database) -> None:
    config = builders.run_document(runner={"type": "kubernetes", "image": "agents:1"})
    await builders.add_group(database, await builders.add_run(database, config=config), size=3)
    _, paused = await builders.add_group(
        database, await builders.add_run(database, config=config, intent="paused"), size=2
    )
    await builders.add_group(database, await builders.add_run(database), size=2)
    assert await count(database, "runner") == 3
    # A pause leaves attempts to their end.
    await builders.add_attempt(database, paused[0])
    assert await count(database, "runner") == 4


async def test_the_runners_query_reads_the_runner_of_each_group(database: Database) -> None:
    """With several agents it is the agent's, by which controller and runner queue and lease."""
    run = await builders.add_run(database)
    await builders.add_group(database, run, 0, size=3, agent="a", runner_type="kubernetes")
    config = builders.run_document(runner={"type": "kubernetes", "image": "agents:1"})
    run = await builders.add_run(database, config=config)
    await builders.add_group(database, run, 0, size=2, agent="b", runner_type="external")
    assert await count(database, "runner") == 3
    assert RUNNER_TYPE in query("runner")


async def test_credits_query_counts_runs_of_fine_tuning_that_await_it(database: Database) -> None:
    dataset = (await builders.add_dataset(database)).id
    source = await builders.add_run(database, dataset_id=dataset)
    group, _ = await builders.add_group(database, source, 0, state="complete")
    config = builders.run_document(algorithm={"type": "sft", "runs": [source.id]})
    tuned = await builders.add_run(database, dataset_id=dataset, config=config)
    assert await count(database, "credit") == 2
    async with database.session() as session:
        claimed = await claim_supervised(session)
    assert claimed is not None and claimed.id == tuned.id
    # The demonstration is a group of another run, which still needs a credit of its own.
    async with database.session() as session:
        row = {"verdict": "credited", "credit_version": 1, "counted_siblings": 1, "has_variance": False}
        session.add(tables.GroupCredit(run_id=tuned.id, group_id=group.id, **row))
    assert await count(database, "credit") == 1


async def test_credits_query_counts_complete_groups(database: Database) -> None:
    run = await builders.add_run(database)
    await builders.add_group(database, run, 0)
    await builders.add_group(database, run, 1, state="complete")
    assert await count(database, "credit") == 1
