"""Credited groups, which the trainer reads, and the steps and policy versions that it writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, cast

from sqlalchemy import func, insert, select, text, update
from sqlalchemy.dialects.postgresql import insert as insert_or_skip
from sqlalchemy.orm import aliased

from leyden.libs.contracts.canary import Canary
from leyden.libs.contracts.config import BrokenDocument, Computation, RunConfig, Sampling
from leyden.libs.contracts.states import ConsumptionVerdict, GroupVerdict
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession, Session
from leyden.libs.store.policies import base_models, policies_by_id
from leyden.libs.store.read.best import best_version, undecided_versions
from leyden.libs.store.read.runs import UnknownRun
from leyden.libs.store.rewards import SIBLING, SOLVE_RATE
from leyden.libs.store.runs.actions import UNBEGUN_CHILDREN
from leyden.libs.store.runs.canaries import add_canary
from leyden.libs.store.runs.teachers import teaching_versions

_MEASURED = """
    SELECT e.id FROM evaluations e JOIN datasets d ON d.id = e.dataset_id
    WHERE e.run_id = :run AND e.agents * least(d.task_count, e.max_tasks) = (
        SELECT count(*) FROM groups WHERE evaluation_id = e.id AND state = 'complete')
"""
_PENDING_VERSIONS = text(f"""
    SELECT version FROM evaluations
    -- One of the last version measures the version with which it began.
    CROSS JOIN LATERAL (SELECT coalesce(policy_version, (
        SELECT min(admitted_version) FROM groups WHERE evaluation_id = evaluations.id)) AS version) AS asked
    WHERE run_id = :run AND version IS NOT NULL AND id NOT IN (SELECT id FROM ({_MEASURED}) AS measured)
""")  # noqa: S608  # constants alone

_UNCOPIED_VERSIONS = text(f"""
    SELECT parent_version FROM ({UNBEGUN_CHILDREN}) AS child WHERE parent_run_id = :run
""")  # noqa: S608  # constants alone


# Why `step` bounds the scan: a group's own step is at most max_policy_lag + 1 after its oldest token.
_REPLAYABLE = text(f"""
    SELECT t.group_id
    FROM step_groups t
    JOIN group_credits c ON c.group_id = t.group_id AND c.run_id = t.run_id
    JOIN groups g ON g.id = t.group_id
    CROSS JOIN LATERAL (
        SELECT count(*) AS uses FROM step_replays WHERE group_id = t.group_id AND run_id = t.run_id) used
    WHERE t.run_id = :run AND t.step > :oldest AND t.step < :step AND t.verdict = 'trained'
    AND (c.has_variance OR :every_group) AND c.min_policy_version >= :oldest AND used.uses < :uses
    ORDER BY CASE CAST(:priority AS text)
        WHEN 'freshness' THEN -c.min_policy_version
        WHEN 'advantage' THEN (
            -- The policy's own calls: those of its rows, from the last one of each to the first.
            WITH RECURSIVE own AS (
                SELECT call_id FROM samples WHERE run_id = t.run_id AND group_id = t.group_id
                UNION
                SELECT a.parent_call_id FROM own JOIN credits a ON a.run_id = g.run_id AND a.call_id = own.call_id)
            SELECT -avg(abs(a.advantage)) FROM own JOIN credits a ON a.run_id = g.run_id AND a.call_id = own.call_id)
        WHEN 'solve_rate' THEN (
            SELECT abs({SOLVE_RATE} - 0.5) FROM rollouts
            WHERE group_id = t.group_id AND state = 'finished' AND {SIBLING})
    END, g.number DESC
    LIMIT :count
""")  # noqa: S608  # constants alone

_ADD_REPLAYS = text("""
    INSERT INTO step_replays (group_id, use, run_id, step)
    SELECT named, 1 + (SELECT count(*) FROM step_replays WHERE group_id = named AND run_id = :run), :run, :step
    FROM unnest(CAST(:groups AS text[])) AS named
""")


@dataclass(frozen=True)
class ReadyGroup:
    """A credited group that no step has judged. `min_policy_version` is None for a group without trainable tokens."""

    group_id: str
    min_policy_version: int | None
    has_variance: bool

    @property
    def is_trainable(self) -> bool:
        """Whether any of its tokens can be trained, whatever its rewards."""
        return self.min_policy_version is not None


@dataclass(frozen=True)
class Version:
    """Weights that can be served."""

    version: int
    path: str
    content_sha256: str
    size_bytes: int


@dataclass(frozen=True)
class Parent:
    """The run that another one continues: its version, the checkpoint of the step that made it, its document, and the
    folder of the model with which it began (None: of an earlier release, which did not record it)."""

    run_id: str
    version: Version
    checkpoint: str | None
    config: RunConfig | BrokenDocument
    base: str | None


@dataclass(frozen=True)
class CommittedStep:
    """A step as the transaction recorded it."""

    number: int
    checkpoint: str
    metrics: dict[str, float]


class StartTokens(NamedTuple):
    """Columns of `step_samples`: of a sample's trained tokens, by the weights at the step's start."""

    trainer_logprobs: bytes
    trainer_entropies: bytes


@dataclass(frozen=True)
class StepRecord:
    """Everything that one step's transaction writes. start_tokens: by sample"""

    run_id: str
    number: int
    metrics: dict[str, float]
    checkpoint: str
    started_at: datetime
    trained_groups: Sequence[str]
    zero_variance_groups: Sequence[str]
    sample_ids: Sequence[str]
    version: Version
    untrainable_groups: Sequence[str] = ()
    canary: Canary | None = None
    start_tokens: Mapping[str, StartTokens] = field(default_factory=dict)


async def read_run_config(session: ReadSession, run_id: str) -> RunConfig:
    """The document of a run.

    Raises: UnknownRun; BrokenDocument
    """
    row = await session.get(tables.Run, run_id)
    if row is None:
        raise UnknownRun(f"no run has the id {run_id!r}: list runs to find it")
    return RunConfig.stored(row.config)


async def read_parent(session: ReadSession, run_id: str) -> Parent | None:
    """The run that this one continues; None for a run of the base model, and once the parent is deleted."""
    child, parent, version = tables.Run, aliased(tables.Run), tables.PolicyVersion
    query = (
        select(version, parent.config, tables.Step.checkpoint)
        .join(parent, parent.id == version.run_id)
        .join(child, (child.parent_run_id == version.run_id) & (child.parent_version == version.version))
        .outerjoin(tables.Step, (tables.Step.run_id == version.run_id) & (tables.Step.number == version.version))
        .where(child.id == run_id)
    )
    row = (await session.execute(query)).one_or_none()
    if row is None:
        return None
    found, config, checkpoint = row
    weights = Version(found.version, found.path, found.content_sha256, found.size_bytes)
    base = (await base_models(session, [found.run_id])).get(found.run_id)
    return Parent(found.run_id, weights, checkpoint, RunConfig.read(config), base)


async def last_committed_step(session: ReadSession, run_id: str) -> CommittedStep | None:
    """The newest step, or None before the first."""
    query = select(tables.Step).where(tables.Step.run_id == run_id).order_by(tables.Step.number.desc()).limit(1)
    row = (await session.scalars(query)).one_or_none()
    return None if row is None else CommittedStep(row.number, row.checkpoint, cast(dict[str, float], row.metrics))


async def compared_steps(session: ReadSession, run_id: str, count: int) -> list[dict[str, float]]:
    """The metrics of the newest steps that compared tokens of trainer and engine, newest first."""
    step = tables.Step
    query = select(step.metrics).where(step.run_id == run_id, step.metrics["logprob_gap_tokens"].as_float() > 0)
    return [
        cast(dict[str, float], row) for row in await session.scalars(query.order_by(step.number.desc()).limit(count))
    ]


async def read_version(session: ReadSession, run_id: str, version: int) -> Version | None:
    """One policy version, or None."""
    row = await session.get(tables.PolicyVersion, (run_id, version))
    return None if row is None else Version(row.version, row.path, row.content_sha256, row.size_bytes)


async def retained_versions(session: ReadSession, run_id: str) -> list[Version]:
    """The versions in a run's own folders whose files are not removed; the base model lies elsewhere."""
    table = tables.PolicyVersion
    rows = await session.scalars(select(table).where(table.run_id == run_id, table.pruned_at.is_(None)))
    return [
        Version(row.version, row.path, row.content_sha256, row.size_bytes)
        for row in rows
        if Path(row.path).parts[-3:] == (run_id, "versions", str(row.version))
    ]


async def add_base_version(session: Session, run_id: str, version: Version, base: str) -> None:
    """Records version 0, and the folder of the model with which the run begins. A repeat changes nothing; idempotency
    keys: run and version, and the run."""
    row = {"run_id": run_id, **vars(version)}
    await session.execute(insert_or_skip(tables.PolicyVersion).values(row).on_conflict_do_nothing())
    began = {"run_id": run_id, "path": base}
    await session.execute(insert_or_skip(tables.RunBase).values(began).on_conflict_do_nothing())


async def ready_groups(session: ReadSession, run_id: str) -> list[ReadyGroup]:
    """Credited training groups that no step has judged, in the order they were admitted."""
    credit, judged = tables.GroupCredit, tables.StepGroup
    query = (
        select(credit.group_id, credit.min_policy_version, credit.has_variance)
        .join(tables.Group, tables.Group.id == credit.group_id)
        .outerjoin(judged, (judged.group_id == credit.group_id) & (judged.run_id == credit.run_id))
        .where(credit.run_id == run_id, credit.verdict == GroupVerdict.CREDITED, judged.group_id.is_(None))
        .order_by(tables.Group.number, tables.Group.id)
    )
    return [ReadyGroup(*row) for row in await session.execute(query)]


async def group_uses(session: ReadSession, run_id: str) -> dict[str, int]:
    """The groups that a run has trained, with the number of steps that each was used in."""
    first, again = tables.StepGroup, tables.StepReplay
    query = (
        select(first.group_id, 1 + func.count(again.use))
        .outerjoin(again, (again.group_id == first.group_id) & (again.run_id == first.run_id))
        .where(first.run_id == run_id, first.verdict == ConsumptionVerdict.TRAINED)
        .group_by(first.group_id)
    )
    return {row[0]: row[1] for row in await session.execute(query)}


async def refuse_stale_groups(session: Session, run_id: str, group_ids: Sequence[str]) -> None:
    """Judges groups as too old to train. A repeat changes nothing; idempotency key: the group."""
    rows = [
        {"group_id": group, "run_id": run_id, "step": None, "verdict": ConsumptionVerdict.STALE} for group in group_ids
    ]
    if rows:
        await session.execute(insert_or_skip(tables.StepGroup).values(rows).on_conflict_do_nothing())


async def consumed_groups(session: ReadSession, run_id: str, step: int) -> dict[str, ConsumptionVerdict]:
    """The groups that a step consumed, with its verdicts, in the order they were admitted."""
    table = tables.StepGroup
    query = (
        select(table.group_id, table.verdict)
        .join(tables.Group, tables.Group.id == table.group_id)
        .where(table.run_id == run_id, table.step == step)
        .order_by(tables.Group.number, tables.Group.id)
    )
    return {row.group_id: ConsumptionVerdict(row.verdict) for row in await session.execute(query)}


async def replayable_groups(
    session: ReadSession, run_id: str, step: int, sampling: Sampling, *, every_group: bool = False
) -> list[str]:
    """The trained groups that step `step` uses again, by `sampling.replay.priority`: those within the lag bound that
    have uses left; none without `sampling.replay`. Args: every_group: those without variance teach, too"""
    if sampling.replay is None:
        return []
    scope = {
        "run": run_id,
        "step": step,
        "oldest": step - 1 - sampling.max_policy_lag,
        "uses": sampling.replay.uses,
        "priority": sampling.replay.priority,
        "count": sampling.replays,
        "every_group": every_group,
    }
    return list(await session.scalars(_REPLAYABLE, scope))


async def add_replays(session: Session, run_id: str, step: int, group_ids: Sequence[str]) -> None:
    """Records that a step uses groups again, in the step's own transaction.

    Raises: Refused: the step has used a group again already, or none has trained it; keys are group and use, and group
        and step
    """
    if group_ids:
        await session.execute(_ADD_REPLAYS, {"run": run_id, "step": step, "groups": list(group_ids)})


async def replayed_groups(session: ReadSession, run_id: str, step: int) -> list[str]:
    """The groups that a step used again."""
    table = tables.StepReplay
    return list(await session.scalars(select(table.group_id).where(table.run_id == run_id, table.step == step)))


async def load_samples(session: ReadSession, run_id: str, group_ids: Sequence[str]) -> Sequence[tables.Sample]:
    """The samples of some groups, by group, sibling and branch."""
    table = tables.Sample
    query = (
        select(table)
        .join(tables.Group, tables.Group.id == table.group_id)
        .join(tables.Rollout, tables.Rollout.id == table.rollout_id)
        .where(table.run_id == run_id, table.group_id.in_(group_ids))
        .order_by(tables.Group.number, tables.Group.id, tables.Rollout.sibling, table.branch)
    )
    return (await session.scalars(query)).all()


async def commit_step(session: Session, record: StepRecord) -> None:
    """Writes a step with everything it consumed and the version it made, all or nothing.

    Raises: Refused: the step, one of its groups or one of its samples is already recorded; keys
        are run and step, the group, and run and sample.
    """
    run_id, number = record.run_id, record.number
    verdicts = [(group, ConsumptionVerdict.TRAINED) for group in record.trained_groups]
    verdicts += [(group, ConsumptionVerdict.NO_VARIANCE) for group in record.zero_variance_groups]
    verdicts += [(group, ConsumptionVerdict.UNTRAINABLE) for group in record.untrainable_groups]
    session.add(
        tables.Step(
            run_id=run_id,
            number=number,
            metrics=record.metrics,
            checkpoint=record.checkpoint,
            started_at=record.started_at,
        )
    )
    session.add(tables.PolicyVersion(run_id=run_id, **vars(record.version)))
    await session.flush()
    if record.canary is not None:
        await add_canary(session, run_id, number, record.canary)
    groups = [{"group_id": group, "run_id": run_id, "step": number, "verdict": verdict} for group, verdict in verdicts]
    unknown = dict[str, bytes | None].fromkeys(StartTokens._fields)
    samples = [
        {
            "run_id": run_id,
            "sample_id": one,
            "step": number,
            **(record.start_tokens[one]._asdict() if one in record.start_tokens else unknown),
        }
        for one in record.sample_ids
    ]
    if groups:
        await session.execute(insert(tables.StepGroup), groups)
    if samples:
        await session.execute(insert(tables.StepSample), samples)


async def record_damage(session: Session, run_id: str, step: int, cause: str) -> None:
    """Records that a trainer found a step's files damaged. A repeat adds a row: it is found at every load."""
    session.add(tables.DamagedStep(run_id=run_id, step=step, cause=cause))


async def keep_computation(session: Session, run_id: str, here: Computation) -> Computation:
    """Records how the run's trainer computes, or reads the record of its first trainer. The key is the run.

    Args: here: as this trainer would resolve the document on its own device
    """
    table = tables.Computation
    settings = here.model_dump(mode="json", exclude={"device", "moved_to"})
    row = {"run_id": run_id, "device": here.device, "settings": settings, "latest_device": here.device}
    kept = (
        insert_or_skip(table)
        .values(row)
        .on_conflict_do_update(index_elements=["run_id"], set_={"latest_device": here.device})
    )
    return _computation((await session.scalars(kept.returning(table))).one())


async def read_computation(session: ReadSession, run_id: str) -> Computation | None:
    """How the run's trainer computes; None before it was first opened."""
    row = await session.get(tables.Computation, run_id)
    return None if row is None else _computation(row)


def _computation(row: tables.Computation) -> Computation:
    moved = row.latest_device if row.latest_device != row.device else None
    return Computation.model_validate({**row.settings, "device": row.device, "moved_to": moved}, extra="ignore")


async def _run_of(session: ReadSession, policy_id: str) -> str | None:
    """The run of a policy."""
    policy = (await policies_by_id(session, [policy_id])).get(policy_id)
    return None if policy is None else policy.run_id


async def weights_bytes(session: ReadSession, run_id: str) -> int | None:
    """Size of the files of the run's versions from 1 that are not removed; None without any."""
    table = tables.PolicyVersion
    query = select(func.sum(table.size_bytes)).where(
        table.run_id == run_id, table.version > 0, table.pruned_at.is_(None)
    )
    size = await session.scalar(query)
    return None if size is None else int(size)


class Retained(NamedTuple):
    """The steps of a run whose files stay, and those that are to be marked as removed."""

    versions: set[int]
    checkpoints: set[int]
    unmarked: set[int]


async def retained_steps(
    session: ReadSession, run_id: str, before: int, reference: int | None = None, sampled: int | None = None
) -> Retained:
    """The steps whose files stay when versions from 1 up to `before` are removed.

    The best version stays, the KL reference, those that an unfinished evaluation names, those that a run which
    continues this one still needs, and those that teach another one. Without their checkpoints, versions
    that may still prove best stay, too, and those from `sampled`: the trainer compares itself with the engine on tokens
    that they sampled.
    """
    table = tables.PolicyVersion
    wanted = {
        *await session.scalars(_PENDING_VERSIONS, {"run": await _run_of(session, run_id)}),
        *await session.scalars(_UNCOPIED_VERSIONS, {"run": run_id}),
        *await teaching_versions(session, run_id),
        *{(await best_version(session, run_id)).version, reference} - {None},
    }
    kept = wanted | await undecided_versions(session, run_id)
    found = set(await session.scalars(select(table.version).where(table.run_id == run_id, table.pruned_at.is_(None))))
    oldest = min(before, before if sampled is None else sampled)
    unmarked = {version for version in found if 1 <= version < oldest} - kept
    stay = found - unmarked
    return Retained(stay, {version for version in stay if version >= before or version in wanted}, unmarked)


async def prune_versions(
    session: Session, run_id: str, before: int, reference: int | None = None, sampled: int | None = None
) -> Retained:
    """Marks as removed the versions that `retained_steps` does not retain, and returns those that stay."""
    # A request for an evaluation, a continued or a taught run locks the run's row: either it is seen below, or it finds
    # the version removed.
    run = await _run_of(session, run_id)
    await session.execute(select(tables.Run.id).where(tables.Run.id == run).with_for_update(read=True))
    retained = await retained_steps(session, run_id, before, reference, sampled)
    table = tables.PolicyVersion
    gone = table.run_id == run_id, table.version.in_(retained.unmarked)
    await session.execute(update(table).where(*gone).values(pruned_at=func.now()))
    return retained
