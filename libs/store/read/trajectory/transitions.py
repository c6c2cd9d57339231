"""The transitions of a rollout's attempt: calls to the model and spans of tools, by time, with the states between."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from sqlalchemy import text

from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.trajectory import Excerpt, State, Transition
from leyden.libs.contracts.ids import run_of
from leyden.libs.store.database import ReadSession
from leyden.libs.store.read.paging import decode_cursor, encode_cursor, page
from leyden.libs.store.read.views import UnknownRollout

VALUE_CHARACTERS = 200
"""The longest value of a variable."""
TEXT_CHARACTERS = 2000
"""The longest input or output."""
VARIABLES = 30
"""The most fields of the task in a state, and the most other variables."""
NAME_CHARACTERS = 200
"""The longest name of a variable."""
FIRST = -(2**63)
"""Before every time."""
BEHIND = 2**31 - 1
"""The place of an answer, behind the turns of its request."""

_ATTEMPT = text("""
    SELECT t.payload AS task, coalesce(r.attempt, (SELECT max(number) FROM attempts WHERE rollout_id = r.id)) AS attempt
    FROM rollouts r JOIN groups g ON g.id = r.group_id
    JOIN tasks t ON t.dataset_id = g.dataset_id AND t.number = g.task_number
    WHERE r.id = :rollout
""")


def _attribute(*names: str) -> str:
    """SQL: the first of a span's attributes that it has."""
    values = ", ".join(f"attributes ->> '{name}'" for name in names)
    return f"coalesce({values})"


# OpenTelemetry GenAI, OpenInference, Vercel's AI SDK, OpenLLMetry; the gateway's embeddings.
_ARGUMENTS = _attribute(
    *("gen_ai.tool.call.arguments", "input.value", "ai.toolCall.args", "traceloop.entity.input"),
    "leyden.embeddings.texts",
)
_RESULT = _attribute("gen_ai.tool.call.result", "output.value", "ai.toolCall.result", "traceloop.entity.output")
_SCOPE = "run_id = :run AND rollout_id = :rollout AND attempt = :attempt"

_STEPS = text(f"""
    WITH calls AS (
        SELECT 'llm' AS type, sequence AS at, id AS key, id, coalesce(role, agent_name) AS component, status,
            turns::text AS input, answer::text AS output, (
                SELECT intermediate_reward FROM credits k WHERE k.run_id = :run AND k.call_id = c.id) AS reward
        FROM model_calls c WHERE {_SCOPE} AND (sequence, id) > (CAST(:at AS bigint), CAST(:key AS text))
        ORDER BY sequence, id LIMIT :rows
    ), tools AS (
        SELECT 'tool', start_ns, trace_id || ':' || span_id AS key, span_id, tool, status, {_ARGUMENTS}, {_RESULT},
            CAST(NULL AS double precision)
        FROM spans WHERE {_SCOPE} AND kind = 'tool'
            AND (start_ns, trace_id || ':' || span_id) > (CAST(:at AS bigint), CAST(:key AS text))
        ORDER BY start_ns, key LIMIT :rows
    )
    SELECT type, at, key, id, left(component, {NAME_CHARACTERS}) AS component, status, reward,
        left(input, {TEXT_CHARACTERS}) AS input, length(input) AS input_length,
        left(output, {TEXT_CHARACTERS}) AS output, length(output) AS output_length
    FROM (SELECT * FROM calls UNION ALL SELECT * FROM tools) AS steps ORDER BY at, key LIMIT :rows
""")  # noqa: S608  # constants alone

# A result has the tool of the newest call with its id before it. Why windows: where the table has no statistics yet, a
# join with the answers compares all pairs, and pages of 10,000 calls took 1.1 s each in place of 0.1 s.
# `step` is the first step of the page that begins after the value came.
_CHANGES = text(f"""
    WITH events AS (
        SELECT sequence AS at, place, turn ->> 'tool_call_id' AS id, CAST(NULL AS text) AS asked,
            turn ->> 'name' AS tool, left(turn ->> 'content', {VALUE_CHARACTERS}) AS value,
            length(turn ->> 'content') AS length
        FROM model_calls CROSS JOIN jsonb_array_elements(turns) WITH ORDINALITY AS every (turn, place)
        WHERE {_SCOPE} AND sequence <= :until AND turn ->> 'role' = 'tool'
        UNION ALL
        SELECT sequence, {BEHIND}, one ->> 'id', one ->> 'name', NULL, NULL, NULL
        FROM model_calls, jsonb_path_query(answer, '$.tool_calls[*]') AS one WHERE {_SCOPE} AND sequence <= :until
    ), counted AS (
        SELECT *, count(asked) OVER (PARTITION BY id ORDER BY at, place ROWS UNBOUNDED PRECEDING) AS number FROM events
    ), named AS (
        SELECT *, max(asked) OVER (PARTITION BY id, number) AS name FROM counted
    ), given AS (
        SELECT at, place, 'tool.' || coalesce(tool, name, 'unknown') AS name, value, length FROM named
        UNION ALL
        SELECT end_ns, 0, 'tool.' || tool, left({_RESULT}, {VALUE_CHARACTERS}), length({_RESULT})
        FROM spans WHERE {_SCOPE} AND kind = 'tool' AND end_ns <= :until
        UNION ALL
        SELECT CAST(extract(epoch FROM created_at) * 1000000000 AS bigint), 0, 'agent.' || component, value::text,
            length(value::text)
        FROM feedback WHERE {_SCOPE} AND token_name IS NULL
    ), newest AS (
        SELECT DISTINCT ON (step, left(name, {NAME_CHARACTERS}))
            width_bucket(at - 1, CAST(:times AS bigint[])) AS step, at, place, left(name, {NAME_CHARACTERS}) AS name,
            value, length
        FROM given WHERE at <= :until AND name IS NOT NULL AND length IS NOT NULL
        ORDER BY step, left(name, {NAME_CHARACTERS}), at DESC, place DESC
    ), ranked AS (
        SELECT *, row_number() OVER (PARTITION BY step ORDER BY at DESC, place DESC, name) AS rank FROM newest
    )
    SELECT step, name, value, length FROM ranked WHERE rank <= {VARIABLES} + 1 ORDER BY step, rank DESC
""")  # noqa: S608  # constants alone


async def read_trajectory(session: ReadSession, rollout_id: str, *, cursor: str | None, limit: int) -> Page[Transition]:
    """A page of the transitions of the attempt that counts, or else of the newest one.

    Raises: UnknownRollout; BadCursor: not of this attempt's list
    """
    found = (await session.execute(_ATTEMPT, {"rollout": rollout_id})).one_or_none()
    if found is None:
        raise UnknownRollout(rollout_id)
    name = f"trajectory of {rollout_id} {found.attempt}"
    at, key = decode_cursor(cursor, name, int, str) or (FIRST, "")
    if found.attempt is None:
        return Page(items=[])
    scope = {"run": run_of(rollout_id), "rollout": rollout_id, "attempt": found.attempt}
    rows = (await session.execute(_STEPS, {**scope, "at": at, "key": key, "rows": limit + 1})).all()
    states = await _states(session, scope, found.task, [row.at for row in rows])
    steps = list(zip(rows, states, [*states[1:], None], strict=True))
    return page(name, steps, limit, lambda step: _transition(scope, *step), lambda step: (step[0].at, step[0].key))


async def _states(
    session: ReadSession, scope: Mapping[str, Any], task: Mapping[str, Any], times: Sequence[int]
) -> list[State]:
    """The state at the beginning of each step."""
    if not times:
        return []
    fields = {f"task.{name}"[:NAME_CHARACTERS]: _value(value) for name, value in list(task.items())[:VARIABLES]}
    changes = (await session.execute(_CHANGES, {**scope, "times": list(times), "until": times[-1]})).all()
    rest = iter(changes)
    change = next(rest, None)
    others: dict[str, Excerpt] = {}
    left_out = len(task) > VARIABLES
    states = []
    for step in range(len(times)):
        while change is not None and change.step <= step:
            others.pop(change.name, None)
            others[change.name] = _excerpt(change.value, change.length)
            change = next(rest, None)
        left_out = left_out or len(others) > VARIABLES
        others = dict(list(others.items())[-VARIABLES:])
        states.append(State(variables={**fields, **others}, left_out=left_out))
    return states


def _value(value: object) -> Excerpt:
    written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return _excerpt(written[:VALUE_CHARACTERS], len(written))


def _excerpt(beginning: str, length: int) -> Excerpt:
    return Excerpt(text=beginning, cut=len(beginning) < length, characters=length)


def _transition(scope: Mapping[str, Any], row: Any, state: State, next_state: State | None) -> Transition:
    return Transition(
        type=row.type,
        id=row.id,
        attempt=scope["attempt"],
        component=row.component,
        status=row.status,
        started_ns=row.at,
        state=state,
        input=None if row.input is None else _excerpt(row.input, row.input_length),
        output=None if row.output is None else _excerpt(row.output, row.output_length),
        whole=_whole(scope, row),
        reward=row.reward,
        next_state=next_state,
    )


def _whole(scope: Mapping[str, Any], row: Any) -> str:
    """The page of the list of calls or spans that begins with this one: no id lies between its beginning and it."""
    rollout, kind = cast(str, scope["rollout"]), "calls" if row.type == "llm" else "spans"
    before = encode_cursor(f"{kind} of {rollout}", (row.at, row.id[:-1]))
    return f"/v1/rollouts/{rollout}/{kind}?attempt={scope['attempt']}&limit=1&cursor={before}"
