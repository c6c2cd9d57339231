"""Makes the flight agent's tasks: a training and a held-out set that share no (origin, destination, carrier).

Run `python tasks.py --out tasks/` to write `train.jsonl` and `heldout.jsonl`.
"""

import argparse
import json
import random
from dataclasses import asdict
from itertools import product
from pathlib import Path

from world import Task

PLACES = (
    "Paris", "Lyon", "Rome", "Madrid", "Berlin", "Vienna", "Lisbon", "Oslo", "Dublin", "Prague",
    "Athens", "London", "Milan", "Munich", "Geneva", "Warsaw", "Zurich", "Brussels", "Hamburg", "Naples",
)  # fmt: skip
CARRIERS = (
    "Delta", "United", "Iberia", "Qatar", "Emirates", "Aegean", "Norwegian", "Finnair", "Swissair", "KLM",
    "Ryanair", "Eurostar", "Condor", "SAS", "Austrian", "Virgin", "Sabena", "Icelandair", "Thalys", "TAP",
)  # fmt: skip
QUESTIONS = (
    "My flight just got cancelled. How do I get to {place} by tomorrow morning?",
    "My flight was cancelled. How can I still reach {place} tomorrow?",
    "They cancelled my flight. How do I get to {place} now?",
    "I missed my flight. How do I get to {place} by tomorrow?",
)


def make_task(rng: random.Random, origin: str, destination: str, carrier: str) -> Task:
    """Draw the rest of a task: how it is asked, when the connection leaves, what it costs, what can be spent."""
    price = rng.randrange(40, 200, 5)
    return Task(
        question=rng.choice(QUESTIONS).format(place=destination),
        origin=origin,
        destination=destination,
        budget=price + rng.randrange(5, 100, 5),
        carrier=carrier,
        departure=f"{rng.randrange(5, 12)}:{rng.randrange(0, 60, 5):02d}",
        price=price,
    )


def make_tasks(seed: int, train: int, heldout: int) -> tuple[list[Task], list[Task]]:
    """Draw a training and a held-out set.

    Returns: tasks that are all different in (origin, destination, carrier), so that neither set repeats and the two
        share none; the same seed and sizes give the same tasks
    Raises: ValueError: more tasks are asked for than there are triples
    """
    rng = random.Random(seed)
    triples = [triple for triple in product(PLACES, PLACES, CARRIERS) if triple[0] != triple[1]]
    if train + heldout > len(triples):
        raise ValueError(f"there are {len(triples)} different tasks: ask for fewer than {train + heldout}")
    tasks = [make_task(rng, *triple) for triple in rng.sample(triples, train + heldout)]
    return tasks[:train], tasks[train:]


def write_jsonl(path: Path, tasks: list[Task]) -> None:
    path.write_text("".join(json.dumps(asdict(task)) + "\n" for task in tasks))


def main() -> None:
    parser = argparse.ArgumentParser(description="Write train.jsonl and heldout.jsonl for the flight agent.")
    parser.add_argument("--out", type=Path, default=Path("tasks"), help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--train", type=int, default=512, help="number of training tasks")
    parser.add_argument("--heldout", type=int, default=128, help="number of held-out tasks")
    arguments = parser.parse_args()
    train, heldout = make_tasks(arguments.seed, arguments.train, arguments.heldout)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.out / "train.jsonl", train)
    write_jsonl(arguments.out / "heldout.jsonl", heldout)
    print(f"wrote {len(train)} training and {len(heldout)} held-out tasks to {arguments.out}")


if __name__ == "__main__":
    main()
