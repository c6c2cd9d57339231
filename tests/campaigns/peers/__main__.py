"""The command `make bench-peers`: seconds until 60 % of a step's rollouts succeed, by Leyden and by TRL in turns."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from leyden.libs.cli.commands.demo import DemoOptions
from leyden.libs.cli.local.platform import Platform, platform_options
from leyden.libs.cli.settings import Settings
from leyden.libs.client import Client
from leyden.libs.contracts.api.runs import Run, Step
from tests.campaigns.experiments.choices import Air, Choices
from tests.campaigns.experiments.flight import Flight
from tests.campaigns.experiments.runs import report
from tests.campaigns.peers.trained import Trained, table

PAGE = Path(__file__).parents[3] / "docs" / "experiments" / "peers.md"
READY_SECONDS = 600.0
LONGEST_SECONDS = 7200.0
ENDED = ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Race:
    """The size of all trainings.

    Args: goal: the share of a step's rollouts that succeed; steps: where a training without success ends
    """

    goal: float
    steps: int
    home: Path
    trl_python: Path
    agent_python: str

    def tasks(self, seed: int) -> Path:
        """Returns the file of a seed's tasks; every trainer reads the same one."""
        return self.home / "tasks" / f"flight-{seed}" / "train.jsonl"


def main() -> None:
    """Prints the table, and the figures as the last line; `--page` stores the page."""
    parser = argparse.ArgumentParser(prog="peers", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12, help="where a training that does not reach the goal ends")
    parser.add_argument("--goal", type=float, default=0.6, help="the share of a step's rollouts that succeed")
    parser.add_argument("--home", type=Path, required=True, help="folder of the platform and of tasks")
    parser.add_argument("--trl-python", type=Path, required=True, help="interpreter with trl and datasets")
    parser.add_argument("--python", default="{python}", help="interpreter with the agent's packages")
    parser.add_argument("--page", action="store_true", help="write docs/experiments/peers.md")
    given = parser.parse_args()
    race = Race(given.goal, given.steps, given.home.absolute(), given.trl_python.absolute(), given.python)
    (race.home / "tasks").mkdir(parents=True, exist_ok=True)
    trained = [one for seed in range(given.seeds) for one in in_turns(race, seed)]
    written = page(trained, race, f"make bench-peers SEEDS={given.seeds}")
    if given.page:
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(written)
    sys.stdout.write(f"{written}\n{json.dumps([asdict(one) for one in trained])}\n")


def in_turns(race: Race, seed: int) -> Iterator[Trained]:
    """Yields the trainings of one seed, one after another, nothing else of ours beside them."""
    airs: tuple[Air, ...] = ("sparse", "dense")
    for air in airs:
        with platform(race, seed) as (client, model):
            yield by_leyden(client, race, seed, air)
    yield by_trl(race, seed, model)


@contextmanager
def platform(race: Race, seed: int) -> Iterator[tuple[Client, Path]]:
    """Holds a platform that is ready, and its model. The start is not measured, as little as TRL's imports are."""
    usual = platform_options(Settings(), free_ports=True)
    with Flight().platform(race.home / "tasks", [seed], Choices(), usual) as options:
        started = Platform(race.home, options, report=report)
        started.start()
        try:
            started.ready(READY_SECONDS)
            with Client(started.facts.url("api"), started.token, patience_seconds=120) as client:
                yield client, started.facts.model_path
        finally:
            started.stop()


def by_leyden(client: Client, race: Race, seed: int, air: Air) -> Trained:
    """Trains the demo's run, without evaluations, until a step is at the goal."""
    client.upload_dataset(f"flight-{seed}", race.tasks(seed))
    choices = Choices(steps=race.steps, python=race.agent_python, air=air)
    document = Flight().document(seed, choices).model_copy(update={"evaluation": None, "name": f"peers-{seed}-{air}"})
    run = client.create_run(document)
    report(f"leyden, {air} rewards, seed {seed}: {run.id}")
    steps = at_the_end(client, run, race.goal)
    if client.run(run.id).phase not in ENDED:
        client.cancel_run(run.id)
    return Trained(
        f"Leyden, {'with AIR' if air == 'dense' else 'the outcome alone'}",
        seed,
        tuple(step.reward_mean or 0.0 for step in steps),
        tuple((step.created_at - run.created_at).total_seconds() for step in steps),
    )


def at_the_end(client: Client, run: Run, goal: float) -> list[Step]:
    """Returns the steps, when one is at the goal or the run has ended.

    Raises: TimeoutError: neither in two hours
    """
    deadline = time.monotonic() + LONGEST_SECONDS
    shown = 0
    while time.monotonic() < deadline:
        ended = client.run(run.id).phase in ENDED
        steps = list(client.steps(run.id))
        for step in steps[shown:]:
            seconds = (step.created_at - run.created_at).total_seconds()
            report(f"step {step.number}: {step.reward_mean} after {seconds:.0f} s")
        shown = len(steps)
        if ended or any((step.reward_mean or 0.0) >= goal for step in steps):
            return steps
        # The questions share the cores with the training: steps have their own times, so that once a second is enough.
        time.sleep(1.0)
    raise TimeoutError(f"run {run.id} is neither at {goal:.0%} nor ended after {LONGEST_SECONDS:.0f} s")


def by_trl(race: Race, seed: int, model: Path) -> Trained:
    """Trains the same tasks from the same model by TRL in a process of its own.

    Raises: CalledProcessError: it failed; its output has said why
    """
    demo = DemoOptions()
    with tempfile.TemporaryDirectory() as out:
        command = [
            str(race.trl_python), str(Path(__file__).parent / "trl_flight.py"), "--out", out,
            "--model", str(model),
            "--tasks", str(race.tasks(seed)), "--seed", str(seed), "--steps", str(race.steps), "--goal", str(race.goal),
            "--groups", str(demo.groups_per_step), "--siblings", str(demo.group_size),
            "--learning-rate", str(demo.learning_rate),
        ]  # fmt: skip
        report(f"trl, seed {seed}")
        lines = list(printed(command))
    (version,) = [json.loads(line)["version"] for line in lines if line.startswith('{"version"')]
    steps = [json.loads(line) for line in lines if line.startswith('{"step"')]
    return Trained(
        f"TRL {version}, `GRPOTrainer`",
        seed,
        tuple(float(step["reward"]) for step in steps),
        tuple(float(step["seconds"]) for step in steps),
    )


def printed(command: list[str]) -> Iterator[str]:
    """Yields the lines that a command prints, and reports each.

    Raises: CalledProcessError: it failed; its output has said why
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        too_long = threading.Timer(LONGEST_SECONDS, process.kill)
        too_long.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                report(line.rstrip())
                yield line
        finally:
            too_long.cancel()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def page(trained: list[Trained], race: Race, command: str) -> str:
    """Returns the page as Markdown."""
    demo = DemoOptions()
    return "\n".join(
        [
            "# The flight task by other trainers",
            "",
            f"`{command}` trained the [flight agent](../../examples/flight_agent/README.md) and wrote this page: one"
            " after another on the same machine, with the same model, tasks and reward, float32,"
            f" {demo.groups_per_step} × {demo.group_size} rollouts a step, learning rate {demo.learning_rate:g}.",
            "",
            *table(trained, race.goal),
            "",
            "Seconds begin for Leyden with the creation of the run, whose trainer has still to start, and for TRL with"
            " `train()`. A step ends when its weights have changed. TRL plays the episodes inside its process, a turn"
            " of all rollouts at a time, by `rollout_func` and `generate`; Leyden starts a process for each rollout."
            " TRL trains each rollout as a padded row; Leyden trains the prompt that siblings share"
            " [once](../adr/0008-training-on-trees.md). How much of the difference comes of which, nobody has"
            " measured.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
