"""Built-in graders: worked numbers, the answer that counted, and the words of a failure."""

from __future__ import annotations

import doctest
import json
import socket
import time
from contextlib import suppress
from typing import Any

import pytest

from leyden.libs.contracts import json_path
from leyden.libs.contracts.config import Component, graders
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading import numbers, similarity, structures, words
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import Grade, grade


def graded(
    text: str = "", task: dict[str, Any] | None = None, calls: int = 0, tools: tuple[str, ...] = (), **grader: Any
) -> Grade:
    component = Component.model_validate({"name": "one", "grader": grader})
    return grade(component, AttemptFacts(task or {}, text, None, calls, tools))


def value(text: str, task: dict[str, Any] | None = None, **grader: Any) -> float | None:
    return graded(text, task, **grader).value


@pytest.mark.parametrize("module", [words, numbers, similarity, json_path])
def test_the_worked_values_of_docstrings_hold(module: Any) -> None:
    assert doctest.testmod(module).failed == 0


# From the evaluation script of SQuAD 1.1, which divides the shared words by the words of each text.
@pytest.mark.parametrize(
    ("output", "reference", "expected"),
    [
        ("Paris", "Paris", 1.0),
        ("The Paris.", "paris", 1.0),
        ("in Paris, France", "Paris", 2 * (1 / 3) / (1 / 3 + 1)),
        ("Barack Hussein Obama", "Barack Obama", 0.8),
        ("to be or not to be", "to be", 2 * 2 / 8),
        ("London", "Paris", 0.0),
        ("", "Paris", 0.0),
        ("the", "a", 1.0),
    ],
)
def test_token_f1_is_squads(output: str, reference: str, expected: float) -> None:
    found = value(output, {"answer": reference}, type="token_f1", reference="{task.answer}")
    assert found == pytest.approx(expected, abs=1e-9)


def test_the_best_of_several_references_counts() -> None:
    found = graded("the UK", {"answers": ["Britain", "UK"]}, type="token_f1", reference="{task.answers}")
    assert (found.value, found.extracted, found.explanation) == (1.0, "the UK", "F1 1 with 'UK'")


def test_many_references_take_the_time_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    squad, compiled = words.squad, structures.jsonschema_rs.validator_for

    def counted(schema: Any, **options: Any) -> Any:
        read.append("a validator")
        return compiled(schema, **options)

    monkeypatch.setattr(words, "squad", lambda text: (read.append(text), squad(text))[1])
    monkeypatch.setitem(words._NORMALISE, "squad", words.squad)
    monkeypatch.setattr(structures.jsonschema_rs, "validator_for", counted)
    task = {"answers": ["Rome", "Oslo", "4"]}
    for grader in ({"type": "token_f1"}, {"type": "string_check", "normalise": "squad"}):
        read.clear()
        assert value("Oslo", task, reference="{task.answers}", **grader) == 1.0
        assert sorted(read) == ["4", "Oslo", "Oslo", "Rome"]
    read.clear()
    numbers = json.dumps({"items": [*range(5, 900), 4.0]})
    assert value(numbers, task, type="json_path", path="$.items[*]", reference="{task.answers}") == 1.0
    assert read == ["a validator"]


def test_a_field_of_the_last_json_line_is_graded() -> None:
    output = 'thinking\n{"answer": "no"}\n{"answer": {"city": ["Rome", "Paris"]}}\nbye\n{broken'
    task = {"answer": "Paris"}
    grader = {"type": "string_check", "reference": "{task.answer}"}
    assert value(output, task, output="{output.answer.city.1}", **grader) == 1.0
    missing = graded(output, task, output="{output.answer.country}", **grader)
    assert missing == Grade(
        ComponentState.SCORED, 0.0, None, "output.answer.country: output.answer.country does not exist, or is null"
    )
    none = graded("no json", task, output="{output.answer}", **grader)
    assert (none.value, none.explanation) == (0.0, "output.answer: no line of the output is a JSON object")


def test_what_an_agent_writes_is_never_a_graders_error() -> None:
    """Half of a surrogate pair, no number, too many levels, and separators of lines that are none of JSON."""
    facts = AttemptFacts({}, '{"answer": "a\\ud800", "\\udfff": NaN, "most": 1e999}')
    assert facts.last_object == {"answer": "a\ufffd", "\ufffd": None, "most": None}
    assert AttemptFacts({}, '{"answer": "\\ud83d\\ude00"}').last_object == {"answer": "\U0001f600"}
    schema = {"type": "json_schema", "json_schema": {"type": "object"}}
    deep = '{"a": [' + "[" * 400 + "]" * 400 + "]}"
    found = graded(deep, output="{output}", **schema)
    assert (found.state, found.value) == (ComponentState.SCORED, 0.0)
    assert found.explanation == "no JSON: it has more than 200 levels"
    for separator in "\u2028\u0085":
        exact = {"type": "string_check", "output": "{output.answer}", "reference": f"a{separator}b"}
        line = json.dumps({"answer": f"a{separator}b"}, ensure_ascii=False)
        assert value(f"thinking\n{line}\n", **exact) == 1.0, repr(separator)


@pytest.mark.parametrize("task", [{}, {"answer": None}, {"answer": []}])
def test_a_task_without_a_reference_is_not_applicable_and_never_0(task: dict[str, Any]) -> None:
    found = graded("Paris", task, type="token_f1", reference="{task.answer}")
    assert (found.state, found.value) == (ComponentState.NOT_APPLICABLE, None)
    assert found.explanation.startswith("task.answer: ")


@pytest.mark.parametrize(
    ("operation", "normalise", "expected"),
    [
        ("eq", "none", 0.0),
        ("eq", "case", 0.0),
        ("eq", "squad", 1.0),
        ("ne", "none", 1.0),
        ("ne", "squad", 0.0),
        ("like", "none", 0.0),
        ("ilike", "none", 1.0),
    ],
)
def test_string_check(operation: str, normalise: str, expected: float) -> None:
    found = value("The Paris!", {}, type="string_check", operation=operation, normalise=normalise, reference="paris")
    assert found == expected


@pytest.mark.parametrize(
    ("output", "reference", "expected"),
    [
        ("so it is 1,234.5 in sum", "1234.5", 1.0),
        ("2 + 2 = 4.", "4", 1.0),
        ("5 apples", "4", 0.0),
        ("12 %", "0.12", 1.0),
        ("−3e-4", "-0.0003", 1.0),
        ("1/3", "0.3333333", 1.0),
        ("1/0", "1", 0.0),
        ("version v2", "2", 0.0),
        ("1000001", "1000000", 0.0),
        ("1,000,000", "1000000", 1.0),
        ("Step 1 250", "250", 1.0),
        ("Step 1 250", "1250", 0.0),
        ("it is 1\u00a0000", "1000", 1.0),
        ("it is 1 000", "1000", 0.0),
        (" 1 250 000.5\n", "1250000.5", 1.0),
        ("-12 000 %", "-120", 1.0),
        ("12\u202f345\u00a0678.5 km", "12345678.5", 1.0),
        ("in 2020 300 people", "300", 1.0),
        ("7 0001", "1", 1.0),
        ("2.9999999999", "3", 1.0),
        ("none", "4", 0.0),
    ],
)
def test_numeric_reads_the_last_number(output: str, reference: str, expected: float) -> None:
    assert value(output, {}, type="numeric", reference=reference) == expected


def test_numeric_tolerance_is_a_share_of_the_reference() -> None:
    assert value("101", {}, type="numeric", reference="100", tolerance=0.02) == 1.0
    assert value("103", {}, type="numeric", reference="100", tolerance=0.02) == 0.0
    assert value("1000001", {}, type="numeric", reference="1000000", tolerance=1e-5) == 1.0
    assert value("1000000.7", {}, type="numeric", reference="1000000.5") == 1.0


def test_choice_takes_the_last_option_that_stands_alone() -> None:
    grader = {"type": "choice", "options": ["A", "B", "C"], "reference": "{task.key}"}
    found = graded("A bad idea? No: (b)", {"key": "B"}, **grader)
    assert (found.value, found.extracted) == (1.0, "b")
    assert value("Because", {"key": "B"}, **grader) == 0.0


@pytest.mark.parametrize(
    ("output", "extracted"),
    [
        ("Answer: B, since it is a better fit.", "B"),
        ("B is right: the others have a flaw", "B"),
        ("**B** is a **better** fit, and d is\na worse one", "B"),
        ("A first thought.\nThe answer is b", "b"),
        ("the answer is b because it fits", "b"),
    ],
)
def test_choice_takes_no_article_for_an_option(output: str, extracted: str) -> None:
    grader = {"type": "choice", "options": ["A", "B", "C", "D"], "reference": "{task.key}"}
    found = graded(output, {"key": "B"}, **grader)
    assert (found.value, found.extracted) == (1.0, extracted)
    assert value(output, {"key": "A"}, **grader) == 0.0


@pytest.mark.parametrize(
    ("options", "output", "extracted"),
    [
        (["yes", "no"], "I see no issue here. Answer: Yes - it compiles", "Yes"),
        (["positive", "negative"], "Not negative. Positive overall", "Positive"),
        (["true", "false"], "If false were right we would see x. The statement is True because y", "True"),
        (["New York", "New York City"], "The answer is New York city.", "New York city"),
        (["A", "B"], "A common mistake. The answer is option b - it fits", "b"),
    ],
)
def test_choice_takes_words_in_any_case(options: list[str], output: str, extracted: str) -> None:
    found = graded(output, {"key": extracted}, type="choice", options=options, reference="{task.key}")
    assert (found.value, found.extracted) == (1.0, extracted)


def test_regex_matches_at_each_line() -> None:
    found = graded("hm\nanswer: 4\nbye", type="regex", pattern="^answer: .+$")
    assert (found.value, found.extracted) == (1.0, "answer: 4")
    assert value("the answer: 4", type="regex", pattern="^answer: .+$") == 0.0


def test_json_schema_reads_the_last_object() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert value('well\n{"n": 3}', type="json_schema", json_schema=schema) == 1.0
    wrong = graded('{"n": "x"}', type="json_schema", json_schema=schema)
    assert (wrong.value, wrong.explanation) == (0.0, 'at /n: "x" is not of type "integer"')
    assert value("no json", type="json_schema", json_schema=schema) == 0.0


@pytest.mark.parametrize(
    ("path", "reference", "expected", "extracted"),
    [
        ("$.city", "{task.city}", 1.0, "Paris"),
        ("$.n", "4", 1.0, "4.0"),
        ("$.n", "5", 0.0, "4.0"),
        ("$.ok", "1", 0.0, "true"),
        ("$.ok", "true", 1.0, "true"),
        ("$.trips[-1].to", "Rome", 1.0, "Rome"),
        ("$['trips'][*].to", "{task.cities}", 1.0, "Rome"),
        ("$..to", "Oslo", 1.0, "Oslo"),
        ("$..to", "Bern", 0.0, "Oslo"),
        ("$.trips[1]", '{"days": 2, "to": "Rome"}', 1.0, '{"to": "Rome", "days": 2}'),
        ("$.trips[7].to", "Rome", 0.0, None),
        ("$.none", None, 0.0, None),
        ("$.city", None, 1.0, "Paris"),
        ("$.city.name", "Paris", 0.0, None),
        ("$", None, 1.0, None),
    ],
)
def test_json_path_finds_a_value(path: str, reference: str | None, expected: float, extracted: str | None) -> None:
    output = (
        'so\n{"city": "Paris", "n": 4.0, "ok": true, "none": null, '
        '"trips": [{"to": "Oslo"}, {"to": "Rome", "days": 2}]}'
    )
    task = {"city": "Paris", "cities": ["Rome", "Bern"]}
    found = graded(output, task, type="json_path", path=path, reference=reference)
    assert found.value == expected
    assert path == "$" or found.extracted == extracted


@pytest.mark.parametrize("name", ["$schema", "$ref"])
def test_no_schema_makes_a_grader_open_an_address(name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        schema = {"properties": {"a": {name: f"http://127.0.0.1:{server.getsockname()[1]}/schema"}}}
        grader = graders.JsonSchema.model_construct(output="{output}", json_schema=schema)
        with suppress(ValueError):
            structures.json_schema(grader, AttemptFacts({}, "{}"))
        with pytest.raises(BlockingIOError):
            server.accept()


def test_json_path_explains_itself() -> None:
    output = {"type": "json_path", "path": "$..to", "reference": "Bern"}
    assert graded('{"a": [{"to": 1}, {"to": 2}]}', **output).explanation == "none of 2 values at $..to is Bern"
    assert graded('{"to": "Bern"}', **output).explanation == "at $..to is Bern"
    assert graded("{}", **output).explanation == "nothing is at $..to"
    assert graded("no json", **output).explanation.startswith("no JSON: ")
    assert graded('{"answer": "[1, 2]"}', type="json_path", output="{output.answer}", path="$[1]").extracted == "2"
    nested = graded("[" * 100_000, type="json_path", path="$..a")
    assert (nested.state, nested.value) == (ComponentState.SCORED, 0.0)
    assert graded("{}", {}, **{**output, "reference": "{task.to}"}).state is ComponentState.NOT_APPLICABLE


# rouge_l: 2 · shared / both lengths, over the example of Lin (2004) and others worked by hand; fuzzy: as rapidfuzz.
@pytest.mark.parametrize(
    ("measure", "output", "reference", "expected"),
    [
        ("rouge_l", "police kill the gunman", "police killed the gunman", 0.75),
        ("rouge_l", "the gunman kill police", "police killed the gunman", 0.5),
        ("rouge_l", "The cat, sat on the mat!", "the cat on a mat", 2 * 4 / (6 + 5)),
        ("rouge_l", "über straße", "ÜBER straße", 1.0),
        ("rouge_l", "", "the", 0.0),
        ("rouge_l", "?!", "...", 1.0),
        ("fuzzy", "this is a test", "this is a test!", 2 * 14 / (14 + 15)),
        ("fuzzy", "kitten", "sitting", 2 * 4 / (6 + 7)),
        ("fuzzy", "abc", "xyz", 0.0),
        ("fuzzy", " Paris\n", "Paris", 1.0),
    ],
)
def test_text_similarity(measure: str, output: str, reference: str, expected: float) -> None:
    found = value(output, {}, type="text_similarity", measure=measure, reference=reference)
    assert found == pytest.approx(expected, abs=1e-9)


def test_text_similarity_takes_the_best_reference() -> None:
    task = {"answers": ["a b c d", "a b"]}
    found = graded("a b x", task, type="text_similarity", reference="{task.answers}")
    assert found == Grade(ComponentState.SCORED, 0.8, "a b x", "rouge_l 0.8 with 'a b'")
    assert graded("a", {}, type="text_similarity", reference="{task.a}").state is ComponentState.NOT_APPLICABLE


@pytest.mark.parametrize(("words_", "expected"), [(0, 0.0), (1, 0.5), (2, 1.0), (4, 1.0), (6, 0.5), (9, 0.0)])
def test_length_falls_beyond_its_bounds(words_: int, expected: float) -> None:
    assert value("word " * words_, type="length", at_least=2, at_most=4) == expected


@pytest.mark.parametrize(("calls", "expected"), [(0, 1.0), (4, 1.0), (6, 0.5), (8, 0.0), (20, 0.0)])
def test_call_budget_falls_to_0_at_twice_the_budget(calls: int, expected: float) -> None:
    assert graded(calls=calls, type="call_budget", at_most=4).value == expected


def test_tool_use_counts_the_models_tool_calls() -> None:
    tools = ("search", "search", "add")
    assert graded(tools=tools, type="tool_use", tool="search").value == 1.0
    assert graded(tools=tools, type="tool_use", tool="search", at_most=1).value == 0.0
    assert graded(tools=tools, type="tool_use", tool="sub", at_least=0, at_most=0).value == 1.0
    assert graded(tools=tools, type="tool_use", at_least=3).explanation == "3 calls of any tool"


def test_the_reward_line_is_a_component() -> None:
    component = Component.model_validate({"name": "outcome", "from": "agent"})
    assert grade(component, AttemptFacts({}, "", 0.25)).value == 0.25


def test_feedback_is_combined_and_none_is_a_failure() -> None:
    facts = AttemptFacts({}, "", feedback={"thumbs": [1.0, 1.0, 0.25]}, waited_seconds=60.0)

    def found(name: str, combine: str) -> Grade:
        return grade(Component.model_validate({"name": name, "from": "feedback", "combine": combine}), facts)

    assert found("thumbs", "mean") == Grade(ComponentState.SCORED, 0.75, None, "mean of 1, 1, 0.25")
    assert found("thumbs", "last").value == 0.25
    event = Component.model_validate({"name": "quality", "from": "otlp"})
    assert grade(event, facts).explanation == "no evaluation event named 'quality' came"
    assert found("stars", "mean") == Grade(ComponentState.FAILED, explanation="no feedback within 60 s")


@pytest.mark.parametrize(
    "grader",
    [
        {"type": "token_f1", "reference": "a b c"},
        {"type": "string_check", "reference": "a", "normalise": "squad"},
        {"type": "numeric", "reference": "1"},
        {"type": "choice", "reference": "A", "options": ["A", "B"]},
        {"type": "length"},
        {"type": "json_schema", "json_schema": {"type": "object"}},
        {"type": "json_path", "path": "$..a", "reference": "1"},
        {"type": "text_similarity", "reference": "ab " * 3_000, "measure": "fuzzy"},
        {"type": "text_similarity", "reference": "a b c"},
    ],
)
@pytest.mark.parametrize("piece", ["7", "1,", "{", "A ", '{"a": ', "ab 1/2 "])
def test_a_megabyte_is_graded_in_linear_time(grader: dict[str, Any], piece: str) -> None:
    output = piece * (3_000_000 // len(piece))
    began = time.process_time()
    graded(output, **grader)
    assert time.process_time() - began < 5


def test_a_long_explanation_is_cut() -> None:
    found = graded("x" * 10_000, {"a": "y" * 10_000}, type="token_f1", reference="{task.a}")
    assert len(found.explanation) == len(found.extracted or "") == 500
