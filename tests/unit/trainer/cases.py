"""Small models and samples that the trainer's tests share."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from leyden.libs.contracts.config import Algorithm, RunConfig
from leyden.libs.contracts.samples import RowCall
from leyden.services.trainer.model.experts import router_names
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.load import freeze
from leyden.services.trainer.model.value_model import ValueModel
from leyden.services.trainer.rows.batch import Sample
from leyden.services.trainer.step.batch import Batch, Computed
from leyden.services.trainer.step.gradients import accumulate_gradients
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer

VOCABULARY = 61


def in_full_precision(model: PreTrainedModel) -> PreTrainedModel:
    """Replaces transformers' RMSNorm, which rounds to float32, so that float64 stays float64."""
    for name, module in list(model.named_modules()):
        if isinstance(module, Gemma3RMSNorm):
            model.set_submodule(name, _ShiftedNorm(module))
        elif hasattr(module, "variance_epsilon"):
            exact = nn.RMSNorm(len(module.weight), eps=module.variance_epsilon)
            exact.weight = module.weight
            model.set_submodule(name, exact)
        elif isinstance(module, Qwen3MoeTopKRouter):
            module.__class__ = _ExactRouter
    return model


class _ExactRouter(Qwen3MoeTopKRouter):
    """Qwen3's router, whose softmax rounds to float32."""

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(states.reshape(-1, self.hidden_dim), self.weight)
        shares, chosen = logits.softmax(dim=-1).topk(self.top_k, dim=-1)
        return logits, shares / shares.sum(-1, keepdim=True) if self.norm_topk_prob else shares, chosen


class _ShiftedNorm(nn.Module):
    """Gemma 3's RMSNorm, which multiplies by 1 + weight."""

    def __init__(self, norm: Gemma3RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.eps

    def forward(self, states: Tensor) -> Tensor:
        return nn.functional.rms_norm(states, self.weight.shape, 1 + self.weight, self.eps)


def tiny_llama(
    seed: int = 0, dtype: torch.dtype = torch.float64, tied: bool = True, layers: int = 3
) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )
    return in_full_precision(LlamaForCausalLM(config).to(dtype))


def tiny_qwen(seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
        attn_implementation="sdpa",
    )
    return in_full_precision(Qwen2ForCausalLM(config).to(dtype))


def tiny_experts(seed: int = 0, dtype: torch.dtype = torch.float64, router: str = "frozen") -> PreTrainedModel:
    """A Qwen3-MoE of five experts, two for each token, behind a dense layer."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
        attn_implementation="sdpa",
        experts_implementation="eager",
    )
    model = in_full_precision(Qwen3MoeForCausalLM(config).to(dtype))
    if router == "frozen":
        freeze(model, router_names(model))
    return model


def tiny_gpt_oss(seed: int = 0, dtype: torch.dtype = torch.float64, router: str = "frozen") -> PreTrainedModel:
    """A gpt-oss of five experts, two for each token, with a window in every second layer and gates that clamp."""
    torch.manual_seed(seed)
    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=24,
        num_local_experts=5,
        num_experts_per_tok=2,
        swiglu_limit=1.0,
        sliding_window=6,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        experts_implementation="eager",
    )
    model = in_full_precision(GptOssForCausalLM(config).to(dtype))
    for name, parameter in model.named_parameters():
        # transformers begins with zeros.
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.2)
    if router == "frozen":
        freeze(model, router_names(model))
    return model


def sample(
    name: str,
    token_ids: Sequence[int],
    mask: Sequence[int],
    *,
    advantage: float = 1.0,
    temperature: float = 1.0,
    version: int = 0,
    logprob: float = -2.0,
) -> Sample:
    """`name` is the rollout, `<group>.<sibling>`; a branch may follow after a colon."""
    rollout, _, branch = name.partition(":")
    trained = np.array(mask, dtype=bool)
    return Sample(
        id=f"{rollout}:{branch or 0}",
        rollout_id=rollout,
        group_id=rollout.rpartition(".")[0],
        token_ids=np.array(token_ids, dtype=np.int32),
        mask=trained,
        generator_logprobs=np.where(trained, logprob, 0).astype(np.float32),
        advantages=np.where(trained, advantage, 0).astype(np.float32),
        temperatures=np.where(trained, temperature, 1).astype(np.float32),
        policy_versions=np.where(trained, version, -1).astype(np.int32),
    )


def agent_samples(
    seed: int, *, groups: int = 2, siblings: int = 3, system: int = 7, turns: int = 3, vocabulary: int = VOCABULARY
) -> list[Sample]:
    """Rollouts of an agent: one system prompt, a task per group, turns that siblings sometimes share, a fork."""
    random = np.random.default_rng(seed)

    def some(low: int, high: int) -> list[int]:
        return [int(t) for t in random.integers(0, vocabulary, random.integers(low, high))]

    shared = [int(t) for t in random.integers(0, vocabulary, system)]
    samples = []
    for group in range(groups):
        question, usual = some(2, 6), some(2, 5)
        for sibling in range(siblings):
            ids = shared + question
            mask = [0] * len(ids)
            for turn in range(turns):
                answer = usual if turn == 0 and random.random() < 0.6 else some(1, 5)
                result = some(0, 4)
                ids, mask = ids + answer + result, mask + [1] * len(answer) + [0] * len(result)
            rows = [(ids, mask)]
            if sibling == 0:
                fork = len(shared) + len(question) + 1
                rows.append((ids[:fork] + some(2, 5), [0] * fork))
                rows[1] = (rows[1][0], rows[1][1] + [1] * (len(rows[1][0]) - fork))
            for branch, (row_ids, row_mask) in enumerate(rows):
                samples.append(
                    sample(
                        f"run.{group}.{sibling}:{branch}",
                        row_ids,
                        row_mask,
                        advantage=float(random.normal()),
                        temperature=float(random.choice([0.5, 0.8, 1.0, 1.3])),
                        logprob=float(-2 - random.random()),
                    )
                )
    return samples


def one_call(row: Sample, reward: float, parent: str | None = None, share: float = 1.0) -> Sample:
    """The row with all its trained tokens as one call, for a critic."""
    places = np.flatnonzero(row.mask)
    return replace(row, calls=(RowCall(row.id, parent, reward, share, int(places[0]), int(places[-1])),))


def gradients_of(
    policy: Policy, batch: Batch, algorithm: Algorithm, pack_tokens: int, value_model: ValueModel | None = None
) -> Computed:
    """`accumulate_gradients` of a learner with these models, in packs of `pack_tokens`."""
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}})
    training = config.training.model_copy(update={"micro_batch_tokens": pack_tokens})
    config = config.model_copy(update={"algorithm": algorithm, "training": training})
    optimizer = make_optimizer(policy, config.optimizer, algorithm.critic, value_model)
    learner = Learner(policy, optimizer, Accelerator(cpu=True), value_model=value_model)
    return accumulate_gradients(learner, batch, config)
