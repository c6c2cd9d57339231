"""The measures of the ablations, by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from leyden.libs.contracts.conversation import ToolCall, Turn
from tests.campaigns.ablations import Answer, changed_tokens, measure, one_row


def call(prompt: list[int] | None, sampled: list[int], turns: tuple[Turn, ...] = (), **fields: Any) -> Any:
    values = {"answer": None, "tools": (), "temperature": 1.0, **fields}
    return SimpleNamespace(prompt_ids=prompt, sampled_ids=sampled, turns=turns, **values)


def test_calls_that_continue_each_other_make_a_row_of_what_they_saw() -> None:
    row = one_row([([1, 2], [3]), ([1, 2, 3, 4], [5])])
    assert (row.token_ids, row.answers) == ([1, 2, 3, 4, 5], [Answer(2, 0, 0), Answer(4, 0, 0)])


def test_a_history_that_was_rewritten_shows_more_than_the_call_saw_and_repeats_it() -> None:
    # The second call dropped a token, the third repeats the conversation of the second.
    row = one_row([([1, 2, 3], [4]), ([1, 3], [5]), ([1, 3, 5, 6], [7])])
    assert row.token_ids == [1, 2, 3, 4, 3, 5, 3, 5, 6, 7]
    assert row.answers == [Answer(3, 0, 0), Answer(5, 3, 0), Answer(9, 5, 2)]


@pytest.mark.parametrize(
    ("sampled", "rendered", "changed"),
    [([1, 2], [1, 2], 0), ([1, 2], [1, 2, 3], 0), ([1, 2, 3], [1, 4, 3], 1), ([1], [], 1)],
)
def test_tokens_that_another_rendering_changes(sampled: list[int], rendered: list[int], changed: int) -> None:
    assert changed_tokens(sampled, rendered) == changed


def test_a_report_of_rows_and_texts(tiny_model: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    asked, said = Turn(role="user", content="2+2?"), Turn(role="assistant", content="4")
    end = tokenizer.eos_token_id
    # The second call sampled a token that stands for text and that the tokenizer writes by letters.
    odd = tokenizer.convert_tokens_to_ids("<filler_0>")
    letters = tokenizer("4", add_special_tokens=False)["input_ids"]
    first = call([1, 2, 3], [*letters, end], (asked,), answer=said)
    second = call([1, 9], [odd, end], (asked,), answer=said)
    unknown = call(None, [5])
    broken = Turn(role="assistant", content="", tool_calls=(ToolCall(id="1", name="add", arguments="{"),))
    third = call([1, 9, odd, end, 8], [7], (asked,), answer=broken)
    report = measure([[first, second, unknown], [third]], model, tokenizer)
    found = report.finish()
    assert (found["attempts"], found["calls"], found["calls_without_tokens"]) == (2, 3, 1)
    assert (found["calls_with_extra_context"], found["extra_tokens"], found["repeated_tokens"]) == (1, 4, 0)
    assert (found["turns"], found["turns_changed"], found["turns_not_rendered"]) == (2, 1, 1)
    assert (found["turn_tokens"], found["turn_tokens_changed"]) == (4, 1)
    assert found["compared_tokens"] == found["sampled_tokens"] == 5
    # Row and call agree where the row shows the call's context, and differ where it shows another.
    of_first, of_second, of_third = report.differences
    assert abs(of_first).max() < 1e-5
    assert abs(of_third).max() < 1e-5
    assert abs(of_second).max() > 1e-4
    assert measure([], model, tokenizer).finish()["mean_difference"] is None
