"""Training while rollouts go on, against training in turns: the same tasks, samples and steps on one real platform.

The agent pulls, waits two seconds as for a tool, and pulls again. In turns means a policy lag of 0: a step waits for
its rollouts, and rollouts for the step. Every sample's age is looked up in the store afterwards.

Legend: S seeds, T steps, G groups of a step.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psycopg
from numpy.typing import NDArray

from leyden.libs.cli.platform import Platform
from leyden.libs.client import Client
from tests.bench.rows import Goal, Growth, Row
from tests.chaos import RunWatch
from tests.invariants import violations
from tests.shared import open_to_agents
from tests.soak import bandit_run, small_platform

STEPS, LAG = 4, 1
GROUP_SIZE, GROUPS = 8, 2
TOOL_SECONDS = 2.0
RUN_SECONDS = 300.0
GROWTH_GROUPS = (1, 2, 4)
DRAWS = 5000

Rewards = NDArray[np.float64]


def rows(repeats: int) -> list[Row]:
    """Rollouts trained in a second, and the reward that both ways come to."""
    with tempfile.TemporaryDirectory(prefix="bench-async-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        with small_platform(folder) as platform, Client(platform.facts.url("api"), platform.token) as client:
            client.upload_dataset("bandit", [{"number": number} for number in range(16)])
            bench = _Bench(platform, client, folder)
            pairs = [(bench.run(LAG, seed), bench.run(0, seed)) for seed in range(repeats)]
            seconds = {GROUPS: statistics.median(1 / ours.rate for ours, _ in pairs)}
            for groups in set(GROWTH_GROUPS) - {GROUPS}:
                seconds[groups] = 1 / bench.run(LAG, 0, groups).rate
    ours, theirs = zip(*pairs, strict=True)
    return [
        Row(
            part="async",
            name=f"rollouts trained, lag {LAG}, {TOOL_SECONDS:g} s tools",
            unit="rollouts/s",
            repeats=[one.rate for one in ours],
            baseline_name="in turns (lag 0)",
            baseline=[one.rate for one in theirs],
            goal=Goal(at_least=1.6, of="ratio"),
            growth=Growth(
                "rollouts a step",
                "s a rollout",
                [groups * GROUP_SIZE for groups in GROWTH_GROUPS],
                [seconds[groups] for groups in GROWTH_GROUPS],
            ),
            note=f"{STEPS} steps of {GROUPS * GROUP_SIZE} rollouts, from the first step's end to the last one's.",
        ),
        Row(
            part="async",
            name="mean reward over all steps",
            unit="reward",
            repeats=[float(one.rewards_T_G.mean()) for one in ours],
            baseline_name="in turns (lag 0)",
            baseline=[float(one.rewards_T_G.mean()) for one in theirs],
            note=_compare([one.rewards_T_G for one in ours], [one.rewards_T_G for one in theirs]),
        ),
    ]


def _compare(ours: list[Rewards], theirs: list[Rewards]) -> str:
    """Both curves, and the interval of their difference."""
    curves = [", ".join(f"{reward:.2f}" for reward in np.mean(side, axis=(0, 2))) for side in (ours, theirs)]
    low, high = interval_of_difference(np.array(ours), np.array(theirs))
    difference = float(np.mean(ours) - np.mean(theirs))
    return (
        "One value a seed: both ways visit the same tasks in the same order."
        f" Step by step {curves[0]} beside {curves[1]}; difference {difference:+.3f},"
        f" 95 % interval {low:+.3f} to {high:+.3f} (bootstrap over seeds and their groups)."
    )


def interval_of_difference(ours_S_T_G: Rewards, theirs_S_T_G: Rewards) -> tuple[float, float]:
    """The 95 % interval of the difference of two means, ours less theirs.

    Seeds are drawn anew, each with both its runs, and then groups within each step of each run.
    """
    rng = np.random.default_rng(0)
    seeds, steps, groups = ours_S_T_G.shape
    drawn_seeds = rng.integers(seeds, size=(DRAWS, seeds, 1, 1))

    def means(rewards_S_T_G: Rewards) -> Rewards:
        drawn_groups = rng.integers(groups, size=(DRAWS, seeds, steps, groups))
        drawn = rewards_S_T_G[drawn_seeds, np.arange(steps).reshape(-1, 1), drawn_groups]
        found: Rewards = np.mean(drawn, axis=(1, 2, 3))
        return found

    low, high = np.quantile(means(ours_S_T_G) - means(theirs_S_T_G), [0.025, 0.975])
    return float(low), float(high)


@dataclass(frozen=True)
class Trained:
    """What a run came to: rollouts trained per second between the ends of its first and its last step, and rewards.

    Args: rewards_T_G: the mean reward of each group of each step
    """

    rate: float
    rewards_T_G: Rewards


@dataclass(frozen=True)
class _Bench:
    platform: Platform
    client: Client
    folder: Path

    def run(self, lag: int, seed: int, groups: int = GROUPS) -> Trained:
        log = open_to_agents(self.folder / f"{lag}-{seed}-{groups}.log")
        agent = bandit_run(log, "", STEPS)["agent"]
        environment = agent["environment"] | {"BANDIT_TOOL_SECONDS": str(TOOL_SECONDS)}
        sampling = {"group_size": GROUP_SIZE, "groups_per_step": groups, "max_policy_lag": lag, "seed": seed}
        document = bandit_run(
            log,
            f"lag {lag}",
            STEPS,
            agent={"environment": environment},
            sampling=sampling,
            # Four steps are enough to learn by.
            optimizer={"learning_rate": 0.03},
        )
        run = self.client.create_run(document)
        assert RunWatch(self.platform, run.id).wait_for_end(RUN_SECONDS), self.client.run(run.id)
        assert self.client.run(run.id).phase == "completed"
        self._check(run.id, lag, groups)
        return self._trained(run.id, groups)

    def _check(self, run_id: str, lag: int, groups: int) -> None:
        """Every step consumed its groups, and nothing that it saw was older than allowed."""
        dsn = self.platform.facts.database_url
        assert violations(dsn, run_id) == {}
        with psycopg.connect(dsn) as connection:
            ages = connection.execute(
                "SELECT max(t.step - 1 - s.min_policy_version), count(DISTINCT t.step) FROM step_samples t"
                " JOIN samples s ON (s.run_id, s.id) = (t.run_id, t.sample_id) WHERE t.run_id = %s",
                (run_id,),
            ).fetchone()
            judged = connection.execute(
                "SELECT step, count(*) FROM step_groups WHERE run_id = %s AND step IS NOT NULL GROUP BY 1", (run_id,)
            ).fetchall()
        assert ages is not None
        assert ages[0] <= lag, f"a sample of {run_id} is {ages[0]} versions old"
        assert sorted(judged) == [(step, groups) for step in range(1, STEPS + 1)]

    def _trained(self, run_id: str, groups: int) -> Trained:
        with psycopg.connect(self.platform.facts.database_url) as connection:
            (seconds,) = connection.execute(
                "SELECT extract(epoch FROM max(created_at) - min(created_at))::float8 FROM steps WHERE run_id = %s",
                (run_id,),
            ).fetchone() or (0.0,)
            rewards = connection.execute(
                "SELECT avg(r.reward)::float8 FROM step_groups g JOIN rollouts r ON r.group_id = g.group_id"
                " WHERE g.run_id = %s AND g.step IS NOT NULL GROUP BY g.step, g.group_id ORDER BY g.step, g.group_id",
                (run_id,),
            ).fetchall()
        rewards_T_G = np.array(rewards, np.float64).reshape(STEPS, groups)
        return Trained((STEPS - 1) * groups * GROUP_SIZE / seconds, rewards_T_G)
