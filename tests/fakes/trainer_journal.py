"""The journal of trainers' ends, in memory."""

from __future__ import annotations

from collections.abc import Sequence

from leyden.libs.store.runs.trainer_ends import TrainerEnd


class RememberedEnds:
    """Remembers all ends in `ends`; `steps`: the steps that each run has made, which tests set."""

    def __init__(self) -> None:
        self.ends: list[TrainerEnd] = []
        self.steps: dict[str, int] = {}
        self._made: list[int] = []

    async def last_attempt(self, run_id: str) -> int:
        return max((end.attempt for end in self.ends if end.run_id == run_id), default=0)

    async def record(self, end: TrainerEnd) -> Sequence[TrainerEnd]:
        step = self.steps.get(end.run_id, 0)
        self.ends.append(end)
        self._made.append(step)
        return [
            one for one, made in zip(self.ends, self._made, strict=True) if (one.run_id, made) == (end.run_id, step)
        ]
