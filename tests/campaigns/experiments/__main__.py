"""The command `make experiment`."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from dataclasses import asdict, fields
from pathlib import Path

from leyden.libs.cli.local.platform import Platform, platform_options
from leyden.libs.cli.settings import Settings
from leyden.libs.client import Client
from tests.campaigns.experiments.choices import Choices, Experiment
from tests.campaigns.experiments.coordination import COORDINATION
from tests.campaigns.experiments.disaggregation import Disaggregation
from tests.campaigns.experiments.external import External
from tests.campaigns.experiments.flight import RULES, Flight
from tests.campaigns.experiments.long import CREDITS, Long
from tests.campaigns.experiments.math import MATH
from tests.campaigns.experiments.open_ended import GUARDS, OpenEnded
from tests.campaigns.experiments.page import page
from tests.campaigns.experiments.rag import RAG
from tests.campaigns.experiments.results import MAX_SEEDS, Seed, read_seed
from tests.campaigns.experiments.runs import report
from tests.campaigns.experiments.sql import SQL
from tests.campaigns.experiments.taught import Taught

PAGES = Path(__file__).parents[3] / "docs" / "experiments"
EXPERIMENTS: dict[str, Experiment] = {
    "coordination": COORDINATION,
    "disaggregation": Disaggregation(),
    "external": External(),
    "flight": Flight(),
    "long": Long(),
    "math": MATH,
    "open-ended": OpenEnded(),
    "rag": RAG,
    "sql": SQL,
}
RULES_OF = {"flight": list(RULES), "long": list(CREDITS)}
CREDIT_HELP = "; ".join(f"of {name}: {', '.join(rules)}" for name, rules in RULES_OF.items())
LEVELS_OF = {name: one.levels for name, one in EXPERIMENTS.items() if isinstance(one, Taught) and one.levels}
LEVELS_HELP = "; ".join(f"of {name}: {', '.join(levels)}" for name, levels in LEVELS_OF.items())
GIVEN_BY_MAKE = ("steps", "python")
"""Choices that are variables of the Makefile."""
READY_SECONDS = 600.0


def experiment(one: Experiment, home: Path, seeds: range, choices: Choices) -> list[Seed]:
    """Trains each seed and returns its figures."""
    folder = home / "tasks"
    folder.mkdir(parents=True, exist_ok=True)
    with one.platform(folder, seeds, choices, platform_options(Settings(), free_ports=True)) as options:
        platform = Platform(home, options, report=report)
        platform.start()
        try:
            platform.ready(READY_SECONDS)
            with Client(platform.facts.url("api"), platform.token, patience_seconds=120) as client:
                return [read_seed(client, seed, one.train(client, folder, seed, choices)) for seed in seeds]
        finally:
            platform.stop()


def main() -> None:
    """Prints the page, and the figures as the last line; `--page` stores the page."""
    parser = argparse.ArgumentParser(prog="experiment", description=__doc__)
    parser.add_argument("name", choices=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=1, choices=range(1, MAX_SEEDS + 1), metavar=f"1..{MAX_SEEDS}")
    parser.add_argument("--steps", type=int, default=Choices.steps)
    parser.add_argument("--held-out", type=int, default=Choices.held_out, help="tasks of an evaluation")
    parser.add_argument("--every", type=int, help="steps between evaluations of math, rag and sql")
    parser.add_argument("--warm-steps", type=int, default=Choices.warm_steps, help="steps of the warm start")
    parser.add_argument("--solutions", type=int, default=Choices.solutions, help="tasks that the teacher solves")
    parser.add_argument("--air", choices=["dense", "sparse"], default=Choices.air, help="of flight and math")
    parser.add_argument("--credit", default=Choices.credit, help=CREDIT_HELP)
    parser.add_argument("--level", help=f"of the tasks, the usual one first: {LEVELS_HELP}")
    parser.add_argument("--team", choices=["together", "apart"], default=Choices.team, help="of coordination")
    parser.add_argument("--guard", choices=list(GUARDS), default=Choices.guard, help="of open-ended")
    parser.add_argument("--lag", type=int, default=Choices.lag, choices=range(5), help="of disaggregation")
    parser.add_argument("--client", choices=["notebook", "service"], default=Choices.client, help="of external")
    parser.add_argument("--python", default=Choices.python, help="interpreter with the agent's packages")
    parser.add_argument(
        "--home", type=Path, required=True, help="folder of the platform; the same one finds its runs again"
    )
    parser.add_argument("--page", action="store_true", help="write docs/experiments")
    given = parser.parse_args()
    if given.credit not in (known := RULES_OF.get(given.name, [Choices.credit])):
        parser.error(f"--credit {given.credit}: {given.name} has {', '.join(known)}")
    if given.level is not None and given.level not in (levels := LEVELS_OF.get(given.name, ())):
        parser.error(f"--level {given.level}: {given.name} has {', '.join(levels) or 'none'}")
    choices = Choices(**{one.name: getattr(given, one.name) for one in fields(Choices)})
    one = EXPERIMENTS[given.name]
    seeds = experiment(one, given.home.absolute(), range(given.seeds), choices)
    written = page(one.title(choices), one.purpose, command(given), seeds)
    if given.page:
        PAGES.mkdir(exist_ok=True)
        (PAGES / f"{one.page(choices)}.md").write_text(written)
    sys.stdout.write(f"{written}\n{json.dumps([asdict(seed) for seed in seeds])}\n")


def command(given: argparse.Namespace) -> str:
    """Returns the command of the Makefile with the choices that are not the usual ones."""
    chosen = [
        f"--{name.replace('_', '-')} {getattr(given, name)}"
        for name, usual in asdict(Choices()).items()
        if name not in GIVEN_BY_MAKE and getattr(given, name) != usual
    ]
    arguments = f" ARGS={shlex.quote(' '.join(chosen))}" if chosen else ""
    return f"make experiment NAME={given.name} SEEDS={given.seeds} STEPS={given.steps}{arguments}"


if __name__ == "__main__":
    # The platform and its helpers are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    main()
