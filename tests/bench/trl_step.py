"""One step's gradients by TRL's GRPO trainer: its own loss over rollouts, each a row with masked results of tools."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence

import pyarrow
import torch
from accelerate import Accelerator
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from leyden.services.trainer.rows.batch import Sample
from tests.bench.bench_trainer import TEMPERATURE


class Grpo:
    """A `GRPOTrainer` that is given rollouts and samples none.

    Args: first: a rollout; its prompt is as long as every other's
    """

    def __init__(self, model: PreTrainedModel, first: Sample, accelerator: Accelerator) -> None:
        words = Tokenizer(WordLevel({"[PAD]": 0, "[EOS]": 1}, unk_token="[PAD]"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")
        self.prompt_tokens = int(first.mask.argmax())
        on_cpu = accelerator.device.type == "cpu"
        config = GRPOConfig(
            output_dir=tempfile.mkdtemp(), report_to=[], use_cpu=on_cpu, bf16=not on_cpu, loss_type="dapo", beta=0.0,
            temperature=TEMPERATURE, per_device_train_batch_size=2, num_generations=2, gradient_checkpointing=True,
            max_completion_length=len(first.token_ids) - self.prompt_tokens,
        )  # fmt: skip
        data = Dataset(pyarrow.table({"prompt": ["p", "p"]}), fingerprint="none")
        self.trainer = GRPOTrainer(
            model, reward_funcs=lambda **_: [0.0], args=config, train_dataset=data, processing_class=tokenizer
        )
        self.trainer.current_gradient_accumulation_steps = 1
        model.set_attn_implementation("sdpa")
        model.train()

    def __call__(self, samples: Sequence[Sample], accelerator: Accelerator, _pack_tokens: int) -> int:
        """Adds the gradients of all rollouts; returns the tokens that the model computed."""
        trained, device = sum(int(sample.mask.sum()) for sample in samples), accelerator.device
        for sample in samples:
            ids = torch.from_numpy(sample.token_ids).long().to(device)[None]
            mask = torch.from_numpy(sample.mask).long().to(device)[None]
            prompt, answer = ids[:, : self.prompt_tokens], ids[:, self.prompt_tokens :]
            inputs = {
                "prompt_ids": prompt,
                "prompt_mask": torch.ones_like(prompt),
                "completion_ids": answer,
                "completion_mask": torch.ones_like(answer),
                "tool_mask": mask[:, self.prompt_tokens :],
                "advantages": torch.tensor([float(sample.advantages[sample.mask][0])], device=device),
                "num_items_in_batch": torch.tensor(trained, device=device),
            }
            with self.trainer.compute_loss_context_manager():
                loss = self.trainer.compute_loss(self.trainer.model, inputs)
            loss.backward()
        return sum(len(sample.token_ids) for sample in samples)
