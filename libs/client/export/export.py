"""An export: selected rollouts in one format, row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from leyden.libs.client.errors import Refused
from leyden.libs.client.export.atif import Atif
from leyden.libs.client.export.base import Format, LeftOut
from leyden.libs.client.export.conversations import Conversation, conversations_of
from leyden.libs.client.export.openai import OpenAI
from leyden.libs.client.export.pairs import Pairs
from leyden.libs.client.export.parquet import Parquet, write
from leyden.libs.client.export.trl import Trl
from leyden.libs.contracts.api.rollouts import Call, Rollout
from leyden.libs.contracts.conversation import Json

FORMATS: Mapping[str, Format] = {
    "atif": Atif(),
    "openai": OpenAI(),
    "pairs": Pairs(),
    "parquet": Parquet(),
    "trl": Trl(),
}


class Export:
    """Rows of one format; after the last one, `left_out` has what is in none of them and why."""

    def __init__(
        self,
        form: str,
        rollouts: Iterable[Rollout],
        calls: Callable[[Rollout], Iterable[Call]],
        *,
        roles: Collection[str] | None,
        per_task: int | None,
    ) -> None:
        if form not in FORMATS:
            raise Refused(f"no format is called {form!r}: write one of {', '.join(FORMATS)}")
        self._left_out: LeftOut = Counter()
        self._format, self._rollouts, self._calls = FORMATS[form], rollouts, calls
        self._form, self._roles, self._per_task = form, roles, per_task

    def __iter__(self) -> Iterator[Json]:
        return self._format.rows(self._sampled(), self._read, self._left_out, per_task=self._per_task)

    def _sampled(self) -> Iterator[Rollout]:
        """The siblings of groups: a re-roll begins with another one's answers, and a greedy rollout is a baseline."""
        for one in self._rollouts:
            if one.greedy or one.rerolls_of is not None:
                self._left_out["re-rolls and greedy rollouts"] += 1
            else:
                yield one

    @property
    def left_out(self) -> dict[str, int]:
        """Counts, all above 0, by what they count, such as `groups without two rollouts whose rewards differ`."""
        return dict(+self._left_out)

    def write_parquet(self, path: Path) -> int:
        """Writes the rows of the format parquet into a file; returns their number.

        Raises: Refused: another format, or pyarrow is missing
        """
        if self._form != "parquet":
            raise Refused(f"rows of {self._form} are JSON lines: export as parquet")
        if find_spec("pyarrow") is None:
            raise Refused("the package pyarrow is missing: pip install 'leyden[parquet]'")
        return write(self, path)

    def _read(self, rollout: Rollout) -> Sequence[Conversation]:
        found, incomplete, undelivered = conversations_of(rollout, self._calls(rollout))
        self._left_out["answers whose earlier calls are not stored"] += incomplete
        self._left_out["answers that never reached the agent"] += undelivered
        self._left_out["rollouts without a stored answer"] += not found
        return [one for one in found if self._roles is None or one.role in self._roles]
