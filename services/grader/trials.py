"""Grades stored attempts for people who try components (`leyden reward test`) or regrade (`leyden rollout regrade`).

Nothing is stored but the answer. The trials of a grader that dies are another one's when their leases end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

from leyden.libs.contracts.api.rollouts import ComponentGrade, Graded
from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.config.graders import RelativeModel
from leyden.libs.contracts.ids import run_of
from leyden.libs.faults import fault_point
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import cut, storable
from leyden.libs.grading.ledger import ledger
from leyden.libs.grading.pool import Graded as Found
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.read.attempt_facts import attempt_facts, facts_beside
from leyden.libs.store.runs.grading import judge_budget
from leyden.libs.store.runs.trials import (
    Trial,
    answer_trial,
    fail_trial,
    lease_trials,
    release_trials,
    renew_trials,
    trial_state,
)
from leyden.libs.telemetry import RateLimitedLogger, logger
from leyden.services.grader.prices import Payer
from leyden.services.grader.sources import Sources, count_use

AT_ONCE = 4
POLL_SECONDS = 0.5

log = logger()
limited_log = RateLimitedLogger(log)


class BudgetSpent(RuntimeError):
    """The run's judges may be asked no more."""


class Trials:
    """The trials that one process grades."""

    def __init__(self, database: Database, sources: Sources, lease_seconds: float) -> None:
        self._database = database
        self._sources = sources
        self._lease_seconds = lease_seconds
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self, stop: asyncio.Event) -> None:
        """Grades until the event is set, and leaves what it has to another grader."""
        renewing = asyncio.create_task(self._renew())
        try:
            while not stop.is_set():
                for trial in await self._lease(AT_ONCE - len(self._tasks)):
                    task = asyncio.create_task(self._grade(trial), name=f"trial of {trial.rollout_id}")
                    self._tasks[trial.lease_id] = task
                    task.add_done_callback(partial(self._ended, trial.lease_id))
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS):
                        await stop.wait()
                if renewing.done():
                    renewing.result()
        finally:
            held = dict(self._tasks)
            for task in (*held.values(), renewing):
                task.cancel()
            await asyncio.gather(*held.values(), renewing, return_exceptions=True)
            if stop.is_set():
                await self._release(held)

    async def _lease(self, count: int) -> list[Trial]:
        if not count:
            return []
        try:
            async with self._database.session() as session:
                leased = await lease_trials(session, count, self._lease_seconds)
        except (StoreAway, Refused) as error:
            limited_log.warning("no trials leased", cause=str(error))
            return []
        if leased:
            fault_point("grader.trial_leased")
        return leased

    async def _renew(self) -> None:
        """Renews every lease three times per lease time; a trial that loses its lease is another grader's."""
        while True:
            await asyncio.sleep(self._lease_seconds / 3)
            held = list(self._tasks)
            try:
                async with self._database.session() as session:
                    renewed = await renew_trials(session, held, self._lease_seconds)
            except (StoreAway, Refused) as error:
                limited_log.warning("leases of trials not renewed", cause=str(error))
                continue
            for lease in set(held) - renewed:
                if task := self._tasks.get(lease):
                    task.cancel()

    async def _release(self, leases: Iterable[str]) -> None:
        try:
            async with self._database.session() as session:
                await release_trials(session, leases)
        except (StoreAway, Refused) as error:
            log.warning("trials not released: their leases end by themselves", cause=str(error))

    def _ended(self, lease: str, task: asyncio.Task[None]) -> None:
        del self._tasks[lease]
        if not task.cancelled() and task.exception() is not None:
            log.error("a trial broke", trial=task.get_name(), exc_info=task.exception())

    async def _grade(self, trial: Trial) -> None:
        """Writes the answer, or why there is none: somebody waits for either until the trial's time is over. Then it
        leaves no Job."""
        limit = asyncio.timeout(trial.seconds)
        try:
            async with limit:
                answer = await self._graded(trial)
            fault_point("grader.trial_graded")
            async with self._database.session() as session:
                await answer_trial(session, trial.lease_id, answer.model_dump(mode="json"))
            fault_point("grader.trial_answered")
        except Exception as error:  # noqa: BLE001  # else its asker would wait until the trial's end
            if limit.expired():
                log.warning("trial ended with its time", rollout_id=trial.rollout_id)
            else:
                await self._fail(trial, error)

    async def _graded(self, trial: Trial) -> Graded:
        async with self._database.read() as session:
            attempt, facts = await attempt_facts(session, trial.rollout_id)
            rival = None if trial.against is None else (await attempt_facts(session, trial.against))[1]
            compares = rival is None and trial.reward.compares
            others = await facts_beside(session, trial.rollout_id) if compares else []
        # Outside the transaction: judges take minutes.
        if rival is not None:
            return await self._duel(trial, attempt, facts, rival)
        one = AttemptKey(trial.rollout_id, attempt), facts
        try:
            (graded,) = await self._sources.grade(trial.reward, [one], others, trial.id)
        finally:
            await self._forget(trial, one[0])
        return _shown(attempt, trial.reward, graded)

    async def _forget(self, trial: Trial, attempt: AttemptKey) -> None:
        """Deletes the trial's Jobs, unless another grader has its lease and works with them."""
        async with self._database.read() as session:
            state = await trial_state(session, trial.id)
        if state is None or state.lease_id == trial.lease_id:
            await self._sources.forget(trial.reward, [attempt], trial.id)

    async def _duel(self, trial: Trial, attempt: int, facts: AttemptFacts, rival: AttemptFacts) -> Graded:
        """The judges that compare alone grade: other components say nothing about two attempts. The run of the rollout
        pays for them.

        Raises: BudgetSpent
        """
        run_id = run_of(trial.rollout_id)
        async with self._database.read() as session:
            budget = await judge_budget(session, run_id)
        if budget.is_spent:
            raise BudgetSpent(
                f"the judges of run {run_id} have used all that reward.judge_tokens or judge_cost allows: resume it"
                " with a larger bound, or compare evaluations of another run"
            )
        judged, graded = [], []
        try:
            for one in trial.reward.components:
                if isinstance(one.grader, RelativeModel):
                    judged.append(one)
                    payer = Payer(run_id, budget.has_cap)
                    graded.append(await self._sources.judge.duel(one.grader, facts, rival, payer))
        finally:
            await count_use(self._database, self._sources.judge, run_id)
        return _shown(attempt, trial.reward.model_copy(update={"components": judged}), graded)

    async def _fail(self, trial: Trial, error: Exception) -> None:
        log.warning("trial not graded", rollout_id=trial.rollout_id, exc_info=error)
        reason = storable(cut(f"{type(error).__name__}: {error}"))
        try:
            async with self._database.session() as session:
                await fail_trial(session, trial.lease_id, reason)
        except (StoreAway, Refused) as away:
            limited_log.warning("trial not answered", cause=str(away))


def _shown(attempt: int, reward: Reward, graded: list[Found]) -> Graded:
    found = ledger(reward, graded)
    components = [ComponentGrade.model_validate(one._asdict()) for one in found.components]
    return Graded(attempt=attempt, total=found.total, reason=found.reason, components=components)
