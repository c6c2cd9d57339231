"""Several policies in one run: each role has a model of its own, and each trained one a trainer and versions."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoTokenizer

from leyden.libs.cli.local.platform import Platform
from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import ResumeRequest, RunParent
from leyden.libs.contracts.weights import weights_sha256
from leyden.libs.faults import FaultInjector
from tests.campaigns.soak import kill
from tests.e2e.pools import platform_with_pools
from tests.invariants import violations
from tests.support.long import long_only
from tests.support.tiny_model import make_tiny_model

PAIR = Path(__file__).parents[1] / "agents" / "pair.py"


@pytest.fixture(scope="module")
def injector(tmp_path_factory: pytest.TempPathFactory) -> FaultInjector:
    return FaultInjector(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory, injector: FaultInjector) -> Iterator[Platform]:
    """A platform with two pools, whose models have other weights and other vocabularies."""
    folder = tmp_path_factory.mktemp("policies")
    one, other = make_tiny_model(folder / "one"), make_checker(folder / "other")
    with platform_with_pools(folder, {"default": one, "second": other}, injector.environment) as running:
        yield running


def make_checker(folder: Path) -> Path:
    return make_tiny_model(folder, seed=1, vocab_size=384)


def pair_run(steps: int, **checker: Any) -> dict[str, Any]:
    return {
        "name": "pair",
        "dataset": "bandit",
        "agent": {"command": ["{python}", "-I", "-S", str(PAIR)]},
        "runner": {"timeout_seconds": 120},
        "sampling": {"group_size": 8, "groups_per_step": 2, "max_attempts": 20},
        "optimizer": {"learning_rate": 0.02},
        "training": {"steps": steps},
        "evaluation": {"dataset": "bandit", "rollouts_per_task": 4},
        "roles": [
            {"name": "writer", "agent_name": "writer"},
            {"name": "checker", "model": "checker", "policy": "checker"},
        ],
        "policies": {"checker": {"pool": "second", **checker}},
    }


def wait_for_step(client: Client, run_id: str, step: int) -> None:
    """Returns once the run's checker has made the step."""
    deadline = time.monotonic() + 300
    while client.run(run_id).policies["checker"].step < step:
        assert time.monotonic() < deadline, f"{run_id} made no step {step}"
        time.sleep(0.2)


@long_only
@pytest.mark.timeout(900)
def test_two_policies_learn_together_and_go_on_from_an_earlier_version(
    platform: Platform, client: Client, injector: FaultInjector
) -> None:
    last = 24
    created = client.create_run(pair_run(last))
    checker_id = created.policies["checker"].id
    # Both trainers and the controller die while the two policies are at different points of their steps.
    lead_trainer, its_trainer, controller = ("trainer", created.id), ("trainer", checker_id), ("controller", "")
    for step, victims in ((1, [its_trainer]), (3, [lead_trainer, controller]), (5, [its_trainer, lead_trainer])):
        wait_for_step(client, created.id, step)
        for victim, run_id in victims:
            assert kill(platform, victim, run_id)
    run = watch_run(client, created.id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)
    before, after = (e.results.reward for e in sorted(client.evaluations(run.id), key=lambda e: e.number))
    assert before is not None
    assert after is not None
    assert before.mean < 0.5
    assert after.mean > 0.9
    ended = client.run(run.id)
    checker = ended.policies["checker"]
    assert (checker.step, checker.steps, checker.policy_version) == (last, last, last)
    assert ended.best_version == checker.best_version
    assert ended.best_version == last
    for policy, key in ((None, run.id), ("checker", checker_id)):
        assert [version.version for version in client.policies(run.id, policy=policy)] == list(range(last + 1))
        assert violations(platform.facts.database_url, key) == {}
    assert checker_id not in {one.id for one in client.runs()}
    go_on(platform, client, injector, run.id, last - 1)


def go_on(platform: Platform, client: Client, injector: FaultInjector, parent: str, version: int) -> None:
    """Continues the version of both policies for two steps; the API dies before and after the commit, and a trainer
    dies while it copies its version."""
    points = ("api.created", "api.committed", "trainer.version_copied")
    for point in points:
        injector.arm(point)
    changes = {"training": {"steps": 2}, "evaluation": None}
    made = client.continue_run(parent, ResumeRequest(changes=changes, from_version=version))
    run = watch_run(client, made.id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)
    assert all(injector.fired(point, 0.0) for point in points)
    assert [one.id for one in client.runs() if one.parent is not None] == [run.id]
    checker = client.run(run.id).policies["checker"]
    assert (run.progress.step, checker.step) == (2, 2)
    assert run.parent == checker.parent == RunParent(run_id=parent, version=version)
    for policy, key in ((None, run.id), ("checker", checker.id)):
        hashes = {one.version: one.content_sha256 for one in client.policies(parent, policy=policy)}
        versions = list(client.policies(run.id, policy=policy))
        assert [one.version for one in versions] == [0, 1, 2]
        assert versions[0].content_sha256 == hashes[version]
        steps = client.steps(run.id, policy=policy)
        assert [step.metrics.get("optimizer_inherited") for step in steps] == [1.0, None]
        assert violations(platform.facts.database_url, key) == {}


@long_only
@pytest.mark.timeout(900)
def test_a_policy_alone_learns_only_as_much_as_its_frozen_partner_allows(
    platform: Platform, client: Client, tmp_path: Path
) -> None:
    document = {**pair_run(12, frozen=True), "train": ["writer"]}
    run = watch_run(client, client.create_run(document).id, Console(quiet=True))
    assert (run.phase, run.reason) == ("completed", None)
    before, after = (
        {fact.name: fact.statistic.mean for fact in one.results.facts if fact.statistic is not None}
        for one in sorted(client.evaluations(run.id), key=lambda one: one.number)
    )
    assert after["writer"] > before["writer"]
    assert after["checker"] < 0.7
    checker = client.run(run.id).policies["checker"]
    assert (checker.trains, checker.step, checker.steps) == (False, 0, 0)
    (version,) = client.policies(run.id, policy="checker")
    # Its weights are the bytes of before.
    assert (version.version, version.content_sha256) == (0, weights_sha256(make_checker(tmp_path)))
    assert weights_sha256(Path(version.path)) == version.content_sha256
    assert list(client.samples(run.id, policy="checker")) == []
    tokenizer = AutoTokenizer.from_pretrained(version.path)
    trained = [tokenizer.decode(sample.token_ids) for sample in client.samples(run.id, tokens=True)]
    assert trained
    assert {("the writer" in text, "the checker" in text) for text in trained} == {(True, False)}
    for key in (run.id, checker.id):
        assert violations(platform.facts.database_url, key) == {}
