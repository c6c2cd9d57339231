"""The components of runs to which telemetry gives values: those that are `from: otlp`."""

from __future__ import annotations

from collections.abc import Iterable

from cachetools import LRUCache

from leyden.libs.store.database import Database
from leyden.libs.store.records.spans import FEEDBACK, otlp_components
from leyden.services.collector.conventions import Sender
from leyden.services.collector.decode import Rows

RUNS = 1000
MAX_NAMED = 5
"""Names in a message."""


class Components:
    """Keeps the names of recent runs' components: a run's document never changes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._names: LRUCache[str, frozenset[str]] = LRUCache(RUNS)

    async def give(self, sender: Sender, rows: Rows) -> None:
        """Makes rewards values of the components with their names. They have no place, wherever they were sent. Others
        are not kept: a component that is `from: feedback` is not the agent's to give.

        Raises: StoreAway
        """
        if not rows.rewards:
            return
        names = await self._of(sender.run_id)
        given = [one._replace(source=FEEDBACK, response_id=None, tool_call_id=None) for one in rows.rewards]
        rows.rewards = [one for one in given if one.name in names]
        if others := {one.name for one in given} - names:
            rows.message = rows.message or _no_component(others)

    async def _of(self, run_id: str) -> frozenset[str]:
        names = self._names.get(run_id)
        if names is None:
            async with self._database.read() as session:
                names = self._names[run_id] = await otlp_components(session, run_id)
        return names


def _no_component(names: Iterable[str]) -> str:
    shown = ", ".join(map(repr, sorted(names)[:MAX_NAMED]))
    return f"values were not kept: the run has no component that is `from: otlp` and has the name {shown}"
