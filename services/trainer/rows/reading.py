"""Reads the samples of a step from the store."""

from __future__ import annotations

from collections.abc import Sequence

from leyden.libs.contracts.config import RunConfig
from leyden.libs.store import training
from leyden.libs.store.database import ReadSession
from leyden.libs.store.records.chains import routed_calls
from leyden.services.trainer.rows.batch import Sample, decode_sample, with_agreed_experts


async def read_samples(
    session: ReadSession, run_id: str, groups: Sequence[str], trained: set[str], config: RunConfig
) -> tuple[list[Sample], list[Sample]]:
    """The samples of the groups in `trained`, and those of the other groups, which have no variance.

    Those of a run with `training.routing_replay` have the recorded experts of their tokens.
    """
    rows, routed = await training.load_samples(session, run_id, groups), None
    if config.training.routing_replay:
        calls = [row.call_id for row in rows if row.call_id is not None and row.group_id in trained]
        routed = await routed_calls(session, run_id, calls)
    samples = [decode_sample(row, routed) for row in rows]
    others = [one for one in samples if one.group_id not in trained]
    return with_agreed_experts([one for one in samples if one.group_id in trained]), others
