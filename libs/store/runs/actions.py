"""Runs and evaluations as the API creates, changes and continues them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from sqlalchemy import func, select, text

from leyden.libs.contracts.api.runs import EvaluationRequest, Run, RunParent
from leyden.libs.contracts.config import EvaluationPlan, RunConfig
from leyden.libs.contracts.ids import evaluation_id, new_id
from leyden.libs.contracts.states import ENDED, RunIntent, RunPhase
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.datasets import find_dataset
from leyden.libs.store.demonstrations import run_training_on
from leyden.libs.store.policies import IS_RUN, policy_columns, set_intent
from leyden.libs.store.read.runs import unknown_run, with_progress
from leyden.libs.store.runs.partitions import create_run_partitions
from leyden.libs.store.runs.teachers import run_taught_by


class ActionRefused(ValueError):
    """The state of the run forbids the action; `allowed` lists the permitted ones."""

    def __init__(self, message: str, allowed: list[str]) -> None:
        super().__init__(f"{message}; allowed now: {', '.join(allowed) or 'nothing'}")
        self.allowed = allowed


class NoHeldOutDataset(ValueError):
    """An evaluation without a dataset, of a run whose document plans none."""


INTENT_OF_ACTION = {"pause": RunIntent.PAUSED, "resume": RunIntent.RUNNING, "cancel": RunIntent.CANCELLED}


UNBEGUN_CHILDREN = """
    SELECT r.id, r.parent_run_id, r.parent_version FROM runs r LEFT JOIN run_status s ON s.run_id = r.id
    WHERE r.parent_run_id IS NOT NULL AND r.intent NOT IN ('cancelled', 'deleted')
    AND coalesce(s.phase, 'pending') NOT IN ('completed', 'failed', 'cancelled')
    AND CASE WHEN r.steps > 0 THEN NOT EXISTS (SELECT FROM steps WHERE run_id = r.id AND number = 2)
        ELSE NOT EXISTS (SELECT FROM policy_versions WHERE run_id = r.id) END
"""
"""Policies of continued runs that need their parent: moments and critic lie in its checkpoint alone until one of their
own is whole. The update of step 2 waits for the checkpoint of step 1. Frozen policies copy the weights alone."""

# Each policy copies that of its parent; the run of the first one names the child.
_UNBEGUN_CHILD = text(f"""
    SELECT policies.run_id FROM ({UNBEGUN_CHILDREN}) AS child JOIN policies ON policies.id = child.id
    WHERE parent_run_id IN (SELECT id FROM policies parents WHERE run_id = :run) LIMIT 1
""")  # noqa: S608  # constants alone


async def create_run(
    session: Session,
    config: RunConfig,
    parent: RunParent | None = None,
    policy_parents: Mapping[str, RunParent] = MappingProxyType({}),
) -> Run:
    """A run with its partitions, the evaluations of its document, and its further policies.

    Args:   parent: the version that is this run's version 0, null for the base model; policy_parents: those of its
        further policies by name, for all but the base models, each with the parent policy's id
    Raises: UnknownDataset: of `dataset` or `evaluation.dataset`
    """
    dataset_id = (await find_dataset(session, config.dataset)).id
    row = await _add_row(session, config, dataset_id, parent)
    if config.evaluation is not None:
        await _add_planned_evaluations(session, row.id, config, config.evaluation)
    for name in config.served_policies:
        columns = policy_columns(row.id, name)
        await _add_row(session, config.policy_document(name), dataset_id, policy_parents.get(name), columns)
    await session.refresh(row)
    return (await with_progress(session, [row]))[0]


async def _add_row(
    session: Session,
    config: RunConfig,
    dataset_id: str,
    parent: RunParent | None = None,
    of_policy: Mapping[str, str] = MappingProxyType({}),
) -> tables.Run:
    """Args: parent: a policy's parent has the id of the policy; of_policy: see `policy_columns`"""
    row = tables.Run(
        id=new_id("run"),
        name=config.name,
        config=config.storable(),
        dataset_id=dataset_id,
        intent="running",
        parent_run_id=parent and parent.run_id,
        parent_version=parent and parent.version,
        **of_policy,
    )
    session.add(row)
    await session.flush()
    await create_run_partitions(session, row.id)
    return row


async def _add_planned_evaluations(session: Session, run_id: str, config: RunConfig, plan: EvaluationPlan) -> None:
    dataset = await find_dataset(session, plan.dataset)
    session.add_all(
        tables.Evaluation(
            id=evaluation_id(run_id, number),
            run_id=run_id,
            number=number,
            dataset_id=dataset.id,
            policy_version=version,
            rollouts_per_task=plan.rollouts_per_task,
            max_tasks=plan.max_tasks,
            agents=len(config.group_agents),
        )
        for number, version in enumerate(plan.planned_versions(config.training.steps), 1)
    )
    await session.flush()


async def resumable_version(session: Session, run_id: str, version: int | None) -> tuple[Run, int]:
    """An ended run and the version with which a new run may continue it: the given one, or the newest.

    Locks the run's row, so that its files are not deleted before the new run names them.
    Raises: UnknownRun; ActionRefused: it has not ended, is being deleted, or lacks the version's weights
    """
    run = (await with_progress(session, [await _locked_run(session, run_id)]))[0]
    if run.phase not in ENDED or run.intent == RunIntent.DELETED:
        state = "being deleted" if run.intent == RunIntent.DELETED else f"{run.phase}: cancel it first"
        raise ActionRefused(f"cannot continue run {run_id} with another document: it is {state}", run.allowed_actions)
    versions = await _servable_versions(session, run_id)
    chosen = max(versions, default=0) if version is None else version
    if chosen not in versions:
        raise _without_weights(run, chosen, versions)
    return run, chosen


async def turns_taken(session: ReadSession, run_id: str, version: int) -> int:
    """The turns of the order of tasks up to the last group of the steps that made a version: those that other groups
    replaced, as without variance, among them. A group that samples a lost one's task again has no turn of its own."""
    used = select(tables.StepGroup.group_id).where(
        tables.StepGroup.run_id == run_id, tables.StepGroup.step <= version, tables.StepGroup.step.is_not(None)
    )
    groups = tables.Group
    of_run = (groups.run_id == run_id, groups.evaluation_id.is_(None))
    last = select(func.max(groups.number)).where(*of_run, groups.id.in_(used)).scalar_subquery()
    turns = select(func.count()).where(*of_run, groups.number <= last, groups.replaces.is_(None))
    return await session.scalar(turns) or 0


async def policy_parents(
    session: Session, run: Run, version: int, chosen: Mapping[str, int | None]
) -> dict[str, RunParent]:
    """The versions with which further policies of an ended run continue beside its version `version`.

    A policy begins with its version of the same number, or with its newest where that has no files, like an evaluation
    of that version. The caller has locked the row of `run`.
    Args:   chosen: the policies to continue, and another version where one was asked for
    Raises: ActionRefused: a policy lacks the weights
    """
    parents = {}
    for policy, asked in chosen.items():
        policy_id = run.policies[policy].id
        versions = await _servable_versions(session, policy_id)
        if not versions:
            message = (
                f"cannot continue policy {policy!r} of run {run.id}: it has no version; remove it, or create a run"
            )
            raise ActionRefused(message, run.allowed_actions)
        usual = version if version in versions else max(versions)
        first = usual if asked is None else asked
        if first not in versions:
            raise _without_weights(run, first, versions, policy)
        parents[policy] = RunParent(run_id=policy_id, version=first)
    return parents


async def change_intent(session: Session, run_id: str, action: str) -> tuple[Run, bool]:
    """Pauses, resumes or cancels a run; tells whether that changed it: a repeat does not.

    Raises: UnknownRun; ActionRefused: not in the run's present state
    """
    row = await _locked_run(session, run_id)
    run = (await with_progress(session, [row]))[0]
    wanted = INTENT_OF_ACTION[action]
    # A failed run can only be cancelled, also a second time.
    over = run.phase == RunPhase.COMPLETED or (run.phase == RunPhase.FAILED and action != "cancel")
    if action not in run.allowed_actions and (over or row.intent != wanted):
        hint = ""
        if action == "resume" and "continue" in run.allowed_actions:
            hint = f": `leyden run resume {run_id} --steps N`, or a request with a body, continues it as a new run"
        raise ActionRefused(f"cannot {action} run {run_id}: it is {run.phase}{hint}", run.allowed_actions)
    is_new = await _set_intent(session, row, wanted)
    return (await with_progress(session, [row]))[0], is_new


async def _set_intent(session: Session, row: tables.Run, intent: RunIntent) -> bool:
    """Sets it for the run and its policies; False where they have it already."""
    if row.intent == intent:
        return False
    await set_intent(session, row.id, intent)
    await session.refresh(row)
    return True


async def mark_deleted(session: Session, run_id: str) -> tuple[Run, bool]:
    """Requests that the controller deletes everything of a run that has ended; tells whether this was the first time.

    Raises: UnknownRun; ActionRefused: it has not ended
    """
    row = await _locked_run(session, run_id)
    run = (await with_progress(session, [row]))[0]
    if run.phase not in ENDED:
        raise ActionRefused(f"cannot delete run {run_id}: it is {run.phase}, cancel it first", run.allowed_actions)
    child = await session.scalar(_UNBEGUN_CHILD, {"run": run_id})
    if child is not None:
        message = (
            f"cannot delete run {run_id}: run {child} needs its checkpoint until its own second step; wait, or cancel"
            " that one"
        )
        raise ActionRefused(message, run.allowed_actions)
    if (other := await run_training_on(session, run_id)) is not None:
        message = f"cannot delete run {run_id}: its rollouts are demonstrations of run {other}, delete that one first"
        raise ActionRefused(message, run.allowed_actions)
    if (other := await run_taught_by(session, run_id)) is not None:
        message = f"cannot delete run {run_id}: its version teaches run {other}; wait, or cancel that one"
        raise ActionRefused(message, run.allowed_actions)
    is_new = await _set_intent(session, row, RunIntent.DELETED)
    return (await with_progress(session, [row]))[0], is_new


async def _locked_run(session: Session, run_id: str) -> tables.Run:
    row = await session.scalar(select(tables.Run).where(tables.Run.id == run_id, IS_RUN).with_for_update())
    if row is None:
        raise await unknown_run(session, run_id)
    return row


async def create_evaluation(session: Session, run_id: str, request: EvaluationRequest) -> str:
    """The id of a new evaluation; the run's document fills fields that the request leaves out.

    Raises: UnknownRun; UnknownDataset; NoHeldOutDataset; ActionRefused: the run was cancelled or failed, or the version
        cannot be served
    """
    row = await _locked_run(session, run_id)
    run = (await with_progress(session, [row]))[0]
    if run.config is None:
        raise ActionRefused(f"cannot evaluate run {run_id}: {run.reason}", run.allowed_actions)
    if "evaluate" not in run.allowed_actions:
        raise ActionRefused(f"cannot evaluate run {run_id}: it is {run.phase}", run.allowed_actions)
    if request.policy_version is not None:
        await _check_servable(session, run, request.policy_version)
    plan = run.config.evaluation
    name = request.dataset or (plan.dataset if plan else None)
    if name is None:
        message = f"the document of run {run_id} plans no evaluation: name the dataset of held-out tasks in `dataset`"
        raise NoHeldOutDataset(message)
    dataset = await find_dataset(session, name)
    last = await session.scalar(select(func.max(tables.Evaluation.number)).where(tables.Evaluation.run_id == run_id))
    number = (last or 0) + 1
    session.add(
        tables.Evaluation(
            id=evaluation_id(run_id, number),
            run_id=run_id,
            number=number,
            dataset_id=dataset.id,
            policy_version=request.policy_version,
            rollouts_per_task=request.rollouts_per_task or (plan.rollouts_per_task if plan else 1),
            max_tasks=request.max_tasks or (plan.max_tasks if plan else None),
            agents=len(run.config.group_agents),
        )
    )
    await session.flush()
    return evaluation_id(run_id, number)


async def _check_servable(session: ReadSession, run: Run, version: int) -> None:
    versions = await _servable_versions(session, run.id)
    # Version 0 is the base model, which every run gets at its start.
    if version not in versions and not (version == 0 and not versions):
        raise _without_weights(run, version, versions)


def _without_weights(run: Run, version: int, versions: Sequence[int], policy: str | None = None) -> ActionRefused:
    shown = ", ".join(map(str, versions)) or "only 0 so far"
    of = f"run {run.id}" if policy is None else f"policy {policy!r} of run {run.id}"
    message = f"{of} has no weights of version {version} (there are {shown})"
    return ActionRefused(message, run.allowed_actions)


async def _servable_versions(session: ReadSession, run_id: str) -> list[int]:
    table = tables.PolicyVersion
    query = select(table.version).where(table.run_id == run_id, table.pruned_at.is_(None)).order_by(table.version)
    return list(await session.scalars(query))
