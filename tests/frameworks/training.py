"""The tokens of an agent that train: credit writes the samples of its rollout, and the trainer reads them."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import select

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.credit.worker import credit_pending
from leyden.services.trainer.rows.batch import decode_sample, trained_tokens
from tests.support import builders


@dataclass(frozen=True)
class Trained:
    """Tokens with mask 1 and an advantage other than 0, by their ids in ascending order; and the number of calls that
    do not train, by reason."""

    token_ids: list[int]
    untrainable: dict[str, int]


async def trained(database: Database, rollout: tables.Rollout) -> Trained:
    """Ends the rollout with reward 1 and its next sibling, which made no call, with 0; credits their group."""
    async with database.session() as session:
        sibling = await session.get_one(tables.Rollout, f"{rollout.group_id}.{rollout.sibling + 1}")
        (await session.get_one(tables.Group, rollout.group_id)).state = "complete"
    await builders.settle_rollout(database, rollout, reward=1.0)
    await builders.settle_rollout(database, sibling, reward=0.0)
    assert await credit_pending(database, 1) == [rollout.group_id]
    async with database.read() as session:
        samples = await session.scalars(select(tables.Sample).where(tables.Sample.rollout_id == rollout.id))
        tokens = trained_tokens([decode_sample(sample) for sample in samples])
        verdict = (await session.scalars(select(tables.GroupCredit))).one()
    token_ids: list[int] = sorted(tokens.token_ids_K[tokens.advantages_K != 0].tolist())
    return Trained(token_ids, CallCounts.model_validate(verdict.calls).untrainable)
