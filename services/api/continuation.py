"""The document of a run that continues another one."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from leyden.libs.contracts.api import ResumeRequest, Run
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.overlay import overlay
from leyden.libs.store.engines import Pool
from leyden.services.api.models import refusal


def amended(run: Run, version: int, request: ResumeRequest, pools: Mapping[str, Pool]) -> RunConfig:
    """Returns the ended run's document with the changes laid over it.

    Raises: Problem: a field cannot change, or no steps are left; RequestValidationError: the document is refused
    """
    document = overlay(run.config.model_dump(mode="json"), request.changes)
    if request.changes.get("recipe") is not None:
        raise refusal("changes.recipe", "a recipe only begins a document: write its settings (`leyden recipes`)")
    training = request.changes.get("training")
    if not isinstance(training, Mapping) or "steps" not in training:
        left = run.config.training.steps - version
        if left < 1:
            raise refusal(
                "changes.training.steps",
                f"version {version} is of the last step: write the number of further steps (--steps)",
            )
        document["training"] = {**document["training"], "steps": left}
    try:
        config = RunConfig.model_validate(document)
    except ValidationError as error:
        problems = [{**one, "loc": ("body", "changes", *one["loc"])} for one in error.errors(include_url=False)]
        raise RequestValidationError(problems) from error
    models = [pools[name].model_path if name in pools else None for name in (run.config.pool, config.pool)]
    if run.config.pool in pools and models[0] != models[1]:
        raise refusal("changes.pool", "a continued run keeps its model: write a pool that serves it")
    for path, old, new in (
        ("changes.model", run.config.model, config.model),
        ("changes.algorithm.critic.model", _critics_model(run.config), _critics_model(config)),
        ("changes.training.lora", run.config.training.lora, config.training.lora),
    ):
        if old != new:
            raise refusal(path, "a continued run trains the same parameters: leave it as it was, or create a run")
    return config


def _critics_model(config: RunConfig) -> str | None:
    return None if config.algorithm.critic is None else config.algorithm.critic.model
