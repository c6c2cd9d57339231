"""The section `reward` of a run's document."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import RunConfig, graders
from leyden.libs.contracts.judgements import judge

F1 = {"type": "token_f1", "output": "{output.answer}", "reference": "{task.answer}"}

JUDGE = {"type": "score_model", "provider": "judge", "model": "m", "rubric": "Is it kind? {task.question}"}


def code(**grader: Any) -> dict[str, Any]:
    return {"name": "a", "grader": grader}


def run_config(components: list[dict[str, Any]], **parts: Any) -> RunConfig:
    document = {"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "reward": {"components": components}}
    return RunConfig.model_validate({**document, **parts})


def test_components_decide_whether_the_reward_line_counts() -> None:
    graded = run_config([{"name": "answer", "grader": F1}])
    assert graded.runner.stdout_reward is False
    both = run_config([{"name": "answer", "grader": F1}, {"name": "outcome", "from": "agent"}])
    assert both.runner.stdout_reward is True
    for config in (graded, both):
        assert RunConfig.stored(config.storable()) == config


def test_a_run_without_components_is_stored_as_before() -> None:
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}})
    assert "reward" not in config.storable()


@pytest.mark.parametrize(
    ("components", "parts", "words"),
    [
        ([], {}, "reward.components"),
        ([{"name": "answer"}], {}, "needs one source: write from: agent, from: feedback, from: otlp, or grader"),
        ([{"name": "answer", "from": "agent", "grader": F1}], {}, "needs one source"),
        ([{"name": "a", "from": "agent"}, {"name": "a", "grader": F1}], {}, "['a'] name two components each"),
        ([{"name": "a", "from": "agent", "weight": 0.0}], {}, "every weight is 0"),
        ([{"name": "a", "from": "judge"}], {}, "Input should be 'agent', 'feedback' or 'otlp'"),
        ([{"name": "a", "from": "feedback"}], {}, "write wait: {seconds: 3600}"),
        (
            [{"name": "a", "from": "agent", "combine": "last"}],
            {},
            "combine acts on from: feedback and from: otlp alone",
        ),
        ([{"name": "a b", "from": "agent"}], {}, "reward.components.0.name"),
        ([{"name": "a", "grader": {"type": "judge"}}], {}, "reward.components.0.grader"),
        ([{"name": "a", "grader": {**F1, "reference": "{taks.answer}"}}], {}, "there is no field {taks.answer}"),
        ([{"name": "a", "grader": {"type": "regex", "pattern": "("}}], {}, "no regular expression"),
        (
            [{"name": "a", "grader": {"type": "regex", "pattern": "a{99999999999999999999}"}}],
            {},
            "no regular expression",
        ),
        ([{"name": "a", "grader": {"type": "json_path", "path": "a.b"}}], {}, "write $.name"),
        ([{"name": "a", "grader": {"type": "json_path", "path": "$.a[?@.b]"}}], {}, "from '[?@.b]' on: write .name"),
        ([{"name": "a", "grader": {"type": "json_path", "path": "$.."}}], {}, "from '..' on: write .name"),
        ([{"name": "a", "grader": {"type": "json_path", "path": "$..a..b"}}], {}, "several ..: write one at most"),
        ([{"name": "a", "grader": {"type": "text_similarity"}}], {}, "text_similarity.reference"),
        ([{"name": "a", "grader": {"type": "text_similarity", "reference": "x", "measure": "bleu"}}], {}, "'fuzzy'"),
        ([{"name": "a", "grader": {"type": "length", "at_least": 3, "at_most": 2}}], {}, "exceeds at_most 2"),
        ([{"name": "a", "grader": {"type": "tool_use", "at_most": 0}}], {}, "write at_least 0"),
        ([{"name": "a", "grader": {**JUDGE, "rubric": "good? {output}"}}], {}, "the judged text as `output`"),
        ([{"name": "a", "grader": {**JUDGE, "range": [5.0, 1.0]}}], {}, "write the smaller number first"),
        ([{"name": "a", "grader": {**JUDGE, "votes": 10}}], {}, "score_model.votes"),
        ([{"name": "a", "grader": {**JUDGE, "type": "relative_model", "rubric": "{output}"}}], {}, "judged text as"),
        ([{"name": "a", "grader": {**JUDGE, "type": "relative_model", "range": [1, 5]}}], {}, "relative_model.range"),
        ([code(type="python", function="grade.py:f")], {}, "write its folder as directory"),
        ([code(type="python", function="../grade.py:f", directory="/srv")], {}, "python.function"),
        ([code(type="python", function="a/../../grade.py:f", directory="/srv")], {}, "its path below that"),
        ([code(type="python", function="my-package:f")], {}, "write grade.py:score or package.module:score"),
        ([code(type="python", function="grade.py")], {}, "python.function"),
        ([code(type="command", command=[])], {}, "command.command"),
        ([code(type="command", command=["true"], directory="graders")], {}, "command.directory"),
        ([code(type="command", command=["true"], timeout_seconds=3601.0)], {}, "command.timeout_seconds"),
        ([{"name": "a", "from": "agent"}], {"runner": {"grant_reward": True}}, "remove grant_reward"),
        ([{"name": "a", "grader": F1}], {"runner": {"stdout_reward": True}}, "remove it, or write false"),
        ([{"name": "a", "from": "agent"}], {"runner": {"stdout_reward": False}}, "remove it, or write true"),
    ],
)
def test_wrong_components_are_refused_with_the_remedy(
    components: list[dict[str, Any]], parts: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        run_config(components, **parts)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("grader", "field", "words"),
    [
        (
            {**F1, "reference": "{{task.answer}}"},
            "reference",
            "{{task.answer}} leaves braces around the value: write {task",
        ),
        (
            {**F1, "reference": "is {{ task.answer }}"},
            "reference",
            "leaves braces around the value: write {task.answer}",
        ),
        ({**F1, "output": "{{output}}"}, "output", "write {output}"),
        ({**F1, "output": "{ output.answer }"}, "output", "is no field with its spaces: write {output.answer}"),
        ({**F1, "reference": "{task.answer }"}, "reference", "is no field with its spaces: write {task.answer}"),
        ({**F1, "reference": "{task.}"}, "reference", "{task.} names no field: write {output}"),
        ({**F1, "reference": "{task..answer}"}, "reference", "names no field"),
        ({**JUDGE, "rubric": "Is it kind? {{task.question}}"}, "rubric", "write {task.question}"),
        ({**F1, "output": "{task.answer}"}, "output", "all outputs earn the same: write {output}"),
        ({"type": "choice", "options": ["A", "B"], "reference": "C"}, "reference", "none of the options"),
        ({"type": "length"}, "at_most", "every output has the value 1 without a bound"),
        ({"type": "tool_use", "at_least": 0}, "at_most", "every output has the value 1 without a bound"),
        ({"type": "numeric", "reference": "four"}, "reference", "has no number"),
        ({"type": "sql_result", "reference": "SELECT 1", "database": "/srv/a.sqlite"}, "database", "no SQL text"),
    ],
)
def test_texts_and_settings_with_which_nothing_can_be_earned_are_refused(
    grader: dict[str, Any], field: str, words: str
) -> None:
    for steps in (0, 10):
        found = judge(run_config([{"name": "a", "grader": grader}], training={"steps": steps}))
        assert [(one.path, one.severity) for one in found] == [(f"reward.components.0.grader.{field}", "cannot")]
        assert words in found[0].message


@pytest.mark.parametrize(
    "grader",
    [
        {"type": "string_check", "reference": "\\boxed{{task.answer}}"},
        {"type": "json_path", "path": "$.a", "reference": '{"city": {task.city}}'},
        {"type": "json_path", "path": "$.a", "reference": '{"a": {"b": 1}}'},
        {"type": "regex", "pattern": "^a{2}$"},
        {**JUDGE, "rubric": 'Answer {"reason": text}. Is {task.question} met? { output the reason first }'},
        {"type": "choice", "options": ["A", "B"], "reference": " a"},
        {"type": "sql_result", "reference": "{task.sql}", "database": "create table t (a)"},
        {"type": "sql_result", "reference": "{task.sql}", "database": "{task.database}"},
    ],
)
def test_other_braces_and_settings_pass(grader: dict[str, Any]) -> None:
    assert judge(run_config([{"name": "a", "grader": grader}])) == []


def test_code_of_the_operators_own_may_give_any_number_and_any_reward() -> None:
    config = run_config([code(type="python", function="package.module:f", network=True)])
    assert config.reward is not None and config.reward.has_code
    assert RunConfig.stored(config.storable()) == config
    spread = {"credit": {"baseline": {"min_spread": 5.0}}}
    found = [judge(run_config([one], **spread)) for one in (code(type="command", command=["true"]), code(**F1))]
    assert [[one.path for one in judged] for judged in found] == [[], ["credit.baseline.min_spread"]]


def test_feedback_needs_a_wait_and_no_reward_line() -> None:
    document = {"name": "n", "dataset": "d", "agent": {"command": ["x"]}}
    reward = {"components": [{"name": "thumbs", "from": "feedback"}], "wait": {"seconds": 60.0}}
    config = RunConfig.model_validate({**document, "reward": reward})
    assert config.runner.stdout_reward is False
    assert config.reward is not None
    assert config.reward.feedback_names == ["thumbs"]
    assert RunConfig.stored(config.storable()) == config
    reward["components"] = [{"name": "answer", "grader": F1}]
    with pytest.raises(ValidationError, match="nothing waits: remove it"):
        RunConfig.model_validate({**document, "reward": reward})


@pytest.mark.parametrize("name", ["$ref", "$dynamicRef"])
def test_a_schema_refers_to_no_other_document(name: str) -> None:
    def grader(reference: str) -> graders.JsonSchema:
        schema = {"properties": {"$ref": {"type": "string"}, "city": {"anyOf": [{name: reference}]}}}
        return graders.JsonSchema.model_validate({"type": "json_schema", "json_schema": schema})

    grader("#/$defs/city")
    for reference in ("https://example.com/schema", "file:///etc/passwd", "other.json"):
        with pytest.raises(ValidationError, match="leaves the schema"):
            grader(reference)


@pytest.mark.parametrize("place", [[], ["properties", "city"], ["contentSchema"]])
def test_a_schema_names_no_draft_that_is_to_be_fetched(place: list[str]) -> None:
    def grader(draft: str) -> graders.JsonSchema:
        schema: dict[str, Any] = {"$schema": draft, "properties": {"$schema": {"const": "https://example.com/schema"}}}
        for name in reversed(place):
            schema = {name: schema}
        return graders.JsonSchema.model_validate({"type": "json_schema", "json_schema": schema})

    grader("http://json-schema.org/draft-07/schema#")
    grader("https://json-schema.org/draft/2020-12/schema")
    for draft in ("http://169.254.169.254/latest", "file:///etc/passwd", "http://json-schema.org/draft-07/schema/x"):
        with pytest.raises(ValidationError, match="is none of the drafts 4, 6, 7, 2019-09 and 2020-12: remove it"):
            grader(draft)


@pytest.mark.parametrize(
    ("weight", "parts", "words"),
    [
        (1.0, {"total": "mean"}, "reward.total"),
        (1.0, {"clip": [1.0]}, "reward.clip"),
        (1.0, {"clip": [1.0, -1.0]}, "write the smaller number first"),
        (-1.0, {"total": "weighted_mean"}, "['a'] have negative weights, and a mean has none: write weighted_sum"),
    ],
)
def test_a_total_that_means_nothing_is_refused(weight: float, parts: dict[str, Any], words: str) -> None:
    reward = {"components": [{"name": "a", "weight": weight, "grader": F1}], **parts}
    with pytest.raises(ValidationError) as caught:
        RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "reward": reward})
    assert words in str(caught.value)


def test_gates_and_clip_are_stored() -> None:
    reward = {
        "components": [
            {"name": "a", "weight": 0.0, "gate": {"at_least": 1.0}, "grader": F1},
            {"name": "b", "grader": F1},
        ],
        "total": "weighted_mean",
        "clip": [-1.0, 1.0],
    }
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}, "reward": reward})
    assert RunConfig.stored(config.storable()) == config


def test_the_fields_of_a_rubric_are_fields_of_the_task() -> None:
    reward = run_config([{"name": "a", "grader": JUDGE}]).reward
    assert reward is not None
    assert reward.task_fields() == [("reward.components.0.grader.rubric", ("question",))]
