"""The trainer's log-probabilities against the engine's, before and after a step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import SecretStr

from leyden.libs.contracts.config import RunConfig
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.canaries import add_canary
from leyden.services.controller.engines import client
from leyden.services.controller.engines.canaries import Canaries
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings
from leyden.services.trainer.rows.batch import Sample, trained_tokens
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.canaries import canary_tokens, compute_canary
from leyden.services.trainer.state.versions import export_version
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.step import optimizer_step
from tests.fakes.engine_client import KEY, EngineClient
from tests.support import builders

PROMPTS = ([72, 69, 76, 76, 79], [72, 69, 76, 80])
TEMPERATURES = (0.5, 0.8, 1.0, 1.7)
TOLERANCE = 1e-4


def as_sample(number: int, prompt: list[int], temperature: float, answer: dict[str, Any], version: int) -> Sample:
    sampled = answer["output_ids"]
    mask = np.array([False] * len(prompt) + [True] * len(sampled))
    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    return Sample(
        id=f"run.0.{number}:0",
        rollout_id=f"run.0.{number}",
        group_id="run.0",
        token_ids=np.array([*prompt, *sampled], np.int32),
        mask=mask,
        generator_logprobs=np.array([0.0] * len(prompt) + logprobs, np.float32),
        advantages=np.where(mask, (-1.0) ** number, 0).astype(np.float32),
        temperatures=np.where(mask, temperature, 1).astype(np.float32),
        policy_versions=np.where(mask, version, -1).astype(np.int32),
    )


async def sampled(engine: EngineClient, version: int) -> list[Sample]:
    samples = []
    for prompt in PROMPTS:
        for temperature in TEMPERATURES:
            answer = await engine.generate(
                input_ids=prompt,
                return_logprob=True,
                sampling_params={"temperature": temperature, "max_new_tokens": 24, "ignore_eos": True},
            )
            samples.append(as_sample(len(samples), prompt, temperature, answer, version))
    return samples


def largest_gap(learner: Learner, samples: list[Sample]) -> float:
    tokens = trained_tokens(samples)
    plan = plan_batch(samples, tokens, 64)
    logprobs_K = batch_logprobs(learner.policy, plan, len(tokens), learner.accelerator)
    return float(np.abs(logprobs_K - tokens.generator_logprobs_K).max())


async def test_the_engine_answers_the_canary_of_the_version_that_it_serves(
    engine: EngineClient, tiny_model: Path, new_weights: Path, database: Database
) -> None:
    run = await builders.add_run(database, config=builders.run_document())
    config = RunConfig.stored(run.config)
    for number, folder in enumerate((tiny_model, new_weights)):
        learner = assemble_learner(folder, config, make_accelerator("cpu", "float32"))
        canary = compute_canary(learner, canary_tokens(folder, learner.model.config.vocab_size), config)
        assert canary is not None
        async with database.session() as session:
            await add_canary(session, run.id, number, canary)
    canaries, settings = Canaries(database), Settings(engine_api_key=SecretStr(KEY))
    asked = client.EngineClient(str(engine.http.base_url).rstrip("/"), engine.http, settings)
    served, other = [await canaries.ask(asked, TargetVersion(run.id, number, "", "")) for number in range(2)]
    assert served == (True, None)
    assert other.is_final and "other weights" in (other.problem or "")
    async with database.read() as session:
        row = await session.get_one(tables.CanaryAnswer, (asked.url, run.id))
    assert (row.verdict, row.gap_limit) == ("other", pytest.approx(0.01))


async def test_trainer_and_engine_agree_on_every_token_before_and_after_a_step(
    engine: EngineClient, tiny_model: Path, tmp_path: Path
) -> None:
    config = RunConfig.model_validate(
        {"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "optimizer": {"learning_rate": 1e-3}}
    )
    learner = assemble_learner(tiny_model, config, make_accelerator("cpu", "float32"))
    before = await sampled(engine, 0)
    assert largest_gap(learner, before) < TOLERANCE
    metrics = optimizer_step(learner, before, config)
    assert metrics["logprob_gap_max"] < TOLERANCE

    export = export_version(learner, tiny_model, tmp_path / "1")
    answer = await engine.control(
        "/update_weights_from_disk", model_path=str(export.path), weight_version="run:1", flush_cache=True
    )
    assert answer.status_code == 200
    assert largest_gap(learner, before) > 10 * TOLERANCE
    assert largest_gap(learner, await sampled(engine, 1)) < TOLERANCE
