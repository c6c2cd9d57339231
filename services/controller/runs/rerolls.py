"""Re-rolls of baseline `monte_carlo`: the rollouts that measure the value of the states inside their siblings.

A group whose siblings have all ended gets its re-rolls in the same transaction, before it can be complete. It waits
for them as for any rollout, so that nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from leyden.libs.contracts.config import Baseline, RunConfig
from leyden.libs.faults import fault_point
from leyden.libs.store.database import Session
from leyden.libs.store.runs.facts import run_configs
from leyden.libs.store.runs.rerolls import EndedSibling, NewReroll, add_rerolls, ended_siblings


async def reroll(session: Session) -> None:
    """Adds the re-rolls of groups whose siblings have all ended. A repeat adds none."""
    ended = await ended_siblings(session)
    if not ended:
        return
    configs = await run_configs(session, {one.run_id for one in ended})
    planned = list[NewReroll]()
    for _, group in groupby(ended, key=lambda one: one.group_id):
        siblings = list(group)
        config = configs[siblings[0].run_id]
        # A run whose document does not parse fails in the same tick.
        # Credit leaves a group out that has fewer: measuring its states would be for nothing.
        if isinstance(config, RunConfig) and len(siblings) >= config.sampling.min_siblings:
            planned += planned_rerolls(siblings, config.credit.baseline)
    await add_rerolls(session, planned)
    fault_point("controller.rerolls_added")


def planned_rerolls(siblings: Sequence[EndedSibling], baseline: Baseline) -> Iterator[NewReroll]:
    """Yields the re-rolls of a group: `samples` from each chosen call of each sibling.

    Args: siblings: the finished ones, in order
    """
    number = siblings[0].size
    for sibling in siblings:
        for call in baseline.rerolled_calls(sibling.calls):
            for _ in range(baseline.samples):
                yield NewReroll(sibling.group_id, number, sibling.rollout_id, call)
                number += 1
