"""Hints of a run's teacher: made from the tasks of a step's groups, read by the teacher alone, and stored nowhere.

A hint is one message, rendered by the chat template of the run's model. It stands before the row, behind a token that
begins every text. The row keeps its tokens, so that the teacher judges the ones that the policy sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import AutoTokenizer

from leyden.libs.contracts.config import Distillation, RunConfig
from leyden.libs.store.database import ReadSession
from leyden.libs.store.datasets import tasks_of_groups
from leyden.services.trainer.rows.batch import Hint, Sample

_REFUSED = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError)
"""Exceptions of templates that refuse a conversation, and of a tokenizer without a template."""


async def with_hints(session: ReadSession, samples: Sequence[Sample], config: RunConfig, base: Path) -> list[Sample]:
    """The samples, each with the hint of its task where the teacher of the run has one.

    Args:   base: the folder of the run's model, with its tokenizer and chat template
    Raises: MissingField: a task lacks a field, whose groups credit leaves out; ValueError: see `HintWriter.hint`
    """
    distillation = config.algorithm.distillation
    if distillation is None or distillation.hint is None:
        return list(samples)
    tasks = await tasks_of_groups(session, sorted({sample.group_id for sample in samples}))
    return await asyncio.to_thread(_hinted, samples, distillation, tasks, _writer(base))


def _hinted(
    samples: Sequence[Sample], distillation: Distillation, tasks: Mapping[str, Mapping[str, Any]], writer: HintWriter
) -> list[Sample]:
    texts = {group: distillation.hint_for(task) for group, task in tasks.items()}
    hints = {group: writer.hint(text) for group, text in texts.items() if text is not None}
    return [replace(one, hint=writer.placed(hints[one.group_id], one)) for one in samples]


class HintWriter:
    """Renders hints with the tokenizer and the chat template of a model's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def hint(self, text: str) -> Hint:
        """The message with this text, without the token that begins every text: of the role `system`, or `user` where
        the template refuses the first or drops its text.

        Raises: ValueError: the template renders neither
        """
        for role in ("system", "user"):
            with suppress(*_REFUSED):
                rendered = self._rendered([(role, text)])
                if text.strip() in rendered:
                    break
        else:
            raise ValueError(
                f"algorithm.distillation.hint: the chat template of {self._folder} renders neither a system message nor"
                " a user's on its own: name a model with another template, or a teacher without a hint"
            )
        ids = self._ids(rendered)
        return Hint(np.array(ids[1:] if ids[:1] == [self._begin] else ids, np.int32))

    def placed(self, hint: Hint, sample: Sample) -> Hint:
        """The hint behind the row's token that begins every text, if it has one."""
        return replace(hint, at=int(bool(len(sample.token_ids)) and sample.token_ids[0] == self._begin))

    @cached_property
    def _begin(self) -> int | None:
        """The token that begins every text; None without one. One that begins every message is none."""
        bos: int | None = self._tokenizer.bos_token_id
        ids = self._ids(self._rendered([("user", "a question"), ("assistant", "an answer")]))
        return bos if bos is not None and ids[0] == bos and ids.count(bos) == 1 else None

    def _rendered(self, messages: Sequence[tuple[str, str]]) -> str:
        conversation = [{"role": role, "content": content} for role, content in messages]
        text: str = self._tokenizer.apply_chat_template(conversation, tokenize=False)
        return text

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


@lru_cache(maxsize=2)
def _writer(base: Path) -> HintWriter:
    return HintWriter(base)
