"""The grader of structured answers."""

from __future__ import annotations

import json

import jsonschema_rs

from leyden.libs.contracts.config import graders
from leyden.libs.grading.facts import AttemptFacts, Scored, text_of


def json_schema(grader: graders.JsonSchema, facts: AttemptFacts) -> Scored:
    """The last JSON object of the output counts where the grader reads the output as it is."""
    if grader.output == "{output}" and facts.last_object is not None:
        text = json.dumps(facts.last_object)
    else:
        text = text_of(grader.output, facts)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return 0.0, text, f"no JSON: {error}"
    # A broken schema raises: that is the document's fault, and no answer's.
    validator = jsonschema_rs.validator_for(grader.json_schema)
    wrong = next(validator.iter_errors(value), None)
    if wrong is None:
        return 1.0, text, "has the schema"
    return 0.0, text, f"at /{'/'.join(map(str, wrong.instance_path))}: {wrong.message}"
