"""`make soak-grades KILLS=100 SEED=1`: kills between grade and credit, at seeded random moments.

A bandit that prints no reward is graded by a built-in grader, a scripted judge and a scripted person, in every second
run also by a judge that compares. Meanwhile the grader, credit and the API get SIGKILL, at any moment and at their
named points, or are paused for longer than their leases last. After each run every question of `tests.invariants` is
asked, and each rollout's reward is computed again from what its agent printed and what the person was told is taken:
none lost, doubled, or trained as 0. The policy is made again from the samples, bit for bit, so that the trainer used
these numbers. The last line is one JSON object. Exit status 1 when any promise was broken; the home then stays.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg

from leyden.libs.cli.local import managed_service
from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from leyden.libs.faults import FaultInjector
from tests.campaigns.soak import QUICK, RUN_SECONDS, Found, bandit_run, disturb, run_campaign, small_platform
from tests.fakes.judge import Said, compared, judge_beside, ranked, scored
from tests.support.chaos import Chaos, RunWatch
from tests.support.person import LIKED, OTHER, Person

VICTIMS = ("grader", "credit", "api")
LEASE_SECONDS = 2.0
GROUP = 8
_JUDGE = {"provider": "judge", "model": "m", "rubric": "Task {task.number}: an odd answer is better."}
_RIGHT = {"name": "right", "weight": 0.25, "grader": {"type": "regex", "pattern": '"odd"'}}
_HELPFUL = {"name": "helpful", "weight": 0.25, "grader": {"type": "score_model", **_JUDGE, "range": [1, 5]}}
_THUMBS = {"name": "thumbs", "weight": 0.5, "from": "feedback"}
_BETTER = {"name": "better", "weight": 0.125, "grader": {"type": "relative_model", **_JUDGE}}


def judged(body: dict[str, Any], number: int) -> Said:
    """A slow judge that wants odd answers, and is busy now and then."""
    if number % 13 == 7:
        return Said(status=429, headers={"retry-after": "1"})
    seconds = 0.1 * (number % 5)
    schema = body["response_format"]["json_schema"]["schema"]
    if "scores" in schema["properties"]:
        said = ranked({name: float('"odd"' in text) for name, text in compared(body).items()})
    else:
        said = scored(5 if '"odd"' in body["messages"][1]["content"] else 1)
    return Said(said.content, seconds=seconds)


@dataclass
class FoundInGrades(Found):
    """Findings about every run so far, rewards included."""

    rollouts: int = 0
    rewards_lost: int = 0
    rewards_wrong: int = 0
    ratings: int = 0

    def examine_rewards(
        self, platform: Platform, run_id: str, given: Mapping[str, float], *, with_better: bool
    ) -> None:
        """Compares each rollout's stored reward with the one that its sources make."""
        with psycopg.connect(platform.facts.database_url) as connection:
            rows = connection.execute(
                "SELECT r.id, r.group_id, r.reward, o.stdout_tail, ("
                "    SELECT count(*) FROM feedback f WHERE f.rollout_id = r.id), ("
                "    SELECT count(*) FROM rollout_rewards w WHERE w.rollout_id = r.id)"
                " FROM rollouts r LEFT JOIN outcomes o ON o.rollout_id = r.id AND o.attempt = r.attempt"
                " WHERE r.run_id = %s AND r.state <> 'cancelled'",
                [run_id],
            ).fetchall()
        odd = {rollout: '"odd"' in (printed or "") for rollout, _, _, printed, _, _ in rows}
        by_group: dict[str, set[bool]] = {}
        for rollout, group, *_ in rows:
            by_group.setdefault(group, set()).add(odd[rollout])
        components = 4 if with_better else 3
        self.rollouts += len(rows)
        self.ratings += len(given)
        for rollout, group, reward, _, ratings, stored in rows:
            is_odd = odd[rollout]
            expected = 0.5 * is_odd + 0.5 * (LIKED if is_odd else OTHER)
            expected += with_better * 0.125 * (0.5 if len(by_group[group]) == 1 else is_odd)
            if reward is None or (ratings, stored) != (1, components) or rollout not in given:
                self.rewards_lost += 1
                self.words.append(f"{rollout}: reward {reward}, {ratings} ratings, {stored} components")
            elif abs(reward - expected) > 1e-9:
                self.rewards_wrong += 1
                self.words.append(f"{rollout}: reward {reward}, its sources make {expected}")


@dataclass
class Campaign:
    """One platform under fire, and what was found of its runs."""

    platform: Platform
    client: Client
    log: Path
    dice: random.Random
    chaos: Chaos
    found: FoundInGrades = field(default_factory=FoundInGrades)

    def run(self, kills: int, steps: int) -> bool:
        """Trains once while processes are killed until so many were in all; returns whether the run ended."""
        with_better = self.found.runs % 2 == 1
        components = [_RIGHT, _HELPFUL, _THUMBS, *([_BETTER] if with_better else [])]
        reward = {"components": components, "wait": {"seconds": 600.0}}
        document = bandit_run(self.log, f"graded-{self.found.runs}", steps, reward=reward, **QUICK)
        document["sampling"] |= {"group_size": GROUP}
        document["agent"]["environment"]["BANDIT_SILENT"] = "1"
        run = self.client.create_run(document)
        watch, person = RunWatch(self.platform, run.id), Person(self.client, run.id)
        with person.at_work():
            disturb(self.chaos, watch, run.id, self.dice, kills, most_rollouts=4)
            has_ended = watch.wait_for_end(RUN_SECONDS)
        self.found.examine(self.platform, self.client, run.id, self.log)
        self.found.examine_rewards(self.platform, run.id, person.given, with_better=with_better)
        return has_ended


def soak_grades(folder: Path, kills: int, seed: int, steps: int) -> tuple[FoundInGrades, dict[str, Any]]:
    """Runs, one after another, until so many processes were killed: what the store says of them, and what was done."""
    dice, log, began = random.Random(seed), folder / "received.log", time.monotonic()
    log.touch()
    injector = FaultInjector(folder / "faults")
    with ExitStack() as stack:
        judge = stack.enter_context(judge_beside())
        judge.answer = judged
        stack.enter_context(patch.object(managed_service, "MAX_BACKOFF_SECONDS", 0.5))
        variables = {
            **injector.environment,
            "GRADER_LEASE_SECONDS": str(LEASE_SECONDS),
            "GRADER_PROVIDERS": json.dumps({"judge": {"url": judge.url}}),
        }
        platform = stack.enter_context(small_platform(folder, **variables))
        client = stack.enter_context(Client(platform.facts.url("api"), platform.token, patience_seconds=120))
        client.upload_dataset("bandit", [{"number": number} for number in range(16)])
        chaos = Chaos(platform, dice, injector, 1.5 * LEASE_SECONDS, VICTIMS)
        campaign = Campaign(platform, client, log, dice, chaos)
        while chaos.kills.total() < kills:
            has_ended = campaign.run(kills, steps)
            print(f"{campaign.found}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            if not has_ended:
                break
    return campaign.found, {
        "seed": seed,
        "kills": chaos.kills.total(),
        "pauses": chaos.pauses,
        "judge_calls": len(judge.bodies),
        "seconds": round(time.monotonic() - began),
        "kills_by_victim": dict(sorted(chaos.kills.items())),
    }


def main() -> int:
    """Exit status 1 when a reward was lost or wrong, a promise broken, or a run did not complete."""
    return run_campaign(soak_grades, __doc__)


if __name__ == "__main__":
    sys.exit(main())
