"""Writes training and held-out tasks of one level of `reasoning-gym`, with the calculations that solve them.

    python tasks.py --out tasks --seed 0 --level chain_sum

Every question occurs once. A task without calculations (`steps`) is one whose published solution this script cannot
read: it trains and is graded as the others are, and the teacher does not know it.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import reasoning_gym
from equations import equations
from reasoning_gym.arithmetic.leg_counting import ANIMALS

LEVELS: dict[str, dict[str, int]] = {
    "chain_sum": {"max_terms": 4, "max_digits": 3},
    "leg_counting": {"max_animals": 4},
    "gsm_symbolic": {},
}
"""The levels, from easy to hard, with their settings in reasoning-gym."""
SEED_STRIDE = 1_000_000


def tasks(level: str, seed: int, count: int) -> list[dict[str, Any]]:
    """Return so many tasks with different questions; the seed decides them."""
    found: dict[str, dict[str, Any]] = {}
    # Item i of reasoning-gym is that of seed + i: seeds lie so far apart that theirs differ. Short sums repeat.
    for item in reasoning_gym.create_dataset(level, size=2 * count, seed=seed * SEED_STRIDE, **LEVELS[level]):
        question = " ".join(item["question"].split())
        found[question] = {"question": question, "answer": item["answer"], "steps": steps(level, item)}
    return list(found.values())[:count]


def steps(level: str, item: dict[str, Any]) -> list[str]:
    """Return the expressions to calculate one after another, of which the last one has the answer."""
    metadata = item["metadata"]
    if level == "chain_sum":
        return [metadata["expression"]]
    if level == "leg_counting":
        return [" + ".join(f"{count} * {ANIMALS[animal]}" for animal, count in metadata["animals"].items())]
    return equations(metadata["answer_cot"], item["answer"])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write one task a line."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--level", choices=list(LEVELS), default="chain_sum")
    parser.add_argument("--train", type=int, default=160)
    parser.add_argument("--held-out", type=int, default=64)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    rows = tasks(options.level, options.seed, options.train + options.held_out)
    write(options.out / "heldout.jsonl", rows[: options.held_out])
    write(options.out / "train.jsonl", rows[options.held_out :])
