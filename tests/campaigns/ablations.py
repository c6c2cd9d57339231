"""Two ablations, measured on a run's stored rollouts: `python -m tests.campaigns.ablations RUN --model FOLDER`.

*One row*: an attempt is one row with a mask, without transitions of its own for each call. Each call adds to the row
the tokens of its prompt that do not continue the row, and its answer. The report counts the context that the row shows
before an answer and the call did not have, the tokens that the row repeats, and how far the log-probabilities of
sampled tokens differ between row and call under one model.

*Text*: a framework that keeps messages and no token ids renders the conversation by the chat template and reads the
answer's tokens from that. The report counts the sampled tokens that are others then, and the turns with any.

The run's platform is found as the command line finds it (`LEYDEN_URL`, `LEYDEN_TOKEN`, `LEYDEN_HOME`). The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from leyden.libs.cli.context import make_context
from leyden.libs.client import Client
from leyden.libs.client.export.base import Inexpressible
from leyden.libs.client.export.trl import trl_messages
from leyden.libs.contracts.api.rollouts import Call


@dataclass(frozen=True)
class Answer:
    """The sampled tokens of a call in the row of its attempt.

    start: the place of the first one in the row; extra: tokens before it that the call did not have; repeated: tokens
    of the call's prompt that an earlier call had and the row shows once more.
    """

    start: int
    extra: int
    repeated: int


@dataclass(frozen=True)
class Row:
    """The one row of an attempt, and its answers in the order of the calls."""

    token_ids: list[int]
    answers: list[Answer]


def one_row(calls: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Row:
    """The row of calls, each given by the tokens of its prompt and those that were sampled.

    >>> one_row([([1, 2], [3]), ([1, 2, 3, 4], [5]), ([1, 9], [6])]).answers[2]
    Answer(start=6, extra=4, repeated=0)
    """
    row, answers, seen = list[int](), list[Answer](), list[list[int]]()
    for prompt, sampled in calls:
        shared = shared_beginning(row, prompt)
        known = max((shared_beginning(one, prompt) for one in seen), default=0)
        extra, repeated = len(row) - shared, max(0, known - shared)
        row += prompt[shared:]
        answers.append(Answer(len(row), extra, repeated))
        row += sampled
        seen.append([*prompt, *sampled])
    return Row(row, answers)


def shared_beginning(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    return next(
        (place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def changed_tokens(sampled: Sequence[int], rendered: Sequence[int]) -> int:
    """The number of sampled tokens without an equal one in an alignment with the rendered answer.

    >>> changed_tokens([1, 2, 3, 4], [1, 9, 4])
    2
    """
    blocks = SequenceMatcher(None, list(sampled), list(rendered), autojunk=False).get_matching_blocks()
    return len(sampled) - sum(block.size for block in blocks)


@dataclass
class Report:
    """Counts over all measured attempts. Differences are of log-probabilities, row minus call, in nats."""

    attempts: int = 0
    calls: int = 0
    sampled_tokens: int = 0
    calls_without_tokens: int = 0
    calls_with_extra_context: int = 0
    extra_tokens: int = 0
    repeated_tokens: int = 0
    rows_beyond_the_model: int = 0
    compared_tokens: int = 0
    mean_difference: float | None = None
    largest_difference: float | None = None
    turns: int = 0
    turns_changed: int = 0
    turn_tokens: int = 0
    turn_tokens_changed: int = 0
    turns_not_rendered: int = 0
    differences: list[NDArray[np.float64]] = field(default_factory=list, repr=False)

    def finish(self) -> dict[str, Any]:
        """The numbers alone; null where nothing was compared."""
        found = np.abs(np.concatenate(self.differences)) if self.differences else np.zeros(0)
        self.compared_tokens = len(found)
        if len(found):
            self.mean_difference, self.largest_difference = float(found.mean()), float(found.max())
        return {name: value for name, value in asdict(self).items() if name != "differences"}


def measure(attempts: Iterable[Sequence[Call]], model: PreTrainedModel, tokenizer: Any) -> Report:
    """Args: attempts: the calls of each attempt, with their conversations and prompts, in order"""
    report = Report()
    for calls in attempts:
        known = [call for call in calls if call.prompt_ids is not None and call.sampled_ids]
        report.attempts += 1
        report.calls += len(known)
        report.calls_without_tokens += len(calls) - len(known)
        _add_row(report, known, model)
        for call in known:
            _add_turn(report, call, tokenizer)
    return report


def _add_row(report: Report, calls: Sequence[Call], model: PreTrainedModel) -> None:
    row = one_row([(call.prompt_ids or [], call.sampled_ids) for call in calls])
    report.sampled_tokens += sum(len(call.sampled_ids) for call in calls)
    report.calls_with_extra_context += sum(answer.extra > 0 for answer in row.answers)
    report.extra_tokens += sum(answer.extra for answer in row.answers)
    report.repeated_tokens += sum(answer.repeated for answer in row.answers)
    if len(row.token_ids) > model.config.max_position_embeddings:
        report.rows_beyond_the_model += 1
        return
    of_row = _logits(model, row.token_ids)
    for call, answer in zip(calls, row.answers, strict=True):
        prompt = call.prompt_ids or []
        of_call = _logits(model, [*prompt, *call.sampled_ids])
        own, other = (
            _logprobs(logits, start, call) for logits, start in ((of_call, len(prompt)), (of_row, answer.start))
        )
        report.differences.append(other - own)


def _logits(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=torch.tensor([token_ids])).logits[0]
    return logits


def _logprobs(logits: torch.Tensor, start: int, call: Call) -> NDArray[np.float64]:
    """Log-probabilities of the call's sampled tokens, which begin at `start`, at the call's temperature."""
    states = logits[start - 1 : start - 1 + len(call.sampled_ids)].double() / (call.temperature or 1.0)
    found: NDArray[np.float64] = states.log_softmax(-1).gather(1, torch.tensor(call.sampled_ids)[:, None])[:, 0].numpy()
    return found


def _add_turn(report: Report, call: Call, tokenizer: Any) -> None:
    rendered = None if call.turns is None or call.answer is None else rendered_answer(call, tokenizer)
    if rendered is None:
        report.turns_not_rendered += 1
        return
    changed = changed_tokens(call.sampled_ids, rendered)
    report.turns += 1
    report.turns_changed += changed > 0
    report.turn_tokens += len(call.sampled_ids)
    report.turn_tokens_changed += changed


def rendered_answer(call: Call, tokenizer: Any) -> list[int] | None:
    """The tokens of a call's answer where its conversation is rendered from text; None where that is not possible."""
    assert call.turns is not None
    assert call.answer is not None
    tools = list(call.tools) if call.tools else None
    try:
        messages = trl_messages([*call.turns, call.answer])
        before = tokenizer.apply_chat_template(messages[:-1], tools=tools, tokenize=False, add_generation_prompt=True)
        whole: str = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except (Inexpressible, jinja2.TemplateError):
        return None
    if not whole.startswith(before):
        return None
    ids: list[int] = tokenizer(whole[len(before) :], add_special_tokens=False)["input_ids"]
    return ids


def attempts_of(client: Client, run_id: str, most: int) -> Iterator[list[Call]]:
    """The calls of the attempts that count, of the run's newest finished rollouts."""
    for number, rollout in enumerate(client.rollouts(run=run_id, state="finished")):
        if number == most:
            return
        if rollout.attempt is not None:
            yield list(client.calls(rollout.id, attempt=rollout.attempt, prompt=True))


def main() -> None:
    """Prints the report of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="id or name")
    parser.add_argument("--model", type=Path, required=True, help="folder of the version that judges, such as its last")
    parser.add_argument("--rollouts", type=int, default=64, help="the newest so many")
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32, local_files_only=True).eval()
    with make_context().client(patience_seconds=60) as client:
        run = client.find_run(given.run)
        found = measure(attempts_of(client, run.id, given.rollouts), model, tokenizer).finish()
    for name, value in found.items():
        print(f"{name.replace('_', ' ')}: {value}")
    print(json.dumps({"run": run.id, **found}))


if __name__ == "__main__":
    main()
