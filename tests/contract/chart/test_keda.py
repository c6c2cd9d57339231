"""Runner and credit by the length of their queues: the queries count what Postgres holds."""

from __future__ import annotations

from sqlalchemy import text

from leyden.libs.store.database import Database
from tests.contract.chart.chart import FULLNAME, NAMESPACE, Object, of_kind
from tests.support import builders


def scaler(name: str) -> Object:
    found = {one["metadata"]["name"]: one["spec"] for one in of_kind("keda", "ScaledObject")}
    return found[f"{FULLNAME}-{name}"]


async def count(database: Database, name: str) -> int:
    (trigger,) = scaler(name)["triggers"]
    async with database.read() as session:
        return int(await session.scalar(text(trigger["metadata"]["query"])))


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


async def test_credits_query_counts_complete_groups(database: Database) -> None:
    run = await builders.add_run(database)
    await builders.add_group(database, run, 0)
    await builders.add_group(database, run, 1, state="complete")
    assert await count(database, "credit") == 1
