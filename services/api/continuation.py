"""The document of a run that continues another one."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from leyden.libs.contracts.api.runs import ResumeRequest, Run
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.overlay import overlay
from leyden.libs.store.engines import Pool
from leyden.services.api.models import refusal


def amended(
    run: Run,
    version: int,
    request: ResumeRequest,
    pools: Mapping[str, Pool],
    turns_taken: int,
    bases: Mapping[str, str],
) -> RunConfig:
    """Returns the ended run's document with the changes laid over it.

    Args:   turns_taken: of the order of tasks, by the steps that made the version; bases: the models with which the
        run's policies began, by id
    Raises: Problem: a field cannot change, or no steps are left; RequestValidationError: the document is refused
    """
    before = run.config
    if before is None:
        raise refusal("changes", f"{run.reason}: create a run with a whole document")
    document = overlay(before.model_dump(mode="json"), request.changes, before)
    if request.changes.get("recipe") is not None:
        raise refusal("changes.recipe", "a recipe only begins a document: write its settings (`leyden recipes`)")
    training = request.changes.get("training")
    if not isinstance(training, Mapping) or "steps" not in training:
        left = before.training.steps - version
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
    sampling = request.changes.get("sampling")
    if not isinstance(sampling, Mapping) or "skip_groups" not in sampling:
        is_same = (before.dataset, before.sampling.seed) == (config.dataset, config.sampling.seed)
        skipped = before.sampling.skip_groups + turns_taken if is_same else 0
        further = config.sampling.model_copy(update={"skip_groups": skipped})
        config = config.model_copy(update={"sampling": further})
    _check_parameters(before, config, pools, bases.get(run.id), "changes.", "changes.training.lora")
    for name in _in_both(run, config):
        path, base = f"changes.policies.{name}.", bases.get(run.policies[name].id)
        _check_parameters(before.policy_document(name), config.policy_document(name), pools, base, path, f"{path}lora")
    return config


def continued_policies(run: Run, config: RunConfig, request: ResumeRequest) -> dict[str, int | None]:
    """Returns the further policies that go on in the run of `config`, with the versions asked for.

    Raises: Problem: a version is asked for a policy that does not go on
    """
    names = _in_both(run, config)
    for name in request.policy_versions:
        if name not in names:
            shared = ", ".join(sorted(names)) or "none"
            raise refusal(f"policy_versions.{name}", f"no such policy continues: write one of {shared}")
    return {name: request.policy_versions.get(name) for name in names}


def _in_both(run: Run, config: RunConfig) -> list[str]:
    return [name for name in config.served_policies if name in run.policies]


def _check_parameters(
    old: RunConfig, new: RunConfig, pools: Mapping[str, Pool], base: str | None, path: str, lora: str
) -> None:
    """Passes a document that trains or serves the same parameters.

    Args:   base: the model with which the old one began, once that is recorded; path: where the changes have these
        settings; lora: where they have LoRA's
    Raises: Problem: they differ
    """
    before, after = pools.get(old.pool), pools.get(new.pool)
    kept = (before.model_path if before else None, *filter(None, [base]))
    if before is not None and (after and after.model_path) not in kept:
        raise refusal(f"{path}pool", "a continued run keeps its model: write a pool that serves it")
    for place, was, now in (
        # To name the model that the run has anyway changes nothing.
        (f"{path}model", old.model, old.model if base is not None and new.model == base else new.model),
        (f"{path}algorithm.critic.model", _critics_model(old), _critics_model(new)),
        (lora, old.training.lora, new.training.lora),
    ):
        if was != now:
            raise refusal(place, "a continued run trains the same parameters: leave it as it was, or create a run")
    # Engines of such a pool serve the base model to a run without adapters.
    if old.pool != new.pool and after is not None and after.adapters is not None and new.training.lora is None:
        raise refusal(f"{path}pool", "this pool serves adapters, and the run has weights of its own: write another one")


def _critics_model(config: RunConfig) -> str | None:
    return None if config.algorithm.critic is None else config.algorithm.critic.model
