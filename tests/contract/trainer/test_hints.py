"""A run's own model teaches it with a hint from each task, through the store and the trainer."""

from __future__ import annotations

import asyncio
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sqlalchemy import text, update
from transformers import AutoTokenizer, PreTrainedModel

from leyden.libs.faults import FaultInjector
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.trainer.model.load import read_model
from tests.contract.trainer.test_kills import train
from tests.contract.trainer.test_steps import Case
from tests.replay import differing_versions
from tests.support import builders
from tests.support.long import long_only

ANSWERS = (4, "five", [6], {"n": 7})
HINT = "a-secret: {task.answer}"
PROMPT = (1, 2, 3)


@pytest.fixture
def case(database: Database, postgres_dsn: str, tiny_model: Path, tmp_path: Path, redis_url: str) -> Case:
    return Case(database, postgres_dsn, tiny_model, tmp_path / "runs", redis_url)


async def opened(case: Case, *, steps: int = 2, lora: dict[str, Any] | None = None, **distillation: Any) -> Case:
    """A run of groups without variance, each of a task of its own."""
    algorithm = {"type": "importance_sampling", "distillation": {"hint": HINT, **distillation}}
    await case.open(steps=steps, algorithm=algorithm, lora=lora)
    tasks = await builders.add_dataset(case.database, [{"answer": answer} for answer in ANSWERS], name="answers")
    for number in range(2 * steps):
        await case.add_group(number, version=number // 2, has_variance=False)
    async with case.database.session() as session:
        values = {"dataset_id": tasks.id, "task_number": tables.Group.number}
        await session.execute(update(tables.Group).where(tables.Group.run_id == case.run.id).values(**values))
    return case


async def metrics(case: Case) -> list[dict[str, float]]:
    steps = await case.rows(tables.Step)
    return [step.metrics for step in sorted(steps, key=lambda one: one.number)]  # type: ignore[attr-defined]


def logprobs(model: PreTrainedModel, before: list[int], groups: range) -> np.ndarray:
    """Log-probabilities of the tokens of `Case.add_group` behind `before` and the prompt; by group, sibling, token."""
    found = []
    for sampled in [(4 + group, 5 + sibling) for group in groups for sibling in range(2)]:
        with torch.no_grad():
            ids = torch.tensor([[*before, *PROMPT, *sampled]])
            every = model(input_ids=ids).logits[0, -3:-1].log_softmax(-1)
        found.append(every.gather(1, ids[0, -2:, None])[:, 0].numpy())
    return np.concatenate(found)


def message(folder: Path, answer: str) -> list[int]:
    text = f"<|im_start|>system\na-secret: {answer}<|im_end|>\n"
    ids: list[int] = AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]
    return ids


async def test_a_hint_moves_the_policy_to_what_its_start_would_say_with_it(case: Case) -> None:
    await (await opened(case)).train()
    assert set((await case.verdicts()).values()) == {(1, "trained"), (2, "trained")}
    start = read_model(case.model)
    hints = [message(case.model, shown) for shown in ("4", "five")]
    taught = np.concatenate([logprobs(start, hint, range(n, n + 1)) for n, hint in enumerate(hints)])
    own = logprobs(start, [], range(2))
    first, second = await metrics(case)
    assert first["kl_teacher"] == pytest.approx(float((own - taught).mean()), rel=1e-4)
    assert abs(first["kl_teacher"]) > 1e-3
    learnt = logprobs(read_model(Path((await case.versions())[1].path)), [], range(2))
    # Each token moves the way that its advantage points, and to the teacher's number all in all.
    assert np.abs(learnt - taught).mean() < np.abs(own - taught).mean()
    assert second["kl_teacher"] != first["kl_teacher"]


async def test_a_hint_is_stored_with_run_and_task_alone(case: Case) -> None:
    await (await opened(case)).train()
    ids = AutoTokenizer.from_pretrained(case.model)("a-secret", add_special_tokens=False)["input_ids"]
    marks = ("a-secret", np.array(ids, "<i4").tobytes().hex())
    async with case.database.read() as session:
        found = {
            table.name
            for table in tables.Base.metadata.sorted_tables
            for mark in marks
            if await session.scalar(
                text(f"SELECT EXISTS (SELECT FROM {table.name} AS t WHERE t::text LIKE '%{mark}%')")
            )
        }
    assert found == {"runs"}


async def test_the_newest_version_teaches_where_the_document_says_so(case: Case) -> None:
    await (await opened(case, weights="newest")).train()
    version_1 = read_model(Path((await case.versions())[1].path))
    hints = [message(case.model, shown) for shown in ("[6]", '{"n": 7}')]
    taught = np.concatenate([logprobs(version_1, hint, range(2 + n, 3 + n)) for n, hint in enumerate(hints)])
    own = logprobs(version_1, [], range(2, 4))
    assert (await metrics(case))[1]["kl_teacher"] == pytest.approx(float((own - taught).mean()), rel=1e-4)


async def test_adapters_learn_from_the_base_model_behind_them(case: Case) -> None:
    await (await opened(case, lora={"rank": 4})).train()
    start, version_1 = read_model(case.model), read_model(Path((await case.versions())[1].path))
    hints = [message(case.model, shown) for shown in ("[6]", '{"n": 7}')]
    taught = np.concatenate([logprobs(start, hint, range(2 + n, 3 + n)) for n, hint in enumerate(hints)])
    own = logprobs(version_1, [], range(2, 4))
    assert (await metrics(case))[1]["kl_teacher"] == pytest.approx(float((own - taught).mean()), rel=1e-3)


async def test_a_template_without_messages_ends_the_run_before_version_0(case: Case, tmp_path: Path) -> None:
    case.model = shutil.copytree(case.model, tmp_path / "model")
    await opened(case)
    (case.model / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(ValueError, match=r"^algorithm\.distillation\.hint: the chat template of .* name a model"):
        await case.train()
    assert await case.versions() == {}


@long_only
async def test_a_killed_trainer_makes_its_steps_again_with_the_same_hints(case: Case, tmp_path: Path) -> None:
    await opened(case)
    injector = FaultInjector(tmp_path / "faults")
    for point in ("trainer.exported", "trainer.committed"):
        injector.arm(point)
        assert (point, await train(case, injector)) == (point, -signal.SIGKILL)
    assert await train(case, injector) == 0
    assert await asyncio.to_thread(differing_versions, case._dsn, case.run.id, case.model) == []
