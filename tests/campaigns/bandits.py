"""`make bandits`: each loss, correction and estimator trains a two-armed bandit through the platform, one by one.

A run stops once two steps in a row earn 0.95 on average (`lora`: 0.65), and fails the command if it has not after 60
steps. The last lines are a table for docs/how-to/algorithms.md; one seed, so that it shows that an algorithm learns,
not how fast.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from leyden.libs.cli.view.watch import watch_run
from leyden.libs.client import Client
from tests.campaigns.soak import bandit_run, small_platform
from tests.invariants import violations

STEPS, TARGET = 60, 0.95
LORA_TARGET = 0.65
"""The frozen head of the tiny model bounds its logits: a loop of peft and transformers alone stays below 0.78, too."""
LOSSES = ("ppo_clip", "gspo", "cispo", "sapo", "dppo_tv", "importance_sampling", "reinforce")
PPO = {"type": "ppo_clip"}
WEIGHTS: dict[str, dict[str, float]] = {
    "tis_token": {},
    "tis_seq": {},
    "icepop": {},
    "seq_mask": {},
    "mis_geo": {"floor": 0.5, "cap": 2.0},
}
BASELINES: dict[str, dict[str, Any]] = {
    "grpo": {"baseline": {"type": "mean_std"}},
    "rloo": {"baseline": {"type": "leave_one_out"}},
    "opo": {"baseline": {"type": "opo"}},
    "gigpo": {"baseline": {"type": "mean", "per": "gigpo"}},
    "reinforce_pp": {"baseline": {"type": "none", "whiten": True}, "rule": {"type": "token_discounted"}},
    "reinforce_pp_baseline": {"baseline": {"type": "mean", "whiten": True}},
}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    **{name: {"algorithm": {"type": name}} for name in LOSSES},
    **{
        name: {
            "algorithm": {
                "type": "ppo_clip",
                "correction": {"type": "decoupled", "weights": name, **bounds},
                "mini_batches": 2,
            }
        }
        for name, bounds in WEIGHTS.items()
    },
    **{name: {"credit": credit} for name, credit in BASELINES.items()},
    "remax": {"credit": {"rule": {"type": "identical"}, "baseline": {"type": "remax"}}},
    "ema": {"credit": {"baseline": {"type": "ema"}}, "sampling": {"min_siblings": 1}},
    "critic": {
        "algorithm": {**PPO, "critic": {"learning_rate": 0.01}},
        "credit": {"baseline": {"type": "value"}},
    },
    "critic_per_call": {
        "algorithm": {**PPO, "critic": {"per": "call", "learning_rate": 0.01}},
        "credit": {"baseline": {"type": "value"}},
    },
    "critic_own": {
        "algorithm": {**PPO, "critic": {"trunk": "own", "learning_rate": 0.01}},
        "credit": {"baseline": {"type": "value"}},
    },
    "temporal": {"credit": {"rule": {"type": "temporal"}}},
    "per_depth": {"credit": {"baseline": {"type": "mean", "per": "depth"}}},
    "per_state": {"credit": {"baseline": {"type": "mean", "per": "state"}}},
    "kl_in_reward": {"algorithm": {**PPO, "kl_coefficient": 0.01, "kl_in": "reward", "kl_estimator": "k1"}},
    "bfloat16_versions": {"training": {"export_dtype": "bfloat16"}},
    "entropy_bonus": {"algorithm": {**PPO, "entropy_coefficient": 0.001}},
    "kl_reference_every": {"algorithm": {**PPO, "kl_coefficient": 0.01, "kl_reference_every": 4}},
    "replay": {"sampling": {"replay": {}}},
    "lora": {"training": {"lora": {"rank": 8}}, "optimizer": {"learning_rate": 0.02}},
}


def train(client: Client, dsn: str, name: str, log: Path) -> tuple[int, float, list[str]]:
    """Steps until the target, mean reward of the last two steps, and what is wrong, if anything."""
    case = CASES[name]
    target = LORA_TARGET if name == "lora" else TARGET
    stopping = {"metric": "train_reward", "target": target, "average_over": 2}
    training = {"steps": STEPS, "early_stopping": stopping, **case.get("training", {})}
    document = bandit_run(log, name, STEPS, **{**case, "training": training})
    run = watch_run(client, client.create_run(document).id, Console(quiet=True))
    rewards = [step.reward_mean or 0.0 for step in client.steps(run.id)][-2:]
    reward = sum(rewards) / max(1, len(rewards))
    wrong = [] if run.phase == "completed" else [f"{run.phase}: {run.reason}"]
    wrong += [] if reward >= target else [f"reward {reward:.2f} after {run.progress.step} steps"]
    wrong += [f"{question}: {rows[:3]}" for question, rows in violations(dsn, run.id).items()]
    return run.progress.step, reward, wrong


def main() -> int:
    """Exit status 1 when an algorithm did not learn, or left something wrong in the store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*CASES, []], help="all by default")
    names = parser.parse_args().names or list(CASES)
    rows, failures = [], []
    with tempfile.TemporaryDirectory(prefix="leyden-bandits-") as folder, small_platform(Path(folder)) as platform:
        log = Path(folder) / "received.log"
        with Client(platform.facts.url("api"), platform.token, patience_seconds=120) as client:
            client.upload_dataset("bandit", [{"number": number} for number in range(16)])
            for name in names:
                began = time.monotonic()
                steps, reward, wrong = train(client, platform.facts.database_url, name, log)
                rows.append(f"| `{name}` | {steps} | {reward:.2f} |")
                failures += [f"{name}: {words}" for words in wrong]
                print(f"{name}: {steps} steps, reward {reward:.2f}, {time.monotonic() - began:.0f} s", flush=True)
    print("\n".join(["| algorithm | steps | reward |", "|---|--:|--:|", *rows, *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
