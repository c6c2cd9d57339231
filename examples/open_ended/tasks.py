"""Writes training and held-out tasks: questions about capitals, each with a good answer.

    python tasks.py --out tasks --seed 0

Both questions about a country are in the same set, so that no held-out answer is trained.
"""

import argparse
import json
import random
from pathlib import Path

CAPITALS = (
    "Argentina Buenos Aires/Australia Canberra/Austria Vienna/Bangladesh Dhaka/Belgium Brussels/Brazil Brasilia"
    "/Bulgaria Sofia/Cambodia Phnom Penh/Canada Ottawa/Chile Santiago/China Beijing/Colombia Bogota/Croatia Zagreb"
    "/Cuba Havana/Denmark Copenhagen/Ecuador Quito/Egypt Cairo/Estonia Tallinn/Ethiopia Addis Ababa/Finland Helsinki"
    "/France Paris/Germany Berlin/Ghana Accra/Greece Athens/Hungary Budapest/Iceland Reykjavik/India New Delhi"
    "/Indonesia Jakarta/Iran Tehran/Iraq Baghdad/Ireland Dublin/Israel Jerusalem/Italy Rome/Japan Tokyo/Jordan Amman"
    "/Kenya Nairobi/Latvia Riga/Lebanon Beirut/Lithuania Vilnius/Malta Valletta/Mongolia Ulaanbaatar/Morocco Rabat"
    "/Nepal Kathmandu/Norway Oslo/Pakistan Islamabad/Peru Lima/Poland Warsaw/Portugal Lisbon/Romania Bucharest"
    "/Russia Moscow/Serbia Belgrade/Slovakia Bratislava/Spain Madrid/Sweden Stockholm/Syria Damascus/Thailand Bangkok"
    "/Turkey Ankara/Ukraine Kyiv/Uruguay Montevideo/Vietnam Hanoi"
)
"""A country of one word and its capital, 60 times."""
HELD_OUT = 20


def pairs():
    """Return countries with their capitals."""
    return [tuple(one.split(" ", 1)) for one in CAPITALS.split("/")]


def about(country, capital):
    """Return the tasks of a country. `key` is what an answer has to name, `reference` a good answer."""
    return [
        {
            "question": f"What is the capital of {country}?",
            "key": capital,
            "reference": f"The capital of {country} is {capital}.",
        },
        {
            "question": f"Which country has the capital {capital}?",
            "key": country,
            "reference": f"{capital} is the capital of {country}.",
        },
    ]


def questions(seed):
    """Return training and held-out tasks, each in a random order that the seed decides."""
    dice, found = random.Random(seed), pairs()
    dice.shuffle(found)
    sets = [[task for pair in part for task in about(*pair)] for part in (found[HELD_OUT:], found[:HELD_OUT])]
    for tasks in sets:
        dice.shuffle(tasks)
    return sets


def write(path, tasks):
    """Write one task a line."""
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    training, held_out = questions(options.seed)
    write(options.out / "train.jsonl", training)
    write(options.out / "heldout.jsonl", held_out)
