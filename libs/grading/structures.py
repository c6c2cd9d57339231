"""Graders of structured answers: a schema, and the value at a path."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Never

import jsonschema_rs

from leyden.libs.contracts.config import graders
from leyden.libs.contracts.json_path import segments_of, values_at
from leyden.libs.grading.facts import AttemptFacts, Scored, agents_json, shown, text_of, texts_of


def json_schema(grader: graders.JsonSchema, facts: AttemptFacts) -> Scored:
    """Holds if the JSON of the output has the schema."""
    # A broken schema raises: that is the document's fault, and no answer's.
    validator = _validator(grader.json_schema)
    text = _json_text(grader.output, facts)
    try:
        value = agents_json(text)
    except ValueError as error:
        return 0.0, text, f"no JSON: {error}"
    wrong = next(validator.iter_errors(value), None)
    if wrong is None:
        return 1.0, text, "has the schema"
    return 0.0, text, f"at /{'/'.join(map(str, wrong.instance_path))}: {wrong.message}"


def json_path(grader: graders.JsonPath, facts: AttemptFacts) -> Scored:
    """Holds if one of the values at the path is one of the references; null is no value."""
    references = [] if grader.reference is None else texts_of(grader.reference, facts)
    is_right = _is_one_of(references)
    segments = segments_of(grader.path)
    text = _json_text(grader.output, facts)
    try:
        document = agents_json(text)
    except ValueError as error:
        return 0.0, text, f"no JSON: {error}"
    found = [one for one in values_at(segments, document) if one is not None]
    if not found:
        return 0.0, None, f"nothing is at {grader.path}"
    if grader.reference is None:
        return 1.0, shown(found[0]), f"a value is at {grader.path}"
    expected = " or ".join(references)
    right = next(filter(is_right, found), None)
    if right is None:
        return 0.0, shown(found[0]), f"none of {len(found)} values at {grader.path} is {expected}"
    return 1.0, shown(right), f"at {grader.path} is {expected}"


def _validator(schema: dict[str, Any] | bool) -> jsonschema_rs.Validator:
    return jsonschema_rs.validator_for(schema, retriever=_refuse)


def _refuse(address: str) -> Never:
    raise ValueError(f"{address} is another document, which no grader fetches")


def _json_text(output: str, facts: AttemptFacts) -> str:
    """The last JSON object of the output counts where the grader reads the output as it is."""
    if output == "{output}" and facts.last_object is not None:
        return json.dumps(facts.last_object)
    return text_of(output, facts)


def _is_one_of(references: Sequence[str]) -> Callable[[object], bool]:
    """Tells whether a reference is a value's text or its JSON, so that 4 is 4.0 and no order of names counts."""
    texts = {one.strip() for one in references}
    constants = []
    for one in references:
        with suppress(ValueError):
            constants.append({"const": agents_json(one)})
    # An `enum` would take 10**30 for another number than 10**30.
    validator = _validator({"anyOf": constants} if constants else False)

    def is_right(value: object) -> bool:
        return value.strip() in texts if isinstance(value, str) else validator.is_valid(value)

    return is_right
