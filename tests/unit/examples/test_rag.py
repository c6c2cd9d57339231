"""The RAG agent's entries, search, tasks and teacher, and its reward."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from openai import OpenAI

from leyden.libs.contracts.config import Reward
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import grade
from tests.campaigns.experiments.choices import Choices
from tests.campaigns.experiments.rag import RAG
from tests.support.examples import example_modules


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    return example_modules(monkeypatch, RAG.agent, "search", "tasks", "teacher")


def test_the_best_entries_come_first_and_none_without_a_word_of_the_query(modules: list[ModuleType]) -> None:
    search, _, _ = modules
    index = search.Index()
    first, second = index.search("portugal")
    assert first.startswith("Portugal: country in Europe, capital Lisbon")
    assert "Portugal" in second
    assert index.search("Porto?", shown=1) == ["Porto: city in Portugal, population 252687."]
    assert (index.search("xyzzy"), index.search("")) == ([], [])
    # By hand: "a" is in both of two entries, "b" in one, and a title counts three times; both have four words.
    small = search.Index(("a: b", "a: a"))
    assert small.weights["b"][0] == pytest.approx(math.log(2) * 1 * 2.5 / (1 + 1.5))
    assert small.weights["a"][1] == pytest.approx(math.log(1.2) * 4 * 2.5 / (4 + 1.5))


def test_every_task_is_found_and_held_out_countries_are_in_no_training_task(modules: list[ModuleType]) -> None:
    search, tasks, _ = modules
    training, kept = tasks.questions(0)
    assert (len(training), len(kept)) == (216, 72)
    assert {len(task.searches) for task in training} == {1, 2}
    index = search.Index()
    for task in (*training, *kept):
        shown = [line for name in task.searches for line in index.search(name)]
        assert any(task.answer in line for line in shown), task.question
    homes = {fact["city"]: fact["country"] for fact in tasks.facts()}
    about = [{homes.get(task.searches[0], task.searches[0]) for task in rows} for rows in (training, kept)]
    assert not about[0] & about[1]
    assert tasks.questions(0) == (training, kept)
    assert tasks.questions(1)[0] != training


def test_the_reward_is_the_answers_f1_and_a_tenth_for_the_format() -> None:
    reward = Reward.model_validate(RAG.document(0, Choices())["reward"])

    def earned(answer: str, text: str) -> list[float | None]:
        output = json.dumps({"answer": answer, "text": text, "searches": 1})
        facts = AttemptFacts({"question": "?", "answer": "Bolivar Soberano"}, output)
        return [grade(component, facts).value for component in reward.components[:2]]

    assert [component.weight for component in reward.components] == [0.9, 0.1, 0]
    assert earned("Bolivar Soberano", "Answer: Bolivar Soberano") == [1.0, 1.0]
    assert earned("Bolivar", "Bolivar") == [pytest.approx(2 / 3), 0.0]
    assert earned("Peso\nor so", "Answer: Peso\nor so") == [0.0, 0.0]
    assert earned("", "") == [0.0, 0.0]


def test_the_teacher_leads_to_the_answer_in_both_dialects(modules: list[ModuleType], tmp_path: Path) -> None:
    _, _, teacher = modules
    task: dict[str, Any] = {
        "question": "Which currency do people in Porto use?",
        "answer": "Euro",
        "searches": ["Porto", "Portugal"],
    }
    (tmp_path / "train.jsonl").write_text(json.dumps(task) + "\n")
    server = teacher.server([tmp_path / "train.jsonl"], 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="any", max_retries=0) as client:
            for solved in (by_responses, by_chat):
                assert solved(client, task["question"]) == ["Porto", "Portugal", "Answer: Euro"]
                assert solved(client, "Who are you?") == [""]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def by_responses(client: OpenAI, question: str) -> list[str]:
    items: list[Any] = [{"role": "user", "content": question}]
    steps: list[str] = []
    while True:
        found = client.responses.create(model="m", instructions="You answer.", input=items)
        (item,) = found.output
        if item.type != "function_call":
            return [*steps, found.output_text]
        steps.append(json.loads(item.arguments)["query"])
        items += [item, {"type": "function_call_output", "call_id": item.call_id, "output": "…"}]


def by_chat(client: OpenAI, question: str) -> list[str]:
    messages: list[Any] = [{"role": "system", "content": "You answer."}, {"role": "user", "content": question}]
    steps: list[str] = []
    while True:
        message = client.chat.completions.create(model="m", messages=messages).choices[0].message
        if not message.tool_calls:
            return [*steps, message.content or ""]
        (call,) = message.tool_calls
        assert call.type == "function"
        steps.append(json.loads(call.function.arguments)["query"])
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "…"}]
