"""Windows of a call's tokens, with the mask and the advantages of the row that trains them."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from math import isnan
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Row, select, text

from leyden.libs.contracts.api.call_tokens import CallToken, CallTokens
from leyden.libs.contracts.config import BrokenDocument, RunConfig
from leyden.libs.contracts.states import ConsumptionVerdict, RolloutState
from leyden.libs.store import tables
from leyden.libs.store.database import ReadSession
from leyden.libs.store.policies import OWN, PolicyKey, policies_of
from leyden.libs.store.read.views import UnknownCall, UnknownRollout
from leyden.libs.store.records.chains import MissingParent, full_calls

TOKEN_BYTES = 4
OF_TRAINED = ("advantage", "trainer_logprob", "trainer_entropy")
"""Fields that a token has where it trains."""

# A call is trained in one row of its rollout, at the same place as in its own tokens: its prompt, then its answer. Runs
# that carry further policies have rows of their own.
_ROW = text("""
    SELECT s.id, s.run_id, step_samples.step,
        substr(s.mask, CAST(:begin AS int) + 1, CAST(:count AS int)) AS mask,
        substr(s.advantages, 4 * CAST(:begin AS int) + 1, 4 * CAST(:count AS int)) AS advantages,
        substr(step_samples.trainer_logprobs, trained.first, trained.bytes) AS trainer_logprobs,
        substr(step_samples.trainer_entropies, trained.first, trained.bytes) AS trainer_entropies
    FROM model_calls c JOIN runs ON runs.id = c.run_id OR runs.lead_run_id = c.run_id
    JOIN samples s ON s.run_id = runs.id AND s.group_id = :group_id AND s.rollout_id = c.rollout_id
    LEFT JOIN step_samples ON step_samples.run_id = s.run_id AND step_samples.sample_id = s.id
    CROSS JOIN LATERAL (
        SELECT 4 * CAST(bit_count(substr(s.mask, 1, CAST(:begin AS int))) AS int) + 1 AS first,
            4 * CAST(bit_count(substr(s.mask, CAST(:begin AS int) + 1, CAST(:count AS int))) AS int) AS bytes
    ) trained
    WHERE c.run_id = :run_id AND c.id = :call_id AND c.completion_tokens > 0
        AND substr(s.token_ids, 4 * c.shared_tokens + 1, octet_length(c.prompt_ids)) = c.prompt_ids
        AND substr(s.token_ids, 4 * c.prompt_tokens + 1, 4 * c.completion_tokens) = c.sampled_ids
        AND position('\\x01'::bytea IN substr(s.mask, c.prompt_tokens + 1, c.completion_tokens)) > 0
    ORDER BY s.branch LIMIT 1
""")

Number = TypeVar("Number", int, float)


class Trained(NamedTuple):
    """The part of a row for the loss that lies in a window."""

    begin: int
    mask: bytes
    advantages: Sequence[float]
    logprobs: Sequence[float | None]
    entropies: Sequence[float | None]

    def of(self, position: int) -> dict[str, float | None]:
        """The numbers of a token, by their fields."""
        columns = (self.advantages, self.logprobs, self.entropies)
        return {name: column[position - self.begin] for name, column in zip(OF_TRAINED, columns, strict=True)}


async def read_call_tokens(
    session: ReadSession, rollout_id: str, call_id: str, *, start: int | None, limit: int
) -> tuple[CallTokens, list[Path]]:
    """A window of the tokens of a call without their texts, and the folders where their tokenizer may be.

    Args: start: position of the first one, from the beginning of the prompt; None: the first sampled one
    Raises: UnknownRollout; UnknownCall
    """
    rollout = await session.get(tables.Rollout, rollout_id)
    if rollout is None:
        raise UnknownRollout(rollout_id)
    call = await session.get(tables.ModelCall, (rollout.run_id, call_id))
    if call is None or call.rollout_id != rollout_id:
        raise UnknownCall(f"rollout {rollout_id} has no model call {call_id!r}: list its calls")
    whole = call.prompt_tokens + call.completion_tokens
    begin = call.prompt_tokens if start is None else min(start, whole)
    window = range(begin, min(begin + limit, whole))
    prompt, missing = await _prompt(session, call, window)
    row = await _row(session, rollout, call, window)
    policy = await _policy(session, call)
    reason = None if row else await _reason(session, rollout, call, policy)
    if isinstance(policy, BrokenDocument):
        policy = None
    found = CallTokens(
        call_id=call.id,
        prompt_tokens=call.prompt_tokens,
        completion_tokens=call.completion_tokens,
        start=begin,
        tokens=[*prompt, *_sampled(call, window, row and _trained(row, window), is_known=reason is not None)],
        reason=reason or (None if row else "credit has not computed its group yet"),
        step=row.step if row else None,
        missing_parent=missing,
    )
    return found, await _folders(session, policy)


async def _prompt(session: ReadSession, call: tables.ModelCall, window: range) -> tuple[list[CallToken], str | None]:
    places = range(window.start, min(window.stop, call.prompt_tokens))
    if not places:
        return [], None
    [full] = await full_calls(session, [call])
    if isinstance(full, MissingParent):
        return [], str(full)
    ids = _numbers(full.prompt_ids, "i", places)
    nothing: dict[str, Any] = dict.fromkeys(("text", "logprob", "policy_version", "advantage"))
    shown = zip(places, ids, strict=True)
    return [CallToken(position=place, id=one, sampled=False, trains=False, **nothing) for place, one in shown], None


def _sampled(call: tables.ModelCall, window: range, trained: Trained | None, *, is_known: bool) -> Iterable[CallToken]:
    places = range(max(0, window.start - call.prompt_tokens), window.stop - call.prompt_tokens)
    columns = ((call.sampled_ids, "i"), (call.generator_logprobs, "f"), (call.policy_versions, "i"))
    for place, *values in zip(places, *(_numbers(array, kind, places) for array, kind in columns), strict=True):
        position = call.prompt_tokens + place
        trains = (False if is_known else None) if trained is None else bool(trained.mask[position - trained.begin])
        yield CallToken(
            position=position,
            id=int(values[0]),
            text=None,
            sampled=True,
            logprob=values[1],
            policy_version=int(values[2]),
            trains=trains,
            **(trained.of(position) if trained and trains else dict.fromkeys(OF_TRAINED)),
        )


def _numbers(array: bytes, kind: str, places: range) -> list[Any]:
    """The numbers at some places of an array of four bytes each."""
    part = array[TOKEN_BYTES * places.start : TOKEN_BYTES * places.stop]
    return list(struct.unpack(f"<{len(part) // TOKEN_BYTES}{kind}", part))


async def _row(session: ReadSession, rollout: tables.Rollout, call: tables.ModelCall, window: range) -> Row[Any] | None:
    scope = {"run_id": call.run_id, "call_id": call.id, "group_id": rollout.group_id}
    return (await session.execute(_ROW, {**scope, "begin": window.start, "count": len(window)})).one_or_none()


def _trained(row: Row[Any], window: range) -> Trained:
    advantages = _numbers(row.advantages, "f", range(len(window)))
    return Trained(
        window.start, row.mask, advantages, _of_step(row, row.trainer_logprobs), _of_step(row, row.trainer_entropies)
    )


def _of_step(row: Row[Any], array: bytes | None) -> list[float | None]:
    """A column of the step, which has trained tokens alone, at the places of the window."""
    numbers = iter(_numbers(array or b"", "f", range(len(row.mask))))
    aligned = [next(numbers, None) if trains else None for trains in row.mask]
    return [None if one is None or isnan(one) else one for one in aligned]


async def _policy(session: ReadSession, call: tables.ModelCall) -> PolicyKey | BrokenDocument | None:
    """The policy that answered a call; None for a provider's model."""
    run = await session.get_one(tables.Run, call.run_id)
    config = RunConfig.read(run.config)
    if isinstance(config, BrokenDocument):
        return config
    name = next((one.policy for one in config.roles if one.name == call.role), None) or OWN
    policies = (await policies_of(session, [run.id]))[run.id]
    return next((one for one in policies if one.name == name), None)


async def _reason(
    session: ReadSession, rollout: tables.Rollout, call: tables.ModelCall, policy: PolicyKey | BrokenDocument | None
) -> str | None:
    """Why a call without a row for the loss does not train; None while credit has not decided."""
    group = await session.get_one(tables.Group, rollout.group_id)
    if not call.trainable:
        return call.untrainable_reason or "a trainer cannot reproduce it"
    if group.evaluation_id is not None:
        return "its rollout belongs to an evaluation"
    if rollout.greedy:
        return "its rollout is greedy: the baseline of its siblings"
    if rollout.rerolls_of is not None:
        return f"its rollout is a re-roll: a sample of what {rollout.rerolls_of} was worth at one of its calls"
    if rollout.state in (RolloutState.EXCLUDED, RolloutState.CANCELLED):
        return f"its rollout was {rollout.state}" + (f": {rollout.reason}" if rollout.reason else "")
    if rollout.attempt is not None and call.attempt != rollout.attempt:
        return f"its attempt does not count: attempt {rollout.attempt} does"
    if policy is None:
        return "a provider's model answered it"
    if isinstance(policy, BrokenDocument):
        return str(policy)
    if not (policy.trains or policy.is_own):
        return f"its policy {policy.name!r} does not train"
    credit = await session.get(tables.GroupCredit, (rollout.group_id, policy.id))
    consumed = await session.get(tables.StepGroup, (rollout.group_id, policy.id))
    if credit is None:
        return None
    if credit.verdict == "excluded":
        return f"its group is excluded: {credit.reason}"
    # A trained group trains other calls.
    if consumed is None or consumed.verdict == ConsumptionVerdict.TRAINED:
        return "credit made no row of it: its agent did not use the answer, or it trains nothing"
    return f"the verdict on its group: {consumed.verdict}"


async def _folders(session: ReadSession, policy: PolicyKey | None) -> list[Path]:
    """Folders with weights of a policy, the newest first."""
    if policy is None:
        return []
    versions = select(tables.PolicyVersion.path).where(tables.PolicyVersion.run_id == policy.id)
    return [Path(path) for path in await session.scalars(versions.order_by(tables.PolicyVersion.version.desc()))]
