"""A row for each answer of the model, for tables: tokens, credit, and the messages since the answer before.

The whole conversation of a row is that of the row `continues`, its answer, and the row's own messages. Only `write`
needs pyarrow.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from leyden.libs.client.export.base import LeftOut, Reader, by_rollout
from leyden.libs.client.export.conversations import Conversation
from leyden.libs.contracts.api.rollouts import Call, Rollout
from leyden.libs.contracts.conversation import Json, Turn

GROUP_ROWS, GROUP_TOKENS = 5000, 500_000
"""A row group ends with the first of both, so that memory holds no more of the file."""
OF_ROLLOUT = ("run_id", "group_id", "evaluation_id", "task_number", "admitted_version", "step", "reward", "reason")
OF_CALL = (
    "attempt", "status", "dialect", "trainable", "untrainable_reason", "prompt_tokens", "completion_tokens",
    "cached_tokens", "sampled_ids", "logprobs", "policy_versions", "temperature", "finish_reason", "queued_seconds",
    "first_token_seconds", "total_seconds",
)  # fmt: skip
OF_CREDIT = ("intermediate_reward", "return", "baseline", "advantage")


class Parquet:
    """Rows of the answers that no earlier row has."""

    def rows(
        self, rollouts: Iterable[Rollout], read: Reader, left_out: LeftOut, *, per_task: int | None
    ) -> Iterator[Json]:
        """Converts each answer."""
        return by_rollout(rollouts, read, per_task, _rows)


def _rows(conversation: Conversation) -> Iterator[Json]:
    begin, before = 0, None
    tools = list(conversation.tools)
    for at in sorted(conversation.answers):
        call = conversation.answers[at]
        if at in conversation.own:
            yield {
                "rollout_id": conversation.rollout.id,
                **{name: getattr(conversation.rollout, name) for name in OF_ROLLOUT},
                "call_id": call.id,
                "continues": before,
                "role": call.role,
                "agent": call.agent_name,
                **{name: getattr(call, name) for name in OF_CALL},
                **_credit(call),
                "created_at": call.created_at.isoformat(),
                "messages": [_message(turn) for turn in conversation.turns[begin:at]],
                "answer": _message(conversation.turns[at]),
                "tools": tools,
            }
        begin, before = at + 1, call.id


def _credit(call: Call) -> Json:
    credit = {} if call.credit is None else call.credit.model_dump(by_alias=True)
    return {name: credit.get(name) for name in OF_CREDIT}


def _message(turn: Turn) -> Json:
    return {
        "role": turn.role,
        "content": turn.content,
        "reasoning": turn.reasoning,
        "name": turn.name,
        "tool_calls": [{"id": one.id, "name": one.name, "arguments": one.arguments} for one in turn.tool_calls],
        "tool_call_id": turn.tool_call_id,
        "is_error": turn.is_error,
    }


def write(rows: Iterable[Json], path: Path) -> int:
    """Writes rows of this format as a Parquet file, row group by row group; returns their number."""
    from pyarrow import Table, parquet

    kinds = schema()
    count = 0
    with parquet.ParquetWriter(str(path), kinds, compression="zstd") as file:
        for group in _groups(rows):
            file.write_table(Table.from_pylist([_typed(row) for row in group], schema=kinds))
            count += len(group)
    return count


def _groups(rows: Iterable[Json]) -> Iterator[list[Json]]:
    group, tokens = list[Json](), 0
    for row in rows:
        group.append(row)
        tokens += row["completion_tokens"]
        if len(group) == GROUP_ROWS or tokens >= GROUP_TOKENS:
            yield group
            group, tokens = [], 0
    if group:
        yield group


def _typed(row: Json) -> Json:
    # A tool's schema has any shape, which a column cannot have.
    return {**row, "created_at": datetime.fromisoformat(row["created_at"]), "tools": json.dumps(row["tools"])}


def schema() -> Any:
    """The columns of a file, a `pyarrow.Schema`."""
    import pyarrow as arrow

    text, whole, small, real = arrow.string(), arrow.int64(), arrow.int32(), arrow.float64()
    call = arrow.struct({"id": text, "name": text, "arguments": text})
    message = arrow.struct(
        {
            **dict.fromkeys(("role", "content", "reasoning", "name"), text),
            "tool_calls": arrow.list_(call),
            "tool_call_id": text,
            "is_error": arrow.bool_(),
        }
    )
    texts = ("rollout_id", "run_id", "group_id", "evaluation_id", "reason", "call_id", "continues", "role", "agent")
    kinds = {
        **dict.fromkeys((*texts, "status", "dialect", "untrainable_reason", "finish_reason", "tools"), text),
        **dict.fromkeys(("task_number", "prompt_tokens", "completion_tokens", "cached_tokens"), whole),
        **dict.fromkeys(("admitted_version", "step", "attempt"), small),
        **dict.fromkeys(("reward", "temperature", *OF_CREDIT), real),
        **dict.fromkeys(("queued_seconds", "first_token_seconds", "total_seconds"), real),
        **dict.fromkeys(("sampled_ids", "policy_versions"), arrow.list_(small)),
        "trainable": arrow.bool_(),
        "logprobs": arrow.list_(arrow.float32()),
        "created_at": arrow.timestamp("us", tz="UTC"),
        "messages": arrow.list_(message),
        "answer": message,
    }
    order = ("rollout_id", *OF_ROLLOUT, "call_id", "continues", "role", "agent", *OF_CALL, *OF_CREDIT)
    return arrow.schema([(name, kinds[name]) for name in (*order, "created_at", "messages", "answer", "tools")])
