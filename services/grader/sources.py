"""The graders of one process: a pool of processes for built-in ones, judges, code of the operator's own, containers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from leyden.libs.contracts.config import Component, Reward
from leyden.libs.contracts.config.graders import Command, Container, PythonFunction, RelativeModel, ScoreModel
from leyden.libs.contracts.ids import run_of
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import Grade, cut, worst
from leyden.libs.grading.pool import Graded, Pool
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.read.trajectory.conversations import conversations_of
from leyden.libs.store.records.artifacts import Artifact, artifacts_of
from leyden.libs.store.runs.grading import add_judge_use
from leyden.libs.telemetry import logger
from leyden.services.grader.code import Code
from leyden.services.grader.containers.trajectory import TooLarge, files_of, read_calls
from leyden.services.grader.containers.verification import PackedTooLarge, Verification
from leyden.services.grader.judge import Judge
from leyden.services.grader.prices import Payer

if TYPE_CHECKING:
    from leyden.services.grader.containers.jobs import Containers

Sibling = tuple[AttemptKey, AttemptFacts]
Column = TypeVar("Column", list[Graded], list[Graded] | None)

log = logger()


class _ForCode(NamedTuple):
    """An attempt for programs. Args: document: its task and its rollout; files: those that its agent left, by path"""

    name: str
    document: Mapping[str, Any]
    files: Mapping[str, bytes]


@dataclass(frozen=True)
class Sources:
    """The graders of one process, each kind in its place. Args: containers: None where it starts none"""

    database: Database
    pool: Pool
    judge: Judge
    code: Code
    containers: Containers | None

    async def grade(
        self, reward: Reward, siblings: Sequence[Sibling], others: Sequence[AttemptFacts] = (), trial: str = ""
    ) -> list[list[Graded]]:
        """Returns the grades of each attempt in the order of the components. Containers stay until `forget`.

        Args: others: with which a judge compares them, and which get no grade; trial: apart from the attempts' own
            gradings and other trials
        Raises: StoreAway, Refused: its conversations cannot be read
        """
        # Read for programs alone, as they are the largest part of an attempt.
        attempts = [await self._graded_by_code(*one) for one in siblings] if reward.has_code else []
        payer = None if trial else Payer(run_of(siblings[0][0].rollout_id), reward.judge_cost is not None)
        columns = await asyncio.gather(
            *(
                _settled(
                    self._verified(one.grader, siblings, place, trial, worst(one))
                    if isinstance(one.grader, Container)
                    else self._slow(one, siblings, attempts, others, payer),
                    len(siblings),
                )
                for place, one in enumerate(reward.components)
            )
        )
        built_in = [one for one, column in zip(reward.components, columns, strict=True) if column is None]
        rows = await asyncio.gather(
            *(_settled(self.pool.grade(built_in, facts), len(built_in)) for _, facts in siblings)
        )
        return [
            [next(of_pool) if column is None else column[place] for column in columns]
            for place, of_pool in enumerate(map(iter, rows))
        ]

    async def _slow(
        self,
        component: Component,
        siblings: Sequence[Sibling],
        attempts: Sequence[_ForCode],
        others: Sequence[AttemptFacts],
        payer: Payer | None,
    ) -> list[Graded] | None:
        """Returns the grades of each attempt by a judge or a program; None where the pool grades."""
        match component.grader:
            case ScoreModel() as grader:
                least = worst(component)
                return list(
                    await asyncio.gather(*(self.judge.grade(grader, facts, payer, least) for _, facts in siblings))
                )
            case RelativeModel() as grader:
                texts = [*(facts for _, facts in siblings), *others]
                compared = await self.judge.compare(grader, texts, payer, worst(component))
                return compared[: len(siblings)]
            case PythonFunction() | Command() as grader:
                return list(await asyncio.gather(*(self.code.grade(grader, *one) for one in attempts)))
        return None

    async def _verified(
        self, grader: Container, siblings: Sequence[Sibling], place: int, trial: str, least: float
    ) -> list[Graded]:
        if (containers := self.containers) is None:
            cause = "this grader starts no containers (GRADER_CONTAINER_JOBS is 0)"
            return [Graded(Grade(ComponentState.FAILED, explanation=cause), 0.0)] * len(siblings)

        async def graded(attempt: AttemptKey, facts: AttemptFacts) -> Graded:
            try:
                async with self.database.read() as session:
                    rollout, calls = await read_calls(session, attempt)
                    artifacts = await artifacts_of(session, attempt)
                files = await asyncio.to_thread(files_of, rollout, calls, facts, artifacts)
            except TooLarge as error:
                return Graded(Grade(ComponentState.SCORED, least, None, str(error)), 0.0)
            except PackedTooLarge as error:
                return Graded(Grade(ComponentState.FAILED, explanation=f"its task is too large: {error}"), 0.0)
            name = _job_name(attempt, place, trial)
            return await containers.grade(grader, Verification(name, run_of(attempt.rollout_id), attempt, files))

        return list(await asyncio.gather(*(graded(*one) for one in siblings)))

    async def forget(self, reward: Reward, attempts: Sequence[AttemptKey], trial: str = "") -> None:
        """Deletes the Jobs of gradings whose results are stored. A repeat is harmless."""
        names = [
            _job_name(attempt, place, trial)
            for place, one in enumerate(reward.components)
            if isinstance(one.grader, Container)
            for attempt in attempts
        ]
        if self.containers is not None:
            await asyncio.gather(*map(self.containers.forget, names))

    async def _graded_by_code(self, attempt: AttemptKey, facts: AttemptFacts) -> _ForCode:
        async with self.database.read() as session:
            conversations = await conversations_of(session, attempt)
            artifacts = await artifacts_of(session, attempt)
        rollout = {
            "id": attempt.rollout_id,
            "output": facts.text,
            "answer": facts.last_object,
            "line_reward": facts.line_reward,
            "calls": facts.calls,
            "tools": facts.tools,
            "conversations": conversations,
            "artifacts": [_shown(one) for one in artifacts],
        }
        files = {one.path: one.content for one in artifacts}
        return _ForCode(f"{attempt.rollout_id}.{attempt.attempt}", {"task": facts.task, "rollout": rollout}, files)


async def _settled(grading: Awaitable[Column], count: int) -> Column | list[Graded]:
    """Returns what a grader finds; where it breaks, failed grades with the error, for another try.

    Raises: StoreAway, Refused
    """
    try:
        return await grading
    except (StoreAway, Refused):
        raise
    except Exception as error:  # whatever an agent wrote must end no loop and hold no group
        log.error("a grader broke", exc_info=error)
        return [broken(error)] * count


def _shown(one: Artifact) -> dict[str, Any]:
    return {"path": one.path, "size_bytes": one.size_bytes, "cut": len(one.content) < one.size_bytes}


async def count_use(database: Database, judge: Judge, run_id: str) -> None:
    """Counts what a run's judges have used since the last time; what cannot be written is counted the next time.

    Raises: StoreAway, Refused
    """
    if use := judge.take_use(run_id):
        try:
            async with database.session() as session:
                await add_judge_use(session, run_id, use)
        except BaseException:
            judge.add_use(run_id, use)
            raise


def broken(error: Exception) -> Graded:
    """The failed grade of a grader's own error."""
    cause = cut(f"the grader broke: {type(error).__name__}: {error}")
    return Graded(Grade(ComponentState.FAILED, explanation=cause), 0.0, crashed=True)


def _job_name(attempt: AttemptKey, place: int, trial: str) -> str:
    """The same for the same grading, so that a grader finds the Job of one that died. Args: place: of the component"""
    words = ("grade", attempt.rollout_id.replace(".", "-"), str(attempt.attempt), str(place), trial[:8])
    return "-".join(filter(None, words))
