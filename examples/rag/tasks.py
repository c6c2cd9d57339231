"""Writes training and held-out tasks: questions about the entries, with answers and the searches that lead to them.

    python tasks.py --out tasks --seed 0

Held-out questions are about countries, and cities in them, that no training question is about. Every search is made: a
question whose entries are not found is no task.
"""

import argparse
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

from search import ENTRIES, Index

COUNTRY = re.compile(r"(.+): country in (.+), capital (.+), currency (.+), calling code (.+), domain (.+)\.$")
CITY = re.compile(r"(.+): (?:capital of|city in) (.+), population (.+)\.$")
# A question, the names to search for in turn, and the answer. `city` is a large one that is not the capital.
ONE_HOP = (
    ("What is the capital of {country}?", ("country",), "capital"),
    ("Which currency has {country}?", ("country",), "currency"),
    ("What is the calling code of {country}?", ("country",), "code"),
    ("In which country is {city}?", ("city",), "country"),
    ("How many people live in {city}?", ("city",), "population"),
)
TWO_HOPS = (
    ("What is the capital of the country of {city}?", ("city", "country"), "capital"),
    ("Which currency do people in {city} use?", ("city", "country"), "currency"),
    ("Which internet domain has the country of {city}?", ("city", "country"), "domain"),
    ("How many people live in the capital of {country}?", ("country", "capital"), "capital_population"),
)
HELD_OUT_SHARE = 0.25
TRAINING, HELD_OUT = 24, 8


@dataclass(frozen=True)
class Task:
    """A question; `searches` is for the teacher alone."""

    question: str
    answer: str
    searches: list[str]


def facts() -> list[dict[str, str]]:
    """Return what the entries say of each country and of one city in it, in the order of the entries."""
    countries = [found.groups() for entry in ENTRIES if (found := COUNTRY.match(entry))]
    cities = [found.groups() for entry in ENTRIES if (found := CITY.match(entry))]
    people = {(country, name): population for name, country, population in cities}
    return [
        {
            **{"country": country, "capital": capital, "currency": currency, "code": code, "domain": domain},
            **{"city": name, "population": population, "capital_population": people[country, capital]},
        }
        for country, _, capital, currency, code, domain in countries
        for name, home, population in cities
        if home == country and name != capital and (country, capital) in people
    ]


def is_found(index: Index, searches: list[str]) -> bool:
    """Return whether each search shows the entry with this title."""
    return all(any(line.startswith(f"{name}:") for line in index.search(name)) for name in searches)


def questions(seed: int) -> tuple[list[Task], list[Task]]:
    """Return training and held-out tasks, each in a random order that the seed decides."""
    dice, index, found = random.Random(seed), Index(), facts()
    countries = sorted({fact["country"] for fact in found})
    kept = set(dice.sample(countries, round(HELD_OUT_SHARE * len(countries))))
    training: list[Task] = []
    held_out: list[Task] = []
    for question, names, answer in (*ONE_HOP, *TWO_HOPS):
        dice.shuffle(found)
        tasks = {True: dict[str, Task](), False: dict[str, Task]()}
        for fact in found:
            task = Task(question.format(**fact), fact[answer], [fact[name] for name in names])
            if is_found(index, task.searches):
                tasks[fact["country"] in kept][task.question] = task
        training += [*tasks[False].values()][:TRAINING]
        held_out += [*tasks[True].values()][:HELD_OUT]
    dice.shuffle(training)
    dice.shuffle(held_out)
    return training, held_out


def write(path: Path, tasks: list[Task]) -> None:
    """Write one task a line."""
    path.write_text("".join(json.dumps(vars(task)) + "\n" for task in tasks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    training, held_out = questions(options.seed)
    write(options.out / "train.jsonl", training)
    write(options.out / "heldout.jsonl", held_out)
