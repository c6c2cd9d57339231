"""Refuses a run whose pool or base model its trainer would fail on, or whose tasks lack a field of its command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from leyden.libs.contracts.api import FieldProblem
from leyden.libs.contracts.config import RunConfig
from leyden.libs.service import Problem
from leyden.libs.store.database import ReadSession
from leyden.libs.store.datasets import find_dataset, task_without
from leyden.libs.store.engines import Pool

CHECKED_TASKS = 1000
"""The tasks of a dataset that are checked when a run is created; a later one without a field fails its rollouts."""


def check_pool(config: RunConfig, pools: Mapping[str, Pool]) -> None:
    """Passes a run of a pool that exists, whose model is the pool's.

    Raises: Problem: there is no such pool, or it serves another model
    """
    pool = pools.get(config.pool)
    if pool is None:
        raise refusal("pool", f"there is no pool {config.pool!r}: write one of {', '.join(pools) or 'none'}")
    if config.model is None or pool.model_path is None or Path(config.model) == Path(pool.model_path):
        return
    fitting = [name for name, one in pools.items() if one.model_path and Path(one.model_path) == Path(config.model)]
    remedy = f"write pool {fitting[0]!r}" if fitting else "leave `model` out"
    raise refusal("model", f"the engines of pool {pool.name!r} serve {pool.model_path}: {remedy}")


async def check_task_fields(session: ReadSession, config: RunConfig) -> None:
    """Passes a run whose first tasks, of training and of evaluation, have the fields that its agent's command names.

    Raises: Problem: a task lacks one; UnknownDataset
    """
    fields = config.agent.task_fields()
    names = {config.dataset, *([config.evaluation.dataset] if config.evaluation else [])} if fields else set()
    for dataset in [await find_dataset(session, name) for name in sorted(names)]:
        for field in fields:
            # Postgres would count from the end, which the runner does not.
            if any(part.startswith("-") and part[1:].isdigit() for part in field):
                raise refusal("agent", f"{{task.{'.'.join(field)}}}: items of a list count from 0")
            number = await task_without(session, dataset.id, field, first=CHECKED_TASKS)
            if number is not None:
                placeholder = f"{{task.{'.'.join(field)}}}"
                raise refusal("agent", f"task {number} of dataset {dataset.name!r} has no field for {placeholder}")


def check_model(model: str | None) -> None:
    """Passes a model folder, and one below a folder that this machine does not see: a trainer may see it.

    Raises: Problem: `model` is no absolute path, or no folder in Hugging Face format where it must be visible
    """
    if model is None:
        return
    folder = Path(model)
    if not folder.is_absolute():
        raise refusal(
            "model",
            f"{model!r} is no absolute path: write the folder of a model in Hugging Face format; download a model of"
            f" the Hub with `huggingface-cli download {model} --local-dir FOLDER`",
        )
    if _exists(folder.parent) and not _exists(folder / "config.json"):
        raise refusal("model", f"{model!r} holds no config.json: write the folder of a model in Hugging Face format")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # A name too long, a folder that this process may not enter: only a trainer can tell.
        return False


def refusal(path: str, message: str) -> Problem:
    """422 with the path of a field and the remedy."""
    field = FieldProblem(path=path, message=message)
    return Problem(422, f"{path}: {message}", cause="invalid", extensions={"errors": [field.model_dump()]})
