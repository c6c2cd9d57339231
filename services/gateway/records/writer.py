"""Writes the durable record of calls: an answer leaves only after the transaction of its row has committed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from leyden.libs.contracts.conversation import Turn
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.database import Database, Refused, StoreAway
from leyden.libs.store.group_commit import GroupCommit
from leyden.libs.store.records.calls import NewCall, write_calls
from leyden.libs.telemetry import logger
from leyden.services.gateway.errors import GatewayError, Unavailable
from leyden.services.gateway.metrics import RECORD_ROWS, RECORD_SECONDS
from leyden.services.gateway.records.quotas import AttemptQuota

MAX_ROWS = 512
CALL_BYTES, TURN_BYTES = 1000, 100
"""A row of a call and a turn without texts and tokens."""

log = logger()


class Recorder:
    """Writes calls that end at about the same time in one transaction.

    Args: hold_seconds: how long a call waits while the store is down; quota: of the calls of an attempt
    """

    def __init__(self, database: Database, *, hold_seconds: float, quota: AttemptQuota) -> None:
        self._database = database
        self._quota = quota
        self._commits = GroupCommit[NewCall](self._write, max_items=MAX_ROWS, hold_seconds=hold_seconds)
        self.run = self._commits.run
        self.drain = self._commits.drain

    def check_room(self, attempt: AttemptKey, choices: int) -> None:
        """Passes an attempt that may store so many more calls. Raises: BadRequest."""
        self._quota.check(attempt, [CALL_BYTES] * choices)

    def reserve(self, attempt: AttemptKey, choices: int, added_tokens: int) -> Callable[[], None]:
        """Counts the rows of a call that begins, until the function that it returns is called, as before its record.

        Args: added_tokens: what its prompt adds to that of the call before it
        Raises: BadRequest
        """
        self.check_room(attempt, choices)
        return self._quota.reserve(attempt, [CALL_BYTES + 4 * added_tokens] * choices)

    async def record(self, rows: Sequence[NewCall]) -> None:
        """Returns once the rows, the choices of one request, are durable. Cancelling the wait does not stop the write.

        Raises: Unavailable: the store was down for longer than `hold_seconds`; GatewayError: the store refuses the rows
        """
        started = time.perf_counter()
        attempt = AttemptKey(rows[0].rollout_id, rows[0].attempt)
        try:
            with self._quota.storing(attempt, list(map(_call_bytes, rows))):
                await self._commits.submit(rows)
        except StoreAway as error:
            message = "The call's record could not be stored, so its answer is withheld; try again."
            raise Unavailable(message, code="store_unavailable", retry_after_seconds=5) from error
        except Refused as error:
            log.error("call refused by the store", call_id=rows[0].id, error=str(error))
            raise GatewayError("The call's record was refused by the store.", code="record_refused") from error
        RECORD_SECONDS.observe(time.perf_counter() - started)

    async def _write(self, rows: Sequence[NewCall], may_exist: bool) -> None:
        await write_calls(self._database, rows, may_exist)
        RECORD_ROWS.observe(len(rows))


def _call_bytes(row: NewCall) -> int:
    tokens = len(row.prompt_ids) + len(row.sampled_ids) + len(row.generator_logprobs) + len(row.policy_versions)
    tokens += len(row.routed_experts or b"")
    turns = [*row.turns, *([] if row.answer is None else [row.answer])]
    return (
        CALL_BYTES + tokens + sum(map(_turn_bytes, turns)) + sum(TURN_BYTES + len(str(one)) for one in row.tools or ())
    )


def _turn_bytes(turn: Turn) -> int:
    calls = sum(len(call.arguments) for call in turn.tool_calls)
    return TURN_BYTES + len(turn.content) + len(turn.reasoning or "") + calls
