"""The loop: claim complete groups, read, compute, write everything in one transaction, wake the trainer.

Several workers are safe: a worker claims the groups that it computes. A worker that dies leaves its groups to the next
one. No row is locked while a worker reads and computes, and a group that is too large to compute is excluded. Credit
does not wait for late spans: a rollout ends after its agent's process, and the collector answered that process's
exporter after the commit.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Counts
from collections.abc import Mapping
from typing import Any, NamedTuple

from prometheus_client import Counter, Histogram

from leyden.libs.contracts.call_counts import CallCounts, total
from leyden.libs.contracts.config import BrokenDocument, RunConfig, Sft
from leyden.libs.faults import fault_point
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import Checks
from leyden.libs.store.database import Database, ReadSession, Session, StoreAway
from leyden.libs.store.datasets import tasks_of_groups
from leyden.libs.store.demonstrations import claim_supervised, find_demonstrations
from leyden.libs.store.records.agent_names import learn_names
from leyden.libs.store.runs.facts import run_configs
from leyden.libs.store.samples import (
    GroupSize,
    PendingGroup,
    SiblingRows,
    claim_groups,
    group_sizes,
    load_siblings,
    lock_pending,
    moving_averages,
    pending_groups,
    read_averages,
    write_credit,
)
from leyden.libs.store.schema import check_schema
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, logger
from leyden.services.credit.demonstrations import demonstrate
from leyden.services.credit.group import Credited, Excluded, credit_group
from leyden.services.credit.hints import has_hints, only_hinted
from leyden.services.credit.rows import credit_rows, rollouts_by_group, sample_rows, verdict_row, verdict_rows
from leyden.services.credit.settings import Settings

GROUPS = Counter("credit_groups_total", "Groups that got a verdict.", ["verdict", "has_variance"])
SAMPLES = Counter("credit_samples_total", "Samples written.")
CALLS = Counter(
    "credit_calls_total", "Model calls of credited groups: all, malformed, empty, cut or overflows.", ["kind"]
)
UNTRAINABLE = Counter("credit_untrainable_calls_total", "Model calls of credited groups that do not train.", ["reason"])
TOOL_CALLS = Counter("credit_tool_calls_total", "Tool calls of credited groups by status.", ["status"])
BATCH_SECONDS = Histogram(
    "credit_batch_seconds", "Loading, computing and writing the groups of one transaction.", buckets=SECONDS_BUCKETS
)

GROUPS_PER_TRANSACTION = 8
IDLE_ANSWERS = 4
"""The longest answers of Postgres for which a claim may stand still."""
RETRY_SECONDS = 1.0
ALL_SECONDS = 30.0
"""Seconds between polls for groups that were not credited soon after their completion."""

log = logger()
limited_log = RateLimitedLogger(log)

Result = Credited | Excluded


class GroupLimits(NamedTuple):
    """The largest group that is credited; see `Settings`."""

    records: int
    tokens: int

    def exceeded(self, size: GroupSize | None) -> str | None:
        """The reason why a group is excluded; None for one that is small enough."""
        if size is not None and size.records > self.records:
            return f"it has more than {self.records} model calls, tool spans and rewards (CREDIT_MAX_GROUP_RECORDS)"
        if size is not None and size.tokens > self.tokens:
            return f"the prompts of its calls have more than {self.tokens} tokens (CREDIT_MAX_GROUP_TOKENS)"
        return None


DEFAULT_LIMITS = GroupLimits(50_000, 2**27)


class _Found(NamedTuple):
    """Claimed groups with their records; `refused`: reasons of those that are too large, or whose run's document does
    not parse; `tasks`: those of the groups whose run's teachers have hints."""

    groups: list[PendingGroup]
    refused: dict[str, str]
    rows: SiblingRows
    averages: dict[str, dict[str, float]]
    tasks: Mapping[str, Mapping[str, Any]]


async def work(settings: Settings, stop: asyncio.Event, checks: Checks) -> None:
    """Credits groups until the event is set; it finishes the running batch first."""
    database = Database(
        settings.database_url,
        "leyden-credit",
        pool_size=settings.database_pool_size,
        answer_seconds=settings.database_answer_seconds,
        # A worker that stands still inside a transaction holds its claims, and other workers wait for it. One that
        # lives leaves the claim's transaction alone for the few statements of its reads and writes.
        idle_seconds=IDLE_ANSWERS * settings.database_answer_seconds,
    )
    notifications = Notifications(settings.redis_url)
    checks.add("database", database.ping)
    checks.add("schema", lambda: check_schema(database))
    # Polls see recent groups; one at the start and one every ALL_SECONDS find the groups that a worker left behind.
    all_at = 0.0
    try:
        while not stop.is_set():
            recent = time.monotonic() < all_at
            credited = await _batch(database, notifications, settings, recent=recent)
            if credited:
                continue
            if credited is None:
                all_at = 0.0
            elif not recent:
                all_at = time.monotonic() + ALL_SECONDS
            await _wait(notifications, stop, settings.poll_seconds)
    finally:
        await notifications.close()
        await database.close()


async def credit_pending(
    database: Database, count: int, *, recent: bool = False, limits: GroupLimits = DEFAULT_LIMITS
) -> list[str]:
    """Credits at most `count` complete groups; their ids. A group whose rewards changed meanwhile is left for later.

    Args: recent: see `claim_groups`
    """
    began = time.perf_counter()
    async with database.session() as claim:
        claimed = await claim_groups(claim, count, recent=recent)
        if not claimed:
            return []
        async with database.read() as session:
            found = await _read(session, claimed, limits)
        # Numpy and byte comparisons run in a thread: the loop answers health checks meanwhile.
        results = await database.in_thread(claim, _results, found)
        fault_point("credit.computed")
        async with database.session() as session:
            results = await _unchanged(session, found, results)
            await _write(session, results)
            fault_point("credit.written")
        BATCH_SECONDS.observe(time.perf_counter() - began)
        for group, result in results:
            _log_result(group, result)
    return [group.id for group, _ in results]


async def demonstrate_pending(database: Database) -> int:
    """Writes the demonstrations of one run of supervised fine-tuning that has none yet; the number of their groups.

    Idempotency key: group and run. One transaction writes all demonstrations of a run.
    """
    async with database.session() as session:
        run = await claim_supervised(session)
        if run is None or not isinstance(run.config.algorithm, Sft):
            return 0
        async with database.read() as reading:
            groups = await find_demonstrations(reading, run.config.algorithm, run.dataset_id)
            sources = await run_configs(reading, {group.run_id for group in groups})
        for start in range(0, len(groups), GROUPS_PER_TRANSACTION):
            some = groups[start : start + GROUPS_PER_TRANSACTION]
            async with database.read() as reading:
                rows = await load_siblings(reading, [PendingGroup(group.id, group.run_id, {}) for group in some])
            verdicts, samples = await database.in_thread(session, demonstrate, run, some, rows, sources)
            await write_credit(session, verdicts, [], samples)
    log.info("demonstrations selected", run_id=run.id, groups=len(groups))
    return len(groups)


async def _read(session: ReadSession, claimed: list[str], limits: GroupLimits) -> _Found:
    groups = await pending_groups(session, claimed)
    sizes = await group_sizes(session, [group.id for group in groups], limits.records)
    refused = {}
    for group in groups:
        config = RunConfig.read(group.config)
        reason = str(config) if isinstance(config, BrokenDocument) else limits.exceeded(sizes.get(group.id))
        if reason is not None:
            refused[group.id] = reason
    small = [group for group in groups if group.id not in refused]
    hinted = [group.id for group in small if has_hints(RunConfig.stored(group.config))]
    tasks = await tasks_of_groups(session, hinted) if hinted else {}
    return _Found(groups, refused, await load_siblings(session, small), await _moving_averages(session, small), tasks)


def _results(found: _Found) -> list[tuple[PendingGroup, Result]]:
    small = [group for group in found.groups if group.id not in found.refused]
    computed = {group.id: result for group, result in compute(small, found.rows, found.averages)}
    for group in small:
        if group.id in found.tasks:
            config, task = RunConfig.stored(group.config), found.tasks[group.id]
            computed[group.id] = only_hinted(computed[group.id], config, task)
    computed |= {group: Excluded(reason, []) for group, reason in found.refused.items()}
    return [(group, computed[group.id]) for group in found.groups]


async def _unchanged(
    session: Session, found: _Found, results: list[tuple[PendingGroup, Result]]
) -> list[tuple[PendingGroup, Result]]:
    """Locks the groups and returns the results of those without credit, for which no reward came meanwhile."""
    given = await lock_pending(session, [group.id for group in found.groups])
    moved = {run_id for run_id, before in found.averages.items() if await moving_averages(session, run_id) != before}
    groups = {row.id: row.group_id for row in found.rows.rollouts}
    seen = Counts(groups[row.rollout_id] for row in found.rows.rewards if row.is_external)
    unchanged = []
    for group, result in results:
        is_same = group.id in found.refused or seen[group.id] == given.get(group.id)
        if group.run_id not in moved and group.id in given and is_same:
            unchanged.append((group, result))
        elif group.run_id in found.averages:
            # The averages of the run's later groups hold this one: they are computed again after it.
            moved.add(group.run_id)
    return unchanged


async def _moving_averages(session: ReadSession, groups: list[PendingGroup]) -> dict[str, dict[str, float]]:
    """The averages before these groups, by run and role, of the runs with baseline `ema`."""
    configs = {group.run_id: RunConfig.stored(group.config) for group in groups}
    # Sorted: transactions that lock several runs do so in one order.
    averaged = sorted(run_id for run_id, config in configs.items() if config.credit.baseline.type == "ema")
    return {run_id: await read_averages(session, run_id) for run_id in averaged}


def compute(
    groups: list[PendingGroup], rows: SiblingRows, averages: Mapping[str, Mapping[str, float]] | None = None
) -> list[tuple[PendingGroup, Result]]:
    """The result of each group.

    A group with broken records is excluded with the reason, so that it does not block others.

    Args: averages: see `_moving_averages`; a group moves its run's for those after it
    """
    configs = {group.run_id: RunConfig.stored(group.config) for group in groups}
    before = dict(averages or {})
    results = []
    for group in groups:
        config = configs[group.run_id]
        own = rows.of({row.id for row in rows.rollouts if row.group_id == group.id})
        result = _computed(group, config, own, before.get(group.run_id, {}))
        if isinstance(result, Credited) and result.averages is not None:
            before[group.run_id] = result.averages
        results.append((group, result))
    return results


def _computed(group: PendingGroup, config: RunConfig, rows: SiblingRows, averages: Mapping[str, float]) -> Result:
    try:
        policies = {role.name: role.policy for role in config.roles}
        rollouts = rollouts_by_group(rows, policies).get(group.id, [])
        return credit_group(
            rollouts,
            config.credit,
            min_siblings=config.sampling.min_siblings,
            averages=averages,
            bounds_failures=config.sampling.failure_reward is None,
        )
    # One group must not stop the others: it is logged, counted, and its task sampled again.
    except Exception as error:
        log.exception("credit not computed", group_id=group.id)
        return Excluded(f"credit could not be computed: {type(error).__name__}: {error}", [])


async def _write(session: Session, results: list[tuple[PendingGroup, Result]]) -> None:
    await write_credit(
        session,
        [row for group, result in results for row in verdict_rows(group, result)],
        [row for group, result in results for row in credit_rows(group, result)],
        [row for group, result in results for row in sample_rows(group, result)],
    )
    by_name = [group for group, _ in results if _has_roles_by_name(RunConfig.read(group.config))]
    if by_name:
        await learn_names(session, [group.id for group in by_name], {group.run_id for group in by_name})


def _has_roles_by_name(config: RunConfig | BrokenDocument) -> bool:
    return isinstance(config, RunConfig) and any(role.agent_name for role in config.roles)


async def _batch(database: Database, notifications: Notifications, settings: Settings, *, recent: bool) -> int | None:
    """The number of credited groups; None after an error, which is logged and followed by a pause."""
    try:
        limits = GroupLimits(settings.max_group_records, settings.max_group_tokens)
        credited = await credit_pending(database, GROUPS_PER_TRANSACTION, recent=recent, limits=limits)
        demonstrated = await demonstrate_pending(database)
    except StoreAway as error:
        limited_log.warning("store away", cause=str(error))
        await asyncio.sleep(RETRY_SECONDS)
        return None
    # The loop must live: what was not committed is computed again.
    except Exception:
        log.exception("groups not credited")
        await asyncio.sleep(RETRY_SECONDS)
        return None
    if credited or demonstrated:
        fault_point("credit.committed")
        await notifications.notify(Topic.SAMPLES)
    return len(credited) + demonstrated


async def _wait(notifications: Notifications, stop: asyncio.Event, seconds: float) -> None:
    woken = asyncio.create_task(notifications.wait(Topic.GROUPS, timeout_seconds=seconds))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({woken, stopped}, return_when=asyncio.FIRST_COMPLETED)
    for task in (woken, stopped):
        task.cancel()
    await asyncio.gather(woken, stopped, return_exceptions=True)


def _count_calls(counts: CallCounts) -> None:
    for kind in ("malformed", "empty", "cut", "overflows"):
        CALLS.labels(kind).inc(getattr(counts, kind))
    CALLS.labels("all").inc(counts.calls)
    for reason, count in counts.untrainable.items():
        UNTRAINABLE.labels(reason).inc(count)
    for statuses in counts.tools.values():
        for status, count in statuses.items():
            TOOL_CALLS.labels(status).inc(count)


def _log_result(group: PendingGroup, result: Result) -> None:
    row = verdict_row(group, result)
    samples = sum(map(len, result.samples.values())) if isinstance(result, Credited) else 0
    GROUPS.labels(str(row.verdict), str(row.has_variance).lower()).inc()
    SAMPLES.inc(samples)
    if isinstance(result, Credited):
        _count_calls(total(result.counts.values()))
    log.info(
        "group credited",
        group_id=group.id,
        run_id=group.run_id,
        verdict=str(row.verdict),
        reason=row.reason,
        siblings=row.counted_siblings,
        has_variance=row.has_variance,
        reward_mean=row.reward_mean,
        samples=samples,
    )
