"""Values that cannot work are refused before anything is installed, with the remedy."""

from __future__ import annotations

import pytest

from tests.contract.chart.chart import CHART, HELMS, template

SMALL = "engine.pools.small.model=/var/lib/leyden/m"
EXTERNAL = "postgres.mode=external,postgres.external.host=db"

WRONG = [
    ("postgres.mode=external", "set postgres.external.host"),
    (EXTERNAL, "postgres.password.existingSecret"),
    ("redis.mode=external", "set redis.external.host"),
    ("global.production=true", "secrets.adminToken.existingSecret"),
    ("global.production=true", "set postgres.mode to external or cnpg"),
    ("engine.gpus=0", "engine.backend to cpu"),
    ("engine.backend=cpu,engine.extraArgs={--tp=2}", "engine.extraEnv"),
    ("model.repository=", "set model.repository"),
    ("engine.pools.default.model=/var/lib/leyden/m", "choose another name"),
    ("engine.pools.small.model=/models", "engine.pools.small.model must be a folder below"),
    ("engine.gpus=0,engine.pools.small.model=/var/lib/leyden/m", "engine.pools.small is of sglang"),
    (f"engine.pools.small.nodes=2,engine.pools.small.backend=cpu,{SMALL}", "set its nodes to 1"),
    (
        f"engine.pools.small.nodes=2,{SMALL},storage.accessModes={{ReadWriteOnce}}",
        "engine.pools.small.nodes is above 1",
    ),
    (f"engine.pools.small.adapters=2,{SMALL}", "write them into its extraArgs"),
    (f"engine.pools.small.maxAdapterRank=8,{SMALL}", "engine.pools.small.maxAdapterRank needs adapters"),
    (f"engine.pools.small.embeddings=true,{SMALL}", "which SGLang makes with --is-embedding"),
    (f"engine.pools.small.embeddings=true,engine.pools.small.backend=cpu,{SMALL}", "the cpu backend does not make"),
    (
        f"engine.pools.small.embeddings=true,engine.pools.small.contextLength=99,{SMALL}",
        "leave out adapters and contextLength",
    ),
    ("engine.pools.group.model=/var/lib/leyden/m", "choose a shorter name"),
    ("model.source=demo", "set engine.backend to cpu"),
    ("model.source=none,model.path=/models", "below /var/lib/leyden/"),
    ("model.source=none", "set model.path"),
    ("model.path=/var/lib/leyden/models/base", "model.path is for model.source none"),
    ("trainer.nodes=2,storage.accessModes={ReadWriteOnce}", "ReadWriteMany"),
    ("trainer.nodes=2,trainer.gpusPerNode=8,trainer.copies=3", "trainer.copies"),
    ("api.ingress.enabled=true", "set api.ingress.host"),
    ("api.httpRoute.enabled=true", "set api.httpRoute.parentRefs"),
    ("runner.warmPool.enabled=true", "set runner.warmPool.image.repository"),
    ("runner.autoscaling.enabled=true,runner.keda.enabled=true", "disable one"),
    ("credit.keda.enabled=true,credit.keda.minReplicas=9", "credit.keda.maxReplicas"),
    ("gateway.autoscaling.minReplicas=20", "gateway.autoscaling.maxReplicas"),
    ("engine.backend=cpu,model.source=demo,engine.nodes=2", "set engine.nodes to 1"),
    ("engine.nodes=2,storage.accessModes={ReadWriteOnce}", "engine.nodes is above 1"),
    ("gateway.ingress.enabled=true", "set gateway.ingress.host"),
    ("gateway.httpRoute.enabled=true", "set gateway.httpRoute.parentRefs"),
    ("gateway.ingress.enabled=true,gateway.ingress.host=x", "networkPolicy.gatewayFrom"),
    ("gateway.service.type=LoadBalancer", "networkPolicy.gatewayFrom, as {ipBlock:"),
    ("api.service.type=NodePort", "networkPolicy.apiFrom"),
    ("rollouts.namespace=platform", "need a namespace that holds nothing else"),
    ("gateway.image.tag=latest", "name a version or a digest"),
    ("imageTag=latest", "name a version or a digest"),
    ("engine.cpuImage.tag=latest,engine.backend=cpu,model.source=demo", "name a version or a digest"),
    ("redis.internal.image.tag=latest", "name a version or a digest"),
    ("credit.terminationGracePeriodSeconds=5,credit.preStopSeconds=5", "credit.preStopSeconds"),
    ("gateway.terminationGracePeriodSeconds=15", "gateway.preStopSeconds"),
]


@pytest.mark.parametrize(("values", "remedy"), WRONG)
def test_a_combination_that_cannot_work_is_refused_with_the_remedy(values: str, remedy: str) -> None:
    done = template("--set", values)
    assert done.returncode != 0
    assert remedy in done.stderr


@pytest.mark.parametrize("helm", HELMS)
@pytest.mark.parametrize(
    "values",
    [
        "gatway=2", "gateway.replica=2", "gateway.replicas=two", "engine.backend=vllm", "postgres.mode=mysql",
        "api.ingress.hosts=x", "logLevel=loud", "storage.accessModes={Everyone}", "rollouts.tmpSize=big",
        "api.service.type=Foo", "gateway.replicas=0", "engine.replicas=0", "trainer.nodes=0", "runner.concurrency=0",
        "imageTag=a/b", "storage.accessModes={ReadOnlyMany}", "postgres.external.host=db/leyden", "model.revision=",
        "secrets.adminToken.existingSecret=Not_A_Name", "monitoring.podMonitor.interval=often",
        "monitoring.podMonitor.interval=0s", "global.imageRegistry=https://ghcr.io", "api.ingress.host=a b",
        "gateway.resources.limits.cpu=abc", "rollouts.allow.limits.cpu=xyz", "model.repository=a b",
        "model.revision=../x",
    ],
)  # fmt: skip
def test_a_misspelled_or_impossible_value_is_refused(values: str, helm: str) -> None:
    done = template("--set", values, helm=HELMS[helm])
    assert done.returncode != 0
    assert values.partition("=")[0].rpartition(".")[2] in done.stderr


def test_production_values_name_everything_that_is_missing() -> None:
    done = template("-f", str(CHART / "values-production.yaml"))
    for missing in ("postgres.external.host", "redis.external.host", "secrets.capabilityKeys.existingSecret"):
        assert missing in done.stderr


def test_a_parent_chart_may_share_its_globals() -> None:
    assert template("--set", "global.somethingOfTheParent=1").returncode == 0
