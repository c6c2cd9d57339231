"""Rows for tests: each builder writes one noun with sensible values and gives it back; any column may be overridden."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from leyden.libs.contracts import ids
from leyden.libs.contracts.config import RunConfig
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.runs.partitions import create_run_partitions

LOGPROB = -0.5
"""Natural log of the probability that every token of a built call or sample was sampled with."""


def run_document(**changes: object) -> dict[str, Any]:
    """A valid RunConfig as JSON, with top-level fields replaced."""
    document: dict[str, Any] = {
        "name": "test run",
        "dataset": "questions",
        "agent": {"command": ["{python}", "/agents/agent.py"]},
        "sampling": {"group_size": 2, "groups_per_step": 1},
    }
    return {**document, **changes}


async def add_dataset(
    database: Database,
    tasks: Sequence[Mapping[str, object]] = ({"question": "2+2"}, {"question": "2+3"}),
    **columns: Any,
) -> tables.Dataset:
    """A dataset named `questions` and its tasks."""
    rows = [json.dumps(task, sort_keys=True).encode() for task in tasks]
    values = {
        "id": ids.new_id("dataset"),
        "name": "questions",
        "content_sha256": hashlib.sha256(b"\n".join(rows)).hexdigest(),
        "task_count": len(tasks),
    }
    dataset = tables.Dataset(**{**values, **columns})
    async with database.session() as session:
        session.add(dataset)
        await session.flush()
        session.add_all(
            tables.Task(
                dataset_id=dataset.id, number=number, row_sha256=hashlib.sha256(row).digest(), payload=dict(task)
            )
            for number, (task, row) in enumerate(zip(tasks, rows, strict=True))
        )
    return dataset


async def add_run(
    database: Database, *, dataset_id: str | None = None, config: Mapping[str, Any] | None = None, **columns: Any
) -> tables.Run:
    """A run with its partitions and a status in phase `running`; makes a dataset where none is given."""
    if dataset_id is None:
        dataset_id = (await add_dataset(database, name=ids.new_id("questions"))).id
    document = RunConfig.model_validate(config or run_document()).storable()
    values = {"id": ids.new_id("run"), "name": document["name"], "config": document, "dataset_id": dataset_id}
    run = tables.Run(**{**values, **columns})
    async with database.session() as session:
        session.add(run)
        await session.flush()
        session.add(tables.RunStatus(run_id=run.id, phase="running"))
        await create_run_partitions(session, run.id)
    return run


async def end_run(database: Database, run: tables.Run, phase: str = "completed", *, days_ago: float = 0.0) -> None:
    """Moves a running run to an end."""
    async with database.session() as session:
        status = await session.get_one(tables.RunStatus, run.id)
        status.phase, status.finished_at = phase, datetime.now(tz=UTC) - timedelta(days=days_ago)


async def add_group(
    database: Database, run: tables.Run, number: int = 0, *, size: int = 2, greedy: int | None = None, **columns: Any
) -> tuple[tables.Group, list[tables.Rollout]]:
    """A training group of task 0 (or of `evaluation_id=`) and its queued rollouts. Args: greedy: its greedy sibling"""
    owner = columns.get("evaluation_id") or run.id
    values = {
        "id": ids.group_id(owner, number),
        "run_id": run.id,
        "number": number,
        "dataset_id": run.dataset_id,
        "task_number": 0,
        "size": size,
        "admitted_version": 0,
    }
    group = tables.Group(**{**values, **columns})
    rollouts = [
        tables.Rollout(
            id=ids.rollout_id(group.id, sibling),
            run_id=run.id,
            group_id=group.id,
            sibling=sibling,
            greedy=sibling == greedy,
        )
        for sibling in range(size)
    ]
    async with database.session() as session:
        session.add(group)
        await session.flush()
        session.add_all(rollouts)
    return group, rollouts


async def add_attempt(database: Database, rollout: tables.Rollout, number: int = 1, **columns: Any) -> tables.Attempt:
    """A running attempt whose lease lasts a minute."""
    values = {
        "rollout_id": rollout.id,
        "number": number,
        "run_id": rollout.run_id,
        "state": "running",
        "lease_id": ids.new_id("lease", 20),
        "owner": "test",
        "lease_expires_at": datetime.now(tz=UTC) + timedelta(seconds=60),
    }
    attempt = tables.Attempt(**{**values, **columns})
    async with database.session() as session:
        session.add(attempt)
    return attempt


async def end_attempt(database: Database, rollout_id: str, number: int = 1, *, state: str = "expired") -> None:
    """Ends a live attempt as the services do, but sends no notification and writes no outcome."""
    async with database.session() as session:
        row = await session.get_one(tables.Attempt, (rollout_id, number))
        row.state, row.finished_at = state, datetime.now(tz=UTC)


async def add_outcome(
    database: Database, rollout: tables.Rollout, attempt: int = 1, *, reward: float | None = 1.0, **columns: Any
) -> tables.Outcome:
    """Adds an outcome, by default `succeeded`, without a change to its attempt."""
    values = {
        "rollout_id": rollout.id,
        "attempt": attempt,
        "run_id": rollout.run_id,
        "kind": "succeeded",
        "reward": reward,
        "facts": {},
        "exit_code": 0,
        "stdout_tail": "",
        "stderr_tail": "",
    }
    outcome = tables.Outcome(**{**values, **columns})
    async with database.session() as session:
        session.add(outcome)
    return outcome


async def finish_rollout(
    database: Database, rollout: tables.Rollout, *, reward: float | None = 1.0, kind: str = "succeeded", **outcome: Any
) -> None:
    """Attempt 1 settled with an outcome and the rollout finished with it, as runner and controller leave them."""
    await add_attempt(database, rollout)
    await settle_rollout(database, rollout, reward=reward, kind=kind, **outcome)


async def settle_rollout(
    database: Database, rollout: tables.Rollout, *, reward: float | None = 1.0, kind: str = "succeeded", **outcome: Any
) -> None:
    """The same for a rollout whose attempt 1 is running."""
    await end_attempt(database, rollout.id, state="settled")
    await add_outcome(database, rollout, reward=reward, kind=kind, **outcome)
    async with database.session() as session:
        row = await session.get_one(tables.Rollout, rollout.id)
        row.state, row.attempt, row.reward, row.reason = "finished", 1, reward, kind
        row.finished_at = datetime.now(tz=UTC)


async def add_call(
    database: Database,
    rollout: tables.Rollout,
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    *,
    attempt: int = 1,
    policy_version: int = 0,
    logprobs: Sequence[float] | None = None,
    **columns: Any,
) -> tables.ModelCall:
    """A completed model call; calls are ordered as they are added."""
    call_id = ids.new_call_id()
    values = {
        "run_id": rollout.run_id,
        "id": call_id,
        "rollout_id": rollout.id,
        "attempt": attempt,
        "request_id": call_id,
        "choice": 0,
        "sequence": time.time_ns(),
        "status": "completed",
        "trainable": True,
        "request_sha256": hashlib.sha256(call_id.encode()).digest(),
        "request": {"model": "policy"},
        "dialect": "chat_completions",
        "parent_call_id": None,
        "shared_turns": 0,
        "shared_tokens": 0,
        "turns": [{"role": "user", "content": "2+2"}],
        "tools": None if columns.get("parent_call_id") else [],
        "answer": {"role": "assistant", "content": "4"},
        "prompt_ids": np.asarray(prompt, "<i4").tobytes(),
        "sampled_ids": np.asarray(sampled, "<i4").tobytes(),
        "generator_logprobs": np.asarray(logprobs or [LOGPROB] * len(sampled), "<f4").tobytes(),
        "policy_versions": np.full(len(sampled), policy_version, "<i4").tobytes(),
        "prompt_tokens": len(prompt),
        "completion_tokens": len(sampled),
        "cached_tokens": 0,
        "min_policy_version": policy_version,
        "max_policy_version": policy_version,
        "temperature": 1.0,
        "finish_reason": "stop",
        "queued_seconds": 0.0,
        "first_token_seconds": 0.01,
        "total_seconds": 0.02,
    }
    call = tables.ModelCall(**{**values, **columns})
    async with database.session() as session:
        session.add(call)
    return call


async def add_delivery(database: Database, call: tables.ModelCall, *, delivered: bool) -> None:
    """The fate of a call's answer, whose last byte left, or whose client was gone, a second after the request came."""
    row = tables.Delivery(
        run_id=call.run_id,
        request_id=call.request_id,
        rollout_id=call.rollout_id,
        attempt=call.attempt,
        gateway="g",
        sequence=call.sequence,
        request_sha256=call.request_sha256,
        waited_seconds=0.0,
        seconds=1.0,
        delivered=delivered,
    )
    async with database.session() as session:
        session.add(row)


async def add_tool_span(
    database: Database, rollout: tables.Rollout, tool: str, *, attempt: int = 1, status: str = "ok", **columns: Any
) -> tables.Span:
    """A tool span that ended just now."""
    now = time.time_ns()
    values = {
        "run_id": rollout.run_id,
        "rollout_id": rollout.id,
        "attempt": attempt,
        "trace_id": hashlib.md5(rollout.id.encode()).hexdigest(),
        "span_id": f"{now & (2**64 - 1):016x}",
        "name": f"execute_tool {tool}",
        "kind": "tool",
        "tool": tool,
        "status": status,
        "start_ns": now - 1_000_000,
        "end_ns": now,
        "attributes": {},
    }
    span = tables.Span(**{**values, **columns})
    async with database.session() as session:
        session.add(span)
    return span


async def add_credited_group(
    database: Database,
    group: tables.Group,
    *,
    min_policy_version: int | None = 0,
    has_variance: bool = True,
    **columns: Any,
) -> tables.GroupCredit:
    """The verdict of credit on a group; its samples are added by `add_sample`."""
    values = {
        "group_id": group.id,
        "run_id": group.run_id,
        "verdict": "credited",
        "credit_version": 1,
        "counted_siblings": group.size,
        "has_variance": has_variance,
        "min_policy_version": min_policy_version,
        "reward_mean": 0.5,
        "reward_std": 0.5,
    }
    credit = tables.GroupCredit(**{**values, **columns})
    async with database.session() as session:
        session.add(credit)
    return credit


async def add_sample(
    database: Database,
    rollout: tables.Rollout,
    prompt: Sequence[int] = (1, 2, 3),
    sampled: Sequence[int] = (4, 5),
    *,
    branch: int = 0,
    advantage: float = 1.0,
    policy_version: int = 0,
    **columns: Any,
) -> tables.Sample:
    """A sample of one call: the prompt has mask 0, the sampled tokens mask 1 and all the same advantage."""
    mask = np.array([0] * len(prompt) + [1] * len(sampled), np.uint8)
    values = {
        "run_id": rollout.run_id,
        "id": ids.sample_id(rollout.id, branch),
        "group_id": rollout.group_id,
        "rollout_id": rollout.id,
        "branch": branch,
        "length": len(mask),
        "trained_tokens": len(sampled),
        "token_ids": np.asarray([*prompt, *sampled], "<i4").tobytes(),
        "mask": mask.tobytes(),
        "generator_logprobs": np.where(mask, LOGPROB, 0).astype("<f4").tobytes(),
        "advantages": np.where(mask, advantage, 0).astype("<f4").tobytes(),
        "temperatures": np.ones(len(mask), "<f4").tobytes(),
        "policy_versions": np.where(mask, policy_version, -1).astype("<i4").tobytes(),
        "min_policy_version": policy_version,
    }
    sample = tables.Sample(**{**values, **columns})
    async with database.session() as session:
        session.add(sample)
    return sample


async def add_policy_version(database: Database, run: tables.Run, version: int, **columns: Any) -> tables.PolicyVersion:
    """A version whose files need not exist."""
    values = {
        "run_id": run.id,
        "version": version,
        "path": f"/weights/{run.id}/{version}",
        "content_sha256": hashlib.sha256(f"{run.id}:{version}".encode()).hexdigest(),
        "size_bytes": 1,
    }
    row = tables.PolicyVersion(**{**values, **columns})
    async with database.session() as session:
        session.add(row)
    return row
