"""Complete groups with all records of their siblings, which credit reads, and the samples that it writes.

Reading takes the same number of statements for any number of groups; writing uses COPY. A worker claims groups and
locks a group only to write it. A group is credited once: `group_credits` has one row per group and run that trains on
it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from psycopg.types.json import Jsonb
from sqlalchemy import bindparam, text
from sqlalchemy.dialects.postgresql import JSONB

from leyden.libs.contracts.states import GATEWAY_SCOPE, GroupVerdict
from leyden.libs.store.database import ReadSession, Session, binary_rows, copy_rows

Rows = Sequence[Any]


class PendingGroup(NamedTuple):
    """A complete training group without credit; `config` is the run's document, `policy_ids` the ids of its further
    policies that train, by name."""

    id: str
    run_id: str
    config: Mapping[str, Any]
    policy_ids: Mapping[str, str] = MappingProxyType({})


class GroupSize(NamedTuple):
    """The work that a group makes: its calls, tool spans and rewards, and the tokens of its prompts."""

    records: int
    tokens: int


class SiblingRows(NamedTuple):
    """The records of the counted attempts of finished siblings, each list in a stable order.

    rollouts: id, group_id, greedy, rerolls_of, from_call, reward, ended (the kind of its outcome, or null), failed (the
        agent itself)
    calls: rollout_id, id, parent_call_id, shared_tokens, request_id, choice, sequence, status, trainable,
        untrainable_reason, finish_reason, masks_forced, prompt_ids (after the shared tokens), prompt_tokens (of the
        complete prompt), sampled_ids, written_ids (or null), generator_logprobs, policy_versions, temperature, role (or
        null), request_sha256, total_seconds, delivered (null: unknown), received_at (when the last byte was delivered,
        as sequence; or null), offers_tools (null where they are its parent's), answer (a turn or null), results (of
        tools, in the turns of the row: [{id, text, is_error}]; id is null for a user's text with a result in it; text
        is its beginning; or null)
    spans: rollout_id, span_id, parent_span_id, scope, tool, status, tool_call_id, response_id, start_ns, end_ns; only
        tool spans
    rewards: rollout_id, value, response_id, tool_call_id, call_id, key, is_external; of agents, telemetry and people
    """

    rollouts: Rows
    calls: Rows
    spans: Rows
    rewards: Rows

    def of(self, rollouts: Collection[str]) -> SiblingRows:
        """The records of some rollouts."""
        ids = set(rollouts)
        kept = [row for row in self.rollouts if row.id in ids]
        return SiblingRows(kept, *([row for row in some if row.rollout_id in ids] for some in self[1:]))


class NewGroupCredit(NamedTuple):
    """One row of `group_credits`."""

    group_id: str
    run_id: str
    verdict: GroupVerdict
    reason: str | None
    credit_version: int
    counted_siblings: int
    has_variance: bool
    min_policy_version: int | None
    reward_mean: float | None
    reward_std: float | None
    averages: Mapping[str, float] | None = None
    calls: Mapping[str, object] | None = None


class NewCallCredit(NamedTuple):
    """One row of `credits`. `tools` is the column's document."""

    run_id: str
    call_id: str
    rollout_id: str
    parent_call_id: str | None
    depth: int
    state_key: str
    tools: Mapping[str, object]
    intermediate_reward: float
    return_: float
    baseline: float
    advantage: float


class NewSample(NamedTuple):
    """One row of `samples`, arrays as bytes."""

    run_id: str
    id: str
    group_id: str
    rollout_id: str
    branch: int
    call_id: str
    length: int
    trained_tokens: int
    token_ids: bytes
    mask: bytes
    generator_logprobs: bytes
    advantages: bytes
    temperatures: bytes
    policy_versions: bytes
    min_policy_version: int
    calls: Sequence[Mapping[str, object]] | None = None


RECENT_SECONDS = 120
"""Longer than any transaction lasts: `finished_at` is the time of its first statement, and statements are bounded."""

# A run of supervised fine-tuning has credits of its own for other runs' groups.
_PENDING_NOW = """
    SELECT g.id{columns} FROM groups g
    JOIN run_status s ON s.run_id = g.run_id
    WHERE g.state = 'complete' AND g.evaluation_id IS NULL AND s.phase NOT IN ('completed', 'failed', 'cancelled')
    AND NOT EXISTS (SELECT FROM group_credits c WHERE c.group_id = g.id AND c.run_id = g.run_id)
"""
OLDEST = 1000
"""Groups among which a worker looks for some that no other worker has."""
# A moving average takes the groups of its run one after the other, so one worker has all of them.
_CLAIM = f"""
    WITH pending AS MATERIALIZED (
        {_PENDING_NOW.format(columns=", g.run_id, g.finished_at")} {{recent}}
        ORDER BY g.finished_at, g.id LIMIT {OLDEST}
    ), named AS MATERIALIZED (
        SELECT p.id, CASE WHEN r.baseline = 'ema' THEN r.id ELSE p.id END AS name
        FROM pending p JOIN runs r ON r.id = p.run_id ORDER BY p.finished_at, p.id
    )
    SELECT id FROM named WHERE pg_try_advisory_xact_lock(hashtextextended('credit-claim:' || name, 0)) LIMIT :count
"""  # noqa: S608  # constants alone
_CLAIM_ALL = text(_CLAIM.format(recent=""))
_CLAIM_RECENT = text(_CLAIM.format(recent=f"AND g.finished_at > now() - interval '{RECENT_SECONDS} seconds'"))
_LOCK = text(f"{_PENDING_NOW.format(columns='')} AND g.id = ANY(:groups) ORDER BY g.id FOR UPDATE OF g SKIP LOCKED")
# One definition: a group for which the input of credit and the later count differ would never be credited.
_COUNTED_EXTERNAL = """
    rollouts r JOIN external_rewards x ON x.rollout_id = r.id AND coalesce(x.attempt, r.attempt) = r.attempt
        AND r.state = 'finished' AND r.reward IS NOT NULL
"""
_STILL_PENDING = text(f"""
    SELECT g.id, (SELECT count(*) FROM {_COUNTED_EXTERNAL} WHERE r.group_id = g.id) AS given
    FROM groups g
    WHERE g.id = ANY(:groups)
    AND NOT EXISTS (SELECT FROM group_credits c WHERE c.group_id = g.id AND c.run_id = g.run_id)
""")  # noqa: S608  # constants alone

# No model call asked for an embedding, which the gateway's own spans are.
_TOOL_SPAN = f"s.kind = 'tool' AND s.scope IS DISTINCT FROM '{GATEWAY_SCOPE}'"
_SIZES = text(f"""
    SELECT r.group_id, sum(spans.count + calls.count + given.count) AS records, sum(calls.tokens) AS tokens
    FROM rollouts r
    CROSS JOIN LATERAL (SELECT count(*) FROM (
        SELECT FROM spans s WHERE s.run_id = r.run_id AND s.rollout_id = r.id AND s.attempt = r.attempt
        AND {_TOOL_SPAN} LIMIT :most + 1) AS one) AS spans
    CROSS JOIN LATERAL (SELECT count(*), coalesce(sum(c.prompt_tokens), 0) AS tokens FROM model_calls c
        WHERE c.run_id = r.run_id AND c.rollout_id = r.id AND c.attempt = r.attempt) AS calls
    CROSS JOIN LATERAL (SELECT count(*) FROM rewards w
        WHERE w.rollout_id = r.id AND w.attempt = r.attempt) AS given
    WHERE r.group_id = ANY(:groups) AND r.state = 'finished'
    GROUP BY r.group_id
""")  # noqa: S608  # constants alone

# A second statement: it sees credits that another worker committed while the first one waited for its lock.
_PENDING = text("""
    SELECT g.id, g.run_id, r.config, (
        SELECT coalesce(jsonb_object_agg(name, id), '{}') FROM policies
        WHERE run_id = r.id AND name <> '' AND trains) AS policy_ids
    FROM groups g
    JOIN runs r ON r.id = g.run_id
    WHERE g.id = ANY(:groups)
    AND NOT EXISTS (SELECT FROM group_credits c WHERE c.group_id = g.id AND c.run_id = g.run_id)
    ORDER BY g.finished_at, g.id
""")

_ROLLOUTS = text("""
    SELECT r.id, r.group_id, r.greedy, r.rerolls_of, r.from_call, r.reward, o.kind AS ended,
           r.reason IS DISTINCT FROM 'succeeded' AS failed
    FROM rollouts r LEFT JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt
    WHERE r.group_id = ANY(:groups) AND r.state = 'finished' AND r.reward IS NOT NULL AND r.attempt IS NOT NULL
    ORDER BY r.group_id, r.sibling
""")

RESULT_CHARACTERS = 1000
"""The beginning of a tool's result that credit reads; its first words show its status."""
_USERS_RESULT = r".*(?:^|\n)((?:Observation|Error):\n.*)"
"""smolagents sends results as the text of a user, after his own, and may send several: the last one is new."""

_CALLS = f"""
    SELECT c.rollout_id, c.id, c.parent_call_id, c.shared_tokens, c.request_id, c.choice, c.sequence, c.status,
           c.trainable, c.untrainable_reason, c.finish_reason, c.masks_forced,
           c.prompt_ids, c.prompt_tokens, c.sampled_ids, c.written_ids, c.generator_logprobs, c.policy_versions,
           c.temperature, c.role, c.request_sha256, c.total_seconds, d.delivered,
           CASE WHEN d.delivered THEN d.sequence + (d.seconds * 1e9)::bigint END AS received_at,
           json_array_length(c.tools) > 0 AS offers_tools, c.answer, (
               SELECT jsonb_agg(jsonb_build_object(
                   'id', turn ->> 'tool_call_id', 'is_error', turn -> 'is_error', 'text', left(coalesce(
                       substring(CASE WHEN turn ->> 'role' = 'user' THEN turn ->> 'content' END from %(user)s::text),
                       turn ->> 'content'), {RESULT_CHARACTERS})
               ) ORDER BY number)
               FROM jsonb_array_elements(c.turns) WITH ORDINALITY AS turns (turn, number)
               WHERE turn ->> 'role' = 'tool' OR turn ->> 'role' = 'user' AND turn ->> 'content' ~ %(user)s::text
           ) AS results
    FROM rollouts r
    JOIN model_calls c ON c.run_id = r.run_id AND c.rollout_id = r.id AND c.attempt = r.attempt
    LEFT JOIN deliveries d ON d.run_id = c.run_id AND d.request_id = c.request_id
    WHERE r.group_id = ANY(%(groups)s) AND r.state = 'finished' AND c.run_id = ANY(%(runs)s)
    ORDER BY c.rollout_id, c.sequence, c.choice
"""  # noqa: S608  # a constant alone

_SPANS = text(f"""
    SELECT s.rollout_id, s.span_id, s.parent_span_id, s.scope, s.tool, s.status, s.tool_call_id, s.response_id,
           s.start_ns, s.end_ns
    FROM rollouts r
    JOIN spans s ON s.run_id = r.run_id AND s.rollout_id = r.id AND s.attempt = r.attempt
    WHERE r.group_id = ANY(:groups) AND r.state = 'finished' AND s.run_id = ANY(:runs) AND {_TOOL_SPAN}
    ORDER BY s.rollout_id, s.start_ns, s.span_id
""")  # noqa: S608  # constants alone

_REWARDS = text(f"""
    SELECT w.rollout_id, w.value, w.response_id, w.tool_call_id, NULL AS call_id, w.key, false AS is_external
    FROM rollouts r JOIN rewards w ON w.rollout_id = r.id AND w.attempt = r.attempt
    WHERE r.group_id = ANY(:groups) AND r.state = 'finished'
    UNION ALL
    SELECT x.rollout_id, x.value, NULL, NULL, x.call_id, x.key, true
    FROM {_COUNTED_EXTERNAL} WHERE r.group_id = ANY(:groups)
    ORDER BY rollout_id, key
""")  # noqa: S608  # constants alone

# clock_timestamp orders the groups of one transaction, too, as a moving average over them needs.
_VERDICTS = text("""
    INSERT INTO group_credits (group_id, run_id, verdict, reason, credit_version, counted_siblings, has_variance,
                               min_policy_version, reward_mean, reward_std, averages, calls, created_at)
    VALUES (:group_id, :run_id, :verdict, :reason, :credit_version, :counted_siblings, :has_variance,
            :min_policy_version, :reward_mean, :reward_std, :averages, :calls, clock_timestamp())
""").bindparams(*(bindparam(name, type_=JSONB(none_as_null=True)) for name in ("averages", "calls")))

_AVERAGES = text("""
    SELECT averages FROM group_credits WHERE run_id = :run AND averages IS NOT NULL ORDER BY created_at DESC LIMIT 1
""")

_CREDIT_TYPES = ["text", "text", "text", "text", "int4", "text", "jsonb", "float8", "float8", "float8", "float8"]
_SAMPLE_TYPES = ["text", "text", "text", "text", "int4", "text", "int4", "int4", *["bytea"] * 6, "int4", "jsonb"]


async def claim_groups(session: Session, count: int, *, recent: bool = False) -> list[str]:
    """Ids of complete training groups without credit, oldest first, of runs that are not over.

    Until the session ends no other worker claims them. The session locks no row, so that nobody waits for the worker.

    Args: recent: only groups completed lately, at a cost that does not grow with the run
    """
    return list(await session.scalars(_CLAIM_RECENT if recent else _CLAIM_ALL, {"count": count}))


async def pending_groups(session: ReadSession, ids: Sequence[str]) -> list[PendingGroup]:
    """Those of the groups that have no credit yet, oldest first."""
    return [PendingGroup(*row) for row in await session.execute(_PENDING, {"groups": list(ids)})]


async def group_sizes(session: ReadSession, ids: Sequence[str], most: int) -> dict[str, GroupSize]:
    """The sizes of what `load_siblings` would read. Args: most: spans of a rollout above this are not counted."""
    rows = await session.execute(_SIZES, {"groups": list(ids), "most": most})
    return {group: GroupSize(int(records), int(tokens)) for group, records, tokens in rows}


async def lock_pending(session: Session, ids: Sequence[str]) -> dict[str, int]:
    """Locks those of the groups that still have no credit, and returns how many external rewards each has.

    A group that somebody has locked is left out.
    """
    locked = list(await session.scalars(_LOCK, {"groups": list(ids)}))
    return {row.id: row.given for row in await session.execute(_STILL_PENDING, {"groups": locked})}


async def load_siblings(session: ReadSession, groups: Sequence[PendingGroup]) -> SiblingRows:
    """The input of credit; it has no excluded or cancelled rollouts."""
    names = {"groups": [group.id for group in groups], "runs": sorted({group.run_id for group in groups})}
    return SiblingRows(
        rollouts=(await session.execute(_ROLLOUTS, names)).all(),
        calls=await binary_rows(session, _CALLS, {**names, "user": _USERS_RESULT}),
        spans=(await session.execute(_SPANS, names)).all(),
        rewards=(await session.execute(_REWARDS, names)).all(),
    )


async def moving_averages(session: Session, run_id: str) -> dict[str, float]:
    """The run's moving averages after the last group that was credited, by role, or under the empty name for all calls;
    empty before the first.

    Until the session ends no other transaction credits a group of a run that asks for this.
    """
    await session.execute(text("SELECT pg_advisory_xact_lock(hashtextextended('credit:' || :run, 0))"), {"run": run_id})
    return await read_averages(session, run_id)


async def read_averages(session: ReadSession, run_id: str) -> dict[str, float]:
    """The same without the lock."""
    return await session.scalar(_AVERAGES, {"run": run_id}) or {}


async def write_credit(
    session: Session,
    groups: Sequence[NewGroupCredit],
    credits_: Sequence[NewCallCredit],
    samples: Sequence[NewSample],
) -> None:
    """Writes verdicts, credits and samples. Idempotency key: group and run; the store refuses a second verdict.

    Raises: Refused: a group was credited before; nothing of this is written
    """
    if not groups:
        return
    await session.execute(_VERDICTS, [{**group._asdict(), "verdict": str(group.verdict)} for group in groups])
    columns = [name.rstrip("_") for name in NewCallCredit._fields]
    rows = [one._replace(tools=Jsonb(one.tools)) for one in credits_]  # type: ignore[arg-type]  # as psycopg sends it
    await copy_rows(session, "credits", columns, rows, types=_CREDIT_TYPES)
    new = [one._replace(calls=one.calls and Jsonb(one.calls)) for one in samples]  # type: ignore[arg-type]  # the same
    await copy_rows(session, "samples", NewSample._fields, new, types=_SAMPLE_TYPES)
