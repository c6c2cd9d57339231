"""Hints of a teacher: their place in a row, the teacher's numbers, and a policy that learns without its hint."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from pydantic import ValidationError
from transformers import AutoTokenizer

from leyden.libs.contracts.config import Distillation, Lora, Optimizer, RunConfig
from leyden.services.trainer.loss.distillation import teacher_advantages
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.model.lora import adapter_parameters, add_adapters
from leyden.services.trainer.rows.batch import Hint, Sample, trained_tokens, with_advantages, with_hint
from leyden.services.trainer.state.hints import HintWriter
from leyden.services.trainer.step.gradients import batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import BasePolicy, Learner, Reference
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.support.builders import run_document
from tests.unit.trainer.cases import agent_samples, sample, tiny_llama
from tests.unit.trainer.test_distillation import drawn

CPU = Accelerator(cpu=True)
OWN = {"hint": "The answer is {task.answer}."}
LLAMA_2 = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
WITHOUT_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
)
# As Gemma's, which puts a system message into the user's turn and drops one that has none after it.
FOLDS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
)
NO_MESSAGE = "{{ raise_exception('two messages, please') }}"


def config(distillation: dict[str, Any] | None) -> RunConfig:
    document = {
        "algorithm": {"type": "importance_sampling", "distillation": distillation},
        "training": {"micro_batch_tokens": 64},
        "optimizer": {"learning_rate": 1e-2},
    }
    return RunConfig.model_validate(run_document(**document))


def learner() -> Learner:
    policy = Policy(tiny_llama(dtype=torch.float32))
    return Learner(policy, make_optimizer(policy, Optimizer()), CPU)


def hinted(samples: Sequence[Sample], *, at: int = 0) -> list[Sample]:
    """Each group has a hint of its own, of another length."""
    hints = {one.group_id: Hint(np.arange(3 + 4 * int(one.group_id[-1]), dtype=np.int32), at) for one in samples}
    return [replace(one, hint=hints[one.group_id]) for one in samples]


def by_hand(policy: Policy, samples: Sequence[Sample]) -> np.ndarray:
    """One plain forward pass of the model for each row behind its hint."""
    found = []
    for one in samples:
        hint = [] if one.hint is None else one.hint.token_ids.tolist()
        at = 0 if one.hint is None else one.hint.at
        ids = [*one.token_ids[:at], *hint, *one.token_ids[at:]]
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([ids])).logits[0]
        for place in np.flatnonzero(one.mask):
            logprobs = (logits[len(hint) + place - 1] / float(one.temperatures[place])).log_softmax(-1)
            found.append(logprobs[one.token_ids[place]].item())
    return np.array(found)


def of_trees(policy: Policy, samples: Sequence[Sample]) -> np.ndarray:
    tokens = trained_tokens(samples)
    return batch_logprobs(policy, plan_batch(samples, tokens, 64), len(tokens), CPU)


@pytest.mark.parametrize("at", [0, 1])
def test_advantages_with_a_hint_are_those_of_plain_passes_in_float64(at: int) -> None:
    policy, samples = Policy(tiny_llama()), hinted(agent_samples(3), at=at)
    own_K, teacher_K = of_trees(policy, samples), of_trees(policy, [with_hint(one) for one in samples])
    plain_K = by_hand(policy, [replace(one, hint=None) for one in samples])
    found_K = teacher_advantages(Distillation(**OWN), np.zeros(len(own_K)), own_K, teacher_K)
    np.testing.assert_allclose(found_K, by_hand(policy, samples) - plain_K, rtol=0, atol=1e-9)
    assert np.abs(found_K).min() > 0


def test_a_hint_stands_in_the_teachers_row_alone() -> None:
    row = replace(sample("run.0.0", [7, 8, 9, 10], [0, 0, 1, 1]), hint=Hint(np.array([1, 2], np.int32), at=1))
    read = with_hint(row)
    assert (read.token_ids.tolist(), read.mask.tolist()) == ([7, 1, 2, 8, 9, 10], [False] * 4 + [True] * 2)
    assert (row.token_ids.tolist(), row.mask.tolist()) == ([7, 8, 9, 10], [False, False, True, True])
    assert trained_tokens([read]).token_ids_K.tolist() == trained_tokens([row]).token_ids_K.tolist()
    assert with_hint(replace(row, hint=None)).token_ids.tolist() == [7, 8, 9, 10]


@pytest.mark.parametrize("weights", ["start", "newest"])
def test_a_step_with_hints_is_the_step_with_their_advantages(weights: str) -> None:
    taught, other, samples = learner(), learner(), hinted(agent_samples(3))
    teacher = taught.policy if weights == "newest" else Policy(tiny_llama(1, dtype=torch.float32))
    judged_K = of_trees(teacher, [with_hint(one) for one in samples]) - of_trees(other.policy, samples)
    taught.teacher = Reference(teacher)
    metrics = optimizer_step(taught, samples, config({**OWN, "weights": weights}))
    optimizer_step(other, with_advantages(samples, judged_K), config(None))
    assert metrics["kl_teacher"] == pytest.approx(-judged_K.mean(), rel=1e-6)
    pairs = zip(taught.policy.parameters(), other.policy.parameters(), strict=True)
    assert all(torch.allclose(one, two, atol=1e-6) for one, two in pairs)


def test_adapters_do_not_teach_from_the_start() -> None:
    policy = Policy(tiny_llama())
    add_adapters(policy.model, Lora(rank=2), [], Path("base"))
    samples = hinted(agent_samples(1))
    read = [with_hint(one) for one in samples]
    before_K = of_trees(policy, read)
    for parameter in adapter_parameters(policy.model).values():
        torch.nn.init.normal_(parameter)
    with Reference(BasePolicy(policy)).weights() as teacher:
        np.testing.assert_allclose(of_trees(teacher, read), before_K, atol=1e-9)
    assert np.abs(of_trees(policy, read) - before_K).max() > 1e-3


def test_a_policy_moves_to_itself_with_a_hint() -> None:
    """The exact reverse KL of the first token, without the hint for the policy and with it for its first weights, falls
    below a quarter in 40 steps."""
    subject, hint = learner(), Hint(np.array([5, 17, 3], np.int32))
    teacher = copy.deepcopy(subject.policy)
    subject.teacher = Reference(teacher)

    def distance() -> float:
        with torch.no_grad():
            own = subject.policy.model(input_ids=torch.tensor([[0]])).logits[0, -1].log_softmax(-1)
            other = teacher.model(input_ids=torch.tensor([[5, 17, 3, 0]])).logits[0, -1].log_softmax(-1)
        return float((own.exp() * (own - other)).sum())

    random, began = torch.Generator().manual_seed(0), distance()
    for _ in range(40):
        rows = [replace(one, hint=hint) for one in drawn(subject.policy, 32, 2, random)]
        optimizer_step(subject, rows, config(OWN))
    assert distance() < began / 4


def model_folder(tiny_model: Path, folder: Path, template: str, bos: str | None = None) -> Path:
    shutil.copytree(tiny_model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template, tokenizer.bos_token = template, bos
    tokenizer.save_pretrained(folder)
    return folder


def placed(folder: Path, row: str) -> str:
    """The text that the teacher reads for a row."""
    writer, tokenizer = HintWriter(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(row, add_special_tokens=False)["input_ids"]
    one = sample("run.0.0", ids, [0] * len(ids))
    read = with_hint(replace(one, hint=writer.placed(writer.hint("It is 4."), one)))
    text: str = tokenizer.decode(read.token_ids, skip_special_tokens=False)
    return text


def test_a_hint_is_the_first_message(tiny_model: Path) -> None:
    row = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert placed(tiny_model, row) == f"<|im_start|>system\nIt is 4.<|im_end|>\n{row}"


@pytest.mark.parametrize(
    ("template", "bos", "message", "row"),
    [
        # One token begins every text, and stays first.
        (LLAMA_2, "<|endoftext|>", "[system] It is 4.\n", "[user] 2+2?\n"),
        # The same token begins every message, as with SmolLM2.
        (None, "<|im_start|>", "<|im_start|>system\nIt is 4.<|im_end|>\n", "<|im_start|>user\n2+2?<|im_end|>\n"),
        (WITHOUT_SYSTEM, None, "<|im_start|>user\nIt is 4.<|im_end|>\n", "<|im_start|>user\n2+2?<|im_end|>\n"),
        (FOLDS_SYSTEM, None, "<|im_start|>user\nIt is 4.<|im_end|>\n", "<|im_start|>user\n2+2?<|im_end|>\n"),
    ],
)
def test_a_hint_goes_through_templates_of_all_kinds(
    tiny_model: Path, tmp_path: Path, template: str | None, bos: str | None, message: str, row: str
) -> None:
    own = AutoTokenizer.from_pretrained(tiny_model).chat_template
    folder = model_folder(tiny_model, tmp_path / "model", template or own, bos)
    begin = "<|endoftext|>" if bos == "<|endoftext|>" else ""
    assert placed(folder, begin + row) == begin + message + row


def test_a_template_that_renders_no_message_is_refused_with_a_remedy(tiny_model: Path, tmp_path: Path) -> None:
    folder = model_folder(tiny_model, tmp_path / "model", NO_MESSAGE)
    with pytest.raises(ValueError, match="renders neither a system message nor a user's on its own: name a model"):
        HintWriter(folder).hint("It is 4.")


@pytest.mark.parametrize(
    ("distillation", "words"),
    [
        ({"weights": "newest", "model": "/models/large", "hint": "Hm."}, "weights 'newest' are those of the run's own"),
        ({"hint": ""}, "at least 1 character"),
        ({"weights": "newest"}, "or hint alone for the run's own model"),
    ],
)
def test_documents_that_mean_no_teacher_are_refused(distillation: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        config(distillation)


@pytest.mark.parametrize("other", [{"model": "/models/large"}, {"run": "run-1", "version": 3}])
def test_any_teacher_may_have_a_hint(other: dict[str, Any]) -> None:
    named = config({**other, **OWN}).algorithm.distillation
    assert named is not None
    assert (named.is_own, named.hint_for({"answer": 4})) == (False, "The answer is 4.")
