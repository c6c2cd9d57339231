"""Groups whose task cannot fill the teacher's hint: no rows, and a reason in place of advantages of 0."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select, update

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.credit.worker import credit_pending
from tests.contract.credit.test_worker import add_complete_group
from tests.support.builders import add_dataset, add_run, run_document

OWN = {"type": "reinforce", "distillation": {"hint": "It is {task.answer}."}}


async def credited(database: Database, **changes: Any) -> dict[int, tuple[tables.GroupCredit, list[tables.Sample]]]:
    """The credit and the rows of a group of each task: one with an answer, one without it, one with null."""
    tasks = await add_dataset(database, [{"answer": 4}, {"question": "2+3"}, {"answer": None}], name="answers")
    run = await add_run(database, config=run_document(**changes), dataset_id=tasks.id)
    for number in range(3):
        group = await add_complete_group(database, run, number)
        async with database.session() as session:
            await session.execute(update(tables.Group).where(tables.Group.id == group.id).values(task_number=number))
    assert len(await credit_pending(database, 8)) == 3
    async with database.read() as session:
        groups = (await session.scalars(select(tables.Group).order_by(tables.Group.number))).all()
        verdicts = {one.group_id: one for one in await session.scalars(select(tables.GroupCredit))}
        samples = (await session.scalars(select(tables.Sample))).all()
    return {one.number: (verdicts[one.id], [row for row in samples if row.group_id == one.id]) for one in groups}


async def test_a_task_without_the_field_trains_nothing_and_says_why(database: Database) -> None:
    found = await credited(database, algorithm=OWN)
    assert [len(samples) for _, samples in found.values()] == [2, 0, 0]
    assert [credit.verdict for credit, _ in found.values()] == ["credited"] * 3
    assert [credit.min_policy_version for credit, _ in found.values()] == [1, None, None]
    assert [credit.reason for credit, _ in found.values()] == [
        None,
        "the teacher has no hint for this task: there is no field {task.answer} among question"
        " (algorithm.distillation.hint)",
        "the teacher has no hint for this task: {task.answer} is null (algorithm.distillation.hint)",
    ]
    # Rewards are measured all the same.
    assert [credit.reward_mean for credit, _ in found.values()] == [0.5] * 3


async def test_tasks_without_the_field_train_where_no_hint_names_it(database: Database) -> None:
    found = await credited(database, algorithm={"type": "reinforce"})
    assert [len(samples) for _, samples in found.values()] == [2, 2, 2]
