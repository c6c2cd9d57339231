"""TRL's `GRPOTrainer` on the flight task, with its own `rollout_func`; prints its version and each step as JSON.

It runs in an environment of its own and imports the agent's world, not Leyden. An episode is the plain agent's: the
same messages, limits and grade. The results of tools are masked, as TRL's own loop of tools does it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "flight_agent"))

from episode import MAX_TOKENS, TEMPERATURE, TOOL_CALLS, use_tool
from grade import Transcript, verdict
from prompt import opening
from world import Task, World


@dataclass
class Episode:
    """One conversation in tokens. `completion` begins after the opening; `mask` is 1 for what the model sampled."""

    task: Task
    prompt: list[int]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    answer: str | None = None
    over: bool = False

    def __post_init__(self) -> None:
        self.world = World(self.task)

    def take(self, reply: str) -> str | None:
        """Does what a reply asks for; returns the next message, or None where the conversation is over."""
        if self.world.found:
            self.answer, self.over = reply, True
            return None
        name, result = use_tool(self.world, reply)
        self.tools.append(name)
        self.over = len(self.tools) == TOOL_CALLS and not self.world.found
        return None if self.over else result

    def reward(self) -> float:
        """Returns 1 where the final answer names the carrier, as the agent's own grader has it."""
        graded = verdict(Transcript(tuple(self.tools), self.answer, 0), self.task.carrier)
        return float(json.loads(graded)["reward"])


class Rollouts:
    """Plays a batch of episodes, one turn of all at a time."""

    def __init__(self, tokenizer: Any, tasks: list[Task]) -> None:
        self.tokenizer, self.tasks = tokenizer, tasks
        (self.end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Returns what `rollout_func` returns, and the reward of each rollout."""
        episodes = [self.begin(self.tasks[int(number)]) for number in prompts]
        while running := [one for one in episodes if not one.over]:
            self.turn(trainer, running)
        return {
            "prompt_ids": [one.prompt for one in episodes],
            "completion_ids": [one.completion for one in episodes],
            "logprobs": None,
            "env_mask": [one.mask for one in episodes],
            "earned": [one.reward() for one in episodes],
        }

    def begin(self, task: Task) -> Episode:
        """Returns the episode of a task before its first reply."""
        text = self.tokenizer.apply_chat_template(opening(task.question), tokenize=False, add_generation_prompt=True)
        return Episode(task, self.tokenizer.encode(text, add_special_tokens=False))

    def turn(self, trainer: GRPOTrainer, episodes: list[Episode]) -> None:
        """Samples a reply of each episode and adds what follows it."""
        rows = [one.prompt + one.completion for one in episodes]
        width = max(map(len, rows))
        ids = torch.tensor([[self.end] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        model = trainer.accelerator.unwrap_model(trainer.model)
        model.eval()
        with torch.no_grad():
            sampled = model.generate(
                input_ids=ids, attention_mask=mask, do_sample=True, temperature=TEMPERATURE, top_k=0, top_p=1.0,
                max_new_tokens=MAX_TOKENS, eos_token_id=self.end, pad_token_id=self.end,
            )  # fmt: skip
        model.train()
        for one, row in zip(episodes, sampled[:, width:].tolist(), strict=True):
            self.add(one, row[: row.index(self.end) + 1] if self.end in row else row)

    def add(self, episode: Episode, reply: list[int]) -> None:
        """Appends a sampled reply, and the next message with the start of the reply to it."""
        episode.completion += reply
        episode.mask += [1] * len(reply)
        message = episode.take(self.tokenizer.decode(reply, skip_special_tokens=True))
        if message is not None:
            closing = "" if reply[-1] == self.end else "<|im_end|>"
            text = f"{closing}\n<|im_start|>user\n{message}<|im_end|>\n<|im_start|>assistant\n"
            following = self.tokenizer.encode(text, add_special_tokens=False)
            episode.completion += following
            episode.mask += [0] * len(following)


class Progress(TrainerCallback):
    """Prints each step's mean reward and stops at the goal."""

    def __init__(self, goal: float) -> None:
        self.goal, self.began = goal, time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Starts the clock."""
        self.began = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Prints a step, as soon as its weights have changed."""
        if logs and "reward" in logs:
            seconds = round(time.monotonic() - self.began, 1)
            print(json.dumps({"step": state.global_step, "reward": logs["reward"], "seconds": seconds}), flush=True)
            control.should_training_stop = logs["reward"] >= self.goal


def main() -> None:
    """Trains until a step's rollouts reach the goal or the steps end."""
    parser = argparse.ArgumentParser(prog="trl_flight", description=__doc__)
    parser.add_argument("--model", required=True, help="folder of SmolLM2-135M-Instruct")
    parser.add_argument("--tasks", type=Path, required=True, help="train.jsonl of the flight agent's tasks.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--goal", type=float, default=0.6, help="the share of a step's rollouts that succeed")
    parser.add_argument("--groups", type=int, default=6)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--out", required=True, help="folder for what TRL writes")
    given = parser.parse_args()
    tasks = [Task.from_row(json.loads(line)) for line in given.tasks.read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    config = GRPOConfig(
        output_dir=given.out, report_to=[], use_cpu=True, bf16=False, seed=given.seed, save_strategy="no",
        logging_steps=1, disable_tqdm=True, max_steps=given.steps, num_generations=given.siblings,
        per_device_train_batch_size=given.siblings, gradient_accumulation_steps=given.groups,
        temperature=TEMPERATURE, top_k=0, max_completion_length=512, beta=0.0, scale_rewards="none",
        learning_rate=given.learning_rate, lr_scheduler_type="constant", weight_decay=0.0, gradient_checkpointing=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32),
        reward_funcs=lambda earned, **_: earned,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [str(number) for number in range(len(tasks))]}),
        processing_class=tokenizer,
        rollout_func=Rollouts(tokenizer, tasks),
        callbacks=[Progress(given.goal)],
    )
    print(json.dumps({"version": trl.__version__}), flush=True)
    trainer.train()


if __name__ == "__main__":
    main()
