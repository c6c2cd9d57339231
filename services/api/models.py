"""Refuses a run whose pool or base model its trainer would fail on, whose agent's folder is missing, or whose tasks
lack a field of its command."""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs

from leyden.libs.contracts.api.problems import FieldProblem
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.config import BrokenDocument, Distillation, GroupAgent, Reward, RunConfig, Sft
from leyden.libs.contracts.config.graders import (
    CODE,
    Command,
    Container,
    JsonSchema,
    PythonFunction,
    RelativeModel,
    ScoreModel,
)
from leyden.libs.contracts.conversation import CONVERSATION, conversation_fault
from leyden.libs.contracts.judgements import Judgement, Machine, judge, judge_model, judge_rewards, model_config
from leyden.libs.contracts.model_folder import serving_mismatch, token_mismatch
from leyden.libs.contracts.states import EngineState
from leyden.libs.service import Problem
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.datasets import find_dataset, first_fault, has_field, task_without
from leyden.libs.store.demonstrations import has_demonstrations
from leyden.libs.store.engines import Pool, embedding_engines, read_pools
from leyden.libs.store.policies import base_models
from leyden.libs.store.runs.facts import run_configs
from leyden.libs.store.runs.teachers import lock_teacher, read_teacher
from leyden.services.api.settings import Settings

CHECKED_TASKS = 1000
"""The tasks of a dataset that are checked when a run is created; a later one without a field fails its rollouts."""
CHECKED_BYTES = 16 * 2**20
"""Rows of conversations, as JSON, after which the API checks no more."""


def check_pool(config: RunConfig, pools: Mapping[str, Pool], path: str = "") -> None:
    """Passes a run of a pool that exists, whose model its engines can serve: the pool's, or one with its own weights or
    chat template.

    Args:   path: where the document has these settings, with a dot at its end
    Raises: Problem: there is no such pool, it cannot serve the model, or it serves adapters that the run does not train
    """
    pool = pools.get(config.pool)
    if pool is None:
        raise refusal(f"{path}pool", f"there is no pool {config.pool!r}: write one of {', '.join(pools) or 'none'}")
    if pool.embeddings:
        raise refusal(
            f"{path}pool",
            f"the engines of pool {pool.name!r} make embeddings and sample no text: name it under `embeddings`, and"
            " another pool here",
        )
    _check_adapters(config, pool, path)
    if config.model is None or pool.model_path is None or Path(config.model) == Path(pool.model_path):
        return
    try:
        mismatch = serving_mismatch(Path(pool.model_path), Path(config.model))
    except (OSError, ValueError):
        # A folder that this machine does not see: the names decide.
        mismatch = ""
    if mismatch is None and pool.adapters is None:
        return
    fitting = [name for name, one in pools.items() if one.model_path and Path(one.model_path) == Path(config.model)]
    remedy = f"write pool {fitting[0]!r}" if fitting else "leave `model` out"
    cause = f", and {mismatch}" if mismatch else ""
    raise refusal(f"{path}model", f"the engines of pool {pool.name!r} serve {pool.model_path}{cause}: {remedy}")


async def check_base_models(session: ReadSession, run: Run) -> None:
    """Passes a run whose policies began with the model that engines with adapters have. Others load whole versions.

    Raises: Problem: they would add an adapter to another model
    """
    if run.config is None:
        return
    pools = await read_pools(session)
    documents = {run.id: run.config}
    documents |= {one.id: run.config.policy_document(name) for name, one in run.policies.items()}
    for policy, base in (await base_models(session, documents)).items():
        pool = pools.get(documents[policy].pool)
        if pool is None or pool.adapters is None or pool.model_path is None or Path(pool.model_path) == Path(base):
            continue
        detail = (
            f"run {run.id} began with {base}, and the engines of pool {pool.name!r} add its adapters to"
            f" {pool.model_path}: start the platform with that model again (CONTROLLER_POOLS)"
        )
        raise Problem(409, detail, cause="state")


def check_policies(config: RunConfig, pools: Mapping[str, Pool]) -> None:
    """Passes a run whose further policies have pools with engines of their own.

    Raises: Problem: a pool is missing or serves another model, or too many policies share one
    """
    for name in config.served_policies:
        check_pool(config.policy_document(name), pools, f"policies.{name}.")
    used = Counter([config.pool, *filter(None, (policy.pool for policy in config.policies.values()))])
    for pool, count in used.items():
        at_once = pools[pool].adapters or 1
        if count > at_once:
            raise refusal(
                "policies",
                f"{count} policies name pool {pool!r}, whose engines serve {at_once} at a time: give each its own"
                " pool, or one with `adapters`",
            )


async def check_embeddings(session: ReadSession, config: RunConfig, pools: Mapping[str, Pool]) -> list[Judgement]:
    """Passes a run that names no pool for embeddings, or one that embeds.

    Returns: a warning while no engine of that pool embeds
    Raises:  Problem: there is no such pool, or its engines do not embed
    """
    if config.embeddings is None or config.embeddings.pool is None:
        return []
    name, place = config.embeddings.pool, "embeddings.pool"
    engines = await embedding_engines(session, name)
    if engines is None:
        known = ", ".join(one.name for one in pools.values() if one.embeddings) or "none"
        cause = "the engines of pool {0!r} sample text" if name in pools else "there is no pool {0!r}"
        raise refusal(
            place,
            f"{cause.format(name)}: write one of {known}, or add a pool with `embeddings` to CONTROLLER_POOLS",
        )
    if any(one.state is EngineState.SERVING for one in engines):
        return []
    seen = "; ".join(f"{one.url}: {one.detail}" for one in engines) or "none has been seen"
    reason = f"no engine of pool {name!r} embeds now ({seen}), and agents' requests fail until one does"
    return [Judgement(place, "warns", reason, "start SGLang with --is-embedding at an address of the pool")]


def check_frozen_policies(config: RunConfig, continued: Collection[str] = ()) -> None:
    """Passes a run whose frozen policies have no adapters, except those that it continues with.

    Args:   continued: the policies that a continued run had before
    Raises: Problem
    """
    for name, policy in config.policies.items():
        if policy.frozen and policy.lora is not None and name not in continued:
            raise refusal(f"policies.{name}.lora", "a frozen policy that is new has no adapters: remove lora")


def _check_adapters(config: RunConfig, pool: Pool, path: str) -> None:
    lora, place = config.training.lora, f"{path}lora" if path else "training.lora"
    if pool.adapters is None:
        return
    if lora is None and config.training.steps > 0:
        raise refusal(
            place,
            f"the engines of pool {pool.name!r} serve LoRA adapters of several runs: set {place}, or choose"
            " another pool",
        )
    if lora is not None and pool.max_adapter_rank is not None and lora.rank > pool.max_adapter_rank:
        raise refusal(
            f"{place}.rank",
            f"the engines of pool {pool.name!r} were started for ranks up to {pool.max_adapter_rank}: lower the rank",
        )


async def check_task_fields(session: ReadSession, config: RunConfig) -> None:
    """Passes a run whose first tasks, of training and of evaluation, have the fields that its agent's command names.

    Raises: Problem: a task lacks one; UnknownDataset
    """
    for one in config.group_agents:
        await _check_task_fields_of(session, config, one)


async def _check_task_fields_of(session: ReadSession, config: RunConfig, one: GroupAgent) -> None:
    fields = one.agent.task_fields()
    names = {config.dataset, *([config.evaluation.dataset] if config.evaluation else [])} if fields else set()
    for dataset in [await find_dataset(session, name) for name in sorted(names)]:
        for field in fields:
            _require_counted(field, one.path)
            number = await task_without(session, dataset.id, field, first=CHECKED_TASKS)
            if number is not None:
                placeholder = f"{{task.{'.'.join(field)}}}"
                raise refusal(one.path, f"task {number} of dataset {dataset.name!r} has no field for {placeholder}")


async def check_conversations(session: ReadSession, config: RunConfig) -> None:
    """Passes a run without the provider `conversation`, and one whose first tasks are conversations:
    `CHECKED_TASKS` of them, or fewer that have `CHECKED_BYTES`.

    Raises: Problem: a task is none, with its number and the remedy; UnknownDataset
    """
    if not any(policy.provider == CONVERSATION for policy in config.policies.values()):
        return
    places = {"evaluation.dataset": config.evaluation.dataset} if config.evaluation else {}
    if config.training.steps > 0 or not places:
        places["dataset"] = config.dataset
    for place, name in places.items():
        dataset = await find_dataset(session, name)
        found = await first_fault(
            session, dataset.id, conversation_fault, first=CHECKED_TASKS, size_bytes=CHECKED_BYTES
        )
        if found is not None:
            number, fault = found
            raise refusal(
                place,
                f"task {number} of dataset {dataset.name!r} (row {number + 1} of the upload) is no conversation in"
                f" OpenAI's format: {fault}; upload the corrected rows under another name",
            )


def _check_schema(place: str, schema: dict[str, Any]) -> None:
    try:
        jsonschema_rs.meta.validate(schema)
    except ValueError as error:
        cause = str(error).partition("\n")[0]
        raise refusal(place, f"it is no JSON Schema, and every rollout would be excluded: {cause}") from error


def check_sources(reward: Reward | None, settings: Settings) -> None:
    """Passes a reward whose graders mean something, and which the platform can run.

    Raises: Problem
    """
    for found in judge_rewards(reward):
        raise refusal(found.path, found.message)
    for number, one in enumerate(reward.components if reward else ()):
        path = f"reward.components.{number}.grader"
        if isinstance(one.grader, CODE) and not settings.code_graders:
            raise refusal(
                f"{path}.type",
                f"this platform's graders run no code of your own, and {one.grader.type!r} is that: let the agent's"
                " image grade and take its reward line by from: agent, send values by from: feedback, or train on one"
                " machine with `leyden up`",
            )
        if isinstance(one.grader, CODE):
            _check_code(path, one.grader, settings)
        if isinstance(one.grader, Container):
            _check_container(path, one.grader, settings)
        if isinstance(one.grader, ScoreModel | RelativeModel):
            _check_provider(f"{path}.provider", one.grader.provider, settings.judges, "GRADER_PROVIDERS")


def check_providers(config: RunConfig, settings: Settings) -> None:
    """Passes a run whose policies and embeddings name servers that the gateway has, where the API knows its.

    Raises: Problem
    """
    for name, policy in config.policies.items():
        if policy.provider not in {None, CONVERSATION}:
            _check_provider(f"policies.{name}.provider", policy.provider, settings.providers, "GATEWAY_PROVIDERS")
    if config.embeddings is not None and config.embeddings.provider is not None:
        _check_provider("embeddings.provider", config.embeddings.provider, settings.providers, "GATEWAY_PROVIDERS")


def _check_provider(path: str, name: str | None, known: Collection[str] | None, setting: str) -> None:
    if known is None or name in known:
        return
    names = ", ".join(sorted(known)) or "none"
    raise refusal(
        path, f"{setting} names {names}, and no {name!r}: write another name, or start the platform with this one"
    )


def _check_code(path: str, grader: PythonFunction | Command, settings: Settings) -> None:
    if grader.directory is None:
        return
    folder, roots = Path(os.path.realpath(grader.directory)), settings.grader_roots
    if roots is not None and not any(folder.is_relative_to(os.path.realpath(root)) for root in roots):
        raise refusal(
            f"{path}.directory",
            f"{folder} lies in no folder of GRADER_CODE_ROOTS ({', '.join(map(str, roots)) or 'none'}): move it there,"
            " or start the platform with `leyden up --graders DIR`",
        )
    if not settings.one_machine:
        return
    if _is_missing(folder):
        raise refusal(f"{path}.directory", f"there is no folder {folder}: write the one that holds the grader's files")
    file = grader.function.partition(":")[0] if isinstance(grader, PythonFunction) else ""
    if file.endswith(".py") and _is_missing(folder / file):
        raise refusal(f"{path}.function", f"there is no file {folder / file}: write its path below {grader.directory}")


def check_patience(reward: Reward, seconds: float) -> None:
    """Passes a reward whose programs and containers each end while somebody waits for the grades.

    Raises: Problem
    """
    for number, one in enumerate(reward.components):
        if isinstance(one.grader, (*CODE, Container)) and one.grader.timeout_seconds > seconds:
            raise refusal(
                f"reward.components.{number}.grader.timeout_seconds",
                f"a rollout is graded again within {seconds:g} s, and {one.grader.timeout_seconds:g} s is longer: write"
                f" at most {seconds:g} here; the run's own document may have more",
            )


def _check_container(path: str, grader: Container, settings: Settings) -> None:
    if not settings.container_graders:
        raise refusal(
            f"{path}.type",
            "this platform's graders start no containers: write type: command with the tests' folder as directory on"
            " one machine, or set grader.containers.enabled in the chart of a cluster",
        )
    if grader.network and not settings.container_internet:
        raise refusal(
            f"{path}.network",
            "this platform's operator has closed the internet to graders: write network: false and put what the tests"
            " need into the image, or ask the operator for grader.containers.allowInternet in the chart",
        )
    if refused := settings.agent_rules.refusals_of_grader(path, grader):
        raise refusal(path, "; ".join(refused))


async def check_graders(session: ReadSession, config: RunConfig) -> None:
    """Passes a run whose graders read fields that some of its first tasks have, of training and of evaluation: a task
    may lack a reference.

    Raises: Problem: no task has a field, or a schema is none; UnknownDataset
    """
    if config.reward is None:
        return
    for number, one in enumerate(config.reward.components):
        if isinstance(one.grader, JsonSchema):
            _check_schema(f"reward.components.{number}.grader.json_schema", one.grader.json_schema)
    names = [config.dataset, *([config.evaluation.dataset] if config.evaluation else [])]
    for dataset in [await find_dataset(session, name) for name in dict.fromkeys(names)]:
        for place, field in config.reward.task_fields():
            if not await has_field(session, dataset.id, field, first=CHECKED_TASKS):
                raise refusal(
                    place,
                    f"none of the first {CHECKED_TASKS} tasks of dataset {dataset.name!r} has a value for"
                    f" {{task.{'.'.join(field)}}}, so that the component would never count: name a field of the tasks",
                )


async def check_demonstrations(session: ReadSession, config: RunConfig) -> None:
    """Passes a run of supervised fine-tuning that has demonstrations, with the tokens of its own model.

    Raises: Problem: a run is unknown or of another pool, or no rollout is a demonstration; UnknownDataset
    """
    algorithm = config.algorithm
    if not isinstance(algorithm, Sft) or config.training.steps == 0:
        return
    sources = await run_configs(session, algorithm.runs)
    for number, run_id in enumerate(algorithm.runs):
        place = f"algorithm.runs.{number}"
        if run_id not in sources:
            raise refusal(place, f"no run has the id {run_id!r}: list runs to find it")
        source = sources[run_id]
        if isinstance(source, BrokenDocument):
            raise refusal(place, f"{source}, so that its rollouts cannot be read: name other runs")
        if (pool := source.pool) != config.pool:
            raise refusal(
                place, f"its rollouts have the tokens of pool {pool!r}, and this run's pool is {config.pool!r}"
            )
    dataset = await find_dataset(session, config.dataset)
    if not await has_demonstrations(session, algorithm, dataset.id):
        raise refusal(
            "algorithm.runs",
            f"no finished rollout of these runs on a task of dataset {dataset.name!r} earned"
            f" {algorithm.min_reward:g}, or their calls are pruned: name other runs, or lower algorithm.min_reward",
        )


async def check_teacher(
    session: Session, config: RunConfig, pools: Mapping[str, Pool], path: str = "", *, one_machine: bool = False
) -> list[Judgement]:
    """Passes a run without a teacher, and one whose teacher exists and has the policy's tokens. A version that teaches
    is not removed once the session has committed the run.

    Args:    path: where the document has these settings, with a dot at its end; one_machine: see `check_model`
    Returns: the warnings of `check_model`, and of tasks that cannot fill the teacher's hint
    Raises:  Problem: the run or the version of the teacher is unknown or removed, its tokens are others, or no task
        fills its hint; UnknownDataset
    """
    named, place = config.algorithm.distillation, f"{path}algorithm.distillation"
    if named is None or config.training.steps == 0:
        return []
    warnings = await _check_hint(session, config.dataset, named, f"{place}.hint")
    if named.is_own:
        return warnings
    if named.model is not None:
        warnings += await asyncio.to_thread(check_model, named.model, f"{place}.model", one_machine=one_machine)
        teacher, field = named.model, f"{place}.model"
    else:
        assert named.run is not None
        assert named.version is not None
        teacher, field = await _version_of_teacher(session, named.run, named.version, place), f"{place}.run"
    own = config.model or pools[config.pool].model_path
    mismatch = await asyncio.to_thread(_token_mismatch, own, teacher)
    if mismatch is not None:
        raise refusal(
            field,
            f"the teacher {teacher} judges the policy's tokens, but {mismatch}: name a teacher with the tokenizer of"
            f" {own}, or let this model learn from its answers as a provider (docs/how-to/warm-start.md)",
        )
    return warnings


async def _check_hint(session: ReadSession, dataset: str, named: Distillation, place: str) -> list[Judgement]:
    """Passes a hint whose fields some of the first tasks have, with a warning where one lacks a field."""
    warnings, found = list[Judgement](), await find_dataset(session, dataset)
    for field in named.task_fields():
        _require_counted(field, place)
        placeholder = f"{{task.{'.'.join(field)}}}"
        if not await has_field(session, found.id, field, first=CHECKED_TASKS):
            raise refusal(
                place,
                f"none of the first {CHECKED_TASKS} tasks of dataset {dataset!r} has a value for {placeholder}, so that"
                " no group would train: name a field of the tasks",
            )
        number = await task_without(session, found.id, field, first=CHECKED_TASKS, null_is_missing=True)
        if number is not None:
            reason = f"task {number} of dataset {dataset!r} has no value for {placeholder}, and such tasks do not train"
            warnings.append(Judgement(place, "warns", reason, "give every task the field, or name another one"))
    return warnings


def _require_counted(field: Sequence[str], place: str) -> None:
    """Refuses a negative number: Postgres would count from the end of a list, which placeholders do not."""
    if any(part.startswith("-") and part[1:].isdigit() for part in field):
        raise refusal(place, f"{{task.{'.'.join(field)}}}: items of a list count from 0")


async def _version_of_teacher(session: Session, run_id: str, version: int, place: str) -> str:
    if not await lock_teacher(session, run_id):
        raise refusal(f"{place}.run", f"no run has the id {run_id!r}: list runs to find it")
    found = await read_teacher(session, run_id, version)
    if found is None or not found.is_there:
        state = "has no" if found is None else "has removed the files of its"
        raise refusal(
            f"{place}.version", f"run {run_id} {state} version {version}: list its versions (GET /v1/runs/RUN/policies)"
        )
    return found.path


def _token_mismatch(own: str | None, teacher: str) -> str | None:
    try:
        return token_mismatch(Path(own), Path(teacher)) if own is not None else None
    except (OSError, ValueError):
        # A folder that this machine does not see: the trainer compares them before version 0.
        return None


def check_model(model: str | None, path: str = "model", *, one_machine: bool = False) -> list[Judgement]:
    """Passes a model folder, and one that this machine does not see: trainer and engines may be on others.

    Args:    path: the field of the run's document; one_machine: trainer and engines are on this machine
    Returns: a warning if the folder is missing beside others that this machine has, and the trainer may have it
    Raises:  Problem: `model` is no absolute path, or no folder in Hugging Face format where it must be visible
    """
    if model is None:
        return []
    folder = Path(model)
    if not folder.is_absolute():
        raise refusal(
            path,
            f"{model!r} is no absolute path: write the folder of a model in Hugging Face format; download a model of"
            f" the Hub with `huggingface-cli download {model} --local-dir FOLDER`",
        )
    if not _exists(folder.parent) or not _is_missing(folder / "config.json"):
        return []
    remedy = "write the folder of a model in Hugging Face format"
    # No file system has longer names than 255 bytes.
    if one_machine or not _is_missing(folder) or max(map(len, folder.parts)) > 255:
        raise refusal(path, f"{model!r} holds no config.json: {remedy}")
    return _missing_elsewhere(folder, path, "trainer", remedy)


def check_directory(config: RunConfig, settings: Settings) -> list[Judgement]:
    """Passes a run whose agents have their folders, or whose runner may be on another machine.

    Returns: a warning for each folder that is missing beside others that this machine has, and the runner may have it
    Raises:  Problem: a folder is missing, and the runner is on this machine
    """
    return [warning for one in config.group_agents for warning in _check_folder(one, settings)]


def _check_folder(one: GroupAgent, settings: Settings) -> list[Judgement]:
    if one.agent.directory is None:
        return []
    folder, field = Path(one.agent.directory), f"{one.path}.directory"
    if not _is_missing(folder):
        return []
    remedy = "write the folder that holds the agent's files"
    if settings.one_machine:
        raise refusal(field, f"there is no folder {folder}: {remedy}")
    return _missing_elsewhere(folder, field, "runner", remedy)


def _missing_elsewhere(folder: Path, field: str, other: str, remedy: str) -> list[Judgement]:
    """The warning of a folder that is missing here, unless nothing tells that this machine should have it."""
    # Every machine has the root.
    if folder.parent == folder.parent.parent or not _exists(folder.parent):
        return []
    return [Judgement(field, "warns", f"the API's machine has no folder {folder}; the {other}'s may have it", remedy)]


async def check_trainable(
    session: ReadSession, config: RunConfig, pools: Mapping[str, Pool], machine: Machine
) -> list[Judgement]:
    """Passes a run whose model this machine does not see, and one that can train and fits the trainer's machine.

    The trainer checks its model more thoroughly when it loads it.

    Returns: the warnings about its memory
    Raises:  Problem: the model is none that trainers train, or the certain part of its memory exceeds the machine's
    """
    folder = config.model or pools[config.pool].model_path
    # The trainer, which may run elsewhere, reports a missing or damaged file.
    described = await asyncio.to_thread(model_config, Path(folder)) if folder else None
    if described is None:
        return []
    named = config.algorithm.distillation
    version = await read_teacher(session, named.run, named.version or 0) if named and named.run else None
    teacher = Path(version.path) if version is not None else None
    found = await asyncio.to_thread(judge_model, config, described, machine, str(folder), teacher)
    _refuse_first(found)
    return found


def _refuse_first(found: Sequence[Judgement], path: str = "") -> None:
    for one in found:
        if one.severity == "cannot":
            raise refusal(f"{path}{one.path}", one.message)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # A name too long, a folder that this process may not enter: only a trainer can tell.
        return False


def _is_missing(path: Path) -> bool:
    """Whether it is certain that nothing has this path: one that this process may not look at may be there."""
    try:
        path.stat()
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
    return False


def check_judgements(config: RunConfig, path: str = "") -> None:
    """Passes a document that can train.

    Args:   path: where the request has these settings, with a dot at its end
    Raises: Problem: it never can
    """
    _refuse_first(judge(config), path)


def refusal(path: str, message: str) -> Problem:
    """422 with the path of a field and the remedy."""
    field = FieldProblem(path=path, message=message)
    return Problem(422, f"{path}: {message}", cause="invalid", extensions={"errors": [field.model_dump()]})
