"""The graders: each makes a number of what an attempt left behind and of its task.

Texts of the document hold fields in braces: `{output}` is the agent's standard output, `{output.answer}` a field of its
last line that is a JSON object, `{task.answer}` a field of the task. A text that is one field may hold a list of the
task: the best of its references counts.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from leyden.libs.contracts.config.document import Argument, Document, FolderPath, PinnedImage, Resources, Word
from leyden.libs.contracts.json_path import segments_of

FIELD = re.compile(r"\{([A-Za-z_]\w*(?:\.[^{}.\x00]+)*)\}")
"""A field in a text: a root, and names of fields or positions of lists below it."""
ROOTS = ("output", "task")
DRAFTS = frozenset(
    {
        *(f"http://json-schema.org/draft-{number}/schema" for number in ("04", "06", "07")),
        *(f"https://json-schema.org/draft/{year}/schema" for year in ("2019-09", "2020-12")),
    }
)
"""Drafts of JSON Schema whose own schemas validators have; they would fetch another one."""


def _fields_exist(template: str) -> str:
    for path in FIELD.findall(template):
        if path.partition(".")[0] not in ROOTS:
            raise ValueError(f"there is no field {{{path}}}: write {{output}}, {{output.NAME}} or {{task.NAME}}")
    return template


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    # The latter of {99999999999999999999}, and of brackets in a thousand brackets.
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern is no regular expression: {error}") from error
    return pattern


def _stays_here(schema: dict[str, Any]) -> dict[str, Any]:
    """Refuses references to other documents and other drafts: validators fetch them from an address in the schema."""
    todo: list[Any] = [schema]
    while todo:
        part = todo.pop()
        if isinstance(part, dict):
            draft = part.get("$schema")
            if isinstance(draft, str) and draft.rstrip("#") not in DRAFTS:
                raise ValueError(
                    f"$schema {draft[:100]!r} is none of the drafts 4, 6, 7, 2019-09 and 2020-12: remove it"
                )
            for name in ("$ref", "$dynamicRef"):
                reference = part.get(name)
                if isinstance(reference, str) and not reference.startswith("#"):
                    raise ValueError(f"{name} {reference[:100]!r} leaves the schema: write the definition below $defs")
        todo += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return schema


Template = Annotated[str, Field(min_length=1, max_length=10_000), AfterValidator(_fields_exist)]
"""A text with fields."""
Pattern = Annotated[str, Field(min_length=1, max_length=1_000), AfterValidator(_compiles)]


class _OfText(Document):
    output: Template = "{output}"
    """The graded text."""


class _Compared(_OfText):
    reference: Template
    """The expected answer, such as `{task.answer}`. A task without it makes the component `not_applicable`."""


class StringCheck(_Compared):
    """1 where the text has the relation to the reference, else 0."""

    type: Literal["string_check"]
    operation: Literal["eq", "ne", "like", "ilike"] = "eq"
    """`eq` equal, `ne` unequal, `like` contains the reference, `ilike` contains it in any case."""
    normalise: Literal["none", "case", "squad"] = "none"
    """Before the comparison: `none` strips spaces at the ends, `case` ignores case too, and `squad` also removes
    punctuation, articles and repeated spaces."""


class TokenF1(_Compared):
    """The F1 of the words that text and reference share, after SQuAD's normalisation."""

    type: Literal["token_f1"]


class Numeric(_Compared):
    """1 where the last number of the text equals the reference, else 0. Reads `1,234.5`, `$5`, `12 %` (0.12),
    `-3e-4` and `1/2`."""

    type: Literal["numeric"]
    tolerance: float = Field(default=1e-6, ge=0)
    """The largest difference that is equal, as a share of the reference, or absolute for a reference within 1. Up to
    the default it is absolute for a whole reference, too: 1,000,001 is not 1,000,000."""


class Choice(_Compared):
    """1 where the last of the options in the text is the reference, else 0. An option stands alone, in any case. A
    small letter before another word, as in `a better fit`, counts as one only where the text has no other option."""

    type: Literal["choice"]
    options: list[Word] = Field(min_length=2, max_length=100)
    """The answers from which the agent chooses, such as A, B, C and D."""


class Regex(_OfText):
    """1 where the pattern is found in the text, else 0. `^` and `$` match at each line."""

    type: Literal["regex"]
    pattern: Pattern
    """A regular expression of Python. A text for which it takes too long counts as the worst: 0, or 1 where the
    component's weight is negative."""


class JsonSchema(_OfText):
    """1 where the text is JSON of the schema, else 0. Without another `output`, the last JSON object counts."""

    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], AfterValidator(_stays_here)] = Field(max_length=1_000)
    """A JSON Schema (draft 2020-12 without `$schema`, which may name draft 4, 6, 7 or 2019-09). References stay in the
    schema, such as `#/$defs/city`."""


def _is_path(path: str) -> str:
    segments_of(path)
    return path


class JsonPath(_OfText):
    """1 where a value at the path is the reference, else 0. Without another `output`, the last JSON object counts."""

    type: Literal["json_path"]
    path: Annotated[str, Field(min_length=1, max_length=1_000), AfterValidator(_is_path)]
    """A path of RFC 9535 such as `$.trip.cities[0]`, `$.items[*].id` or `$..city`: names, positions, `*`, and `..`
    once. One of the values that it reaches must be the reference."""
    reference: Template | None = None
    """The expected value, such as `{task.city}`: numbers and objects are compared as JSON. Null: any value that is not
    null will do. A task without it makes the component `not_applicable`."""


class TextSimilarity(_Compared):
    """The likeness of text and reference, from 0 to 1: 2 · shared / (both lengths), where shared is the length of the
    longest subsequence of both. The last 50,000 characters of each text count."""

    type: Literal["text_similarity"]
    measure: Literal["rouge_l", "fuzzy"] = "rouge_l"
    """`rouge_l`: of words in lower case, which is the F1 of ROUGE-L. `fuzzy`: of characters, as the
    `ratio` of rapidfuzz."""


class Length(_OfText):
    """1 for a length within the bounds; beyond them it falls, to 0 at no text or at twice the upper bound."""

    type: Literal["length"]
    unit: Literal["characters", "words"] = "words"
    at_least: int = Field(default=0, ge=0, le=10**6)
    at_most: int | None = Field(default=None, ge=1, le=10**6)

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> Length:
        if self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(f"at_least {self.at_least} exceeds at_most {self.at_most}: no text could earn anything")
        return self


class CallBudget(Document):
    """1 where the attempt made at most so many model calls; beyond them it falls, to 0 at twice the budget."""

    type: Literal["call_budget"]
    at_most: int = Field(ge=1, le=10**6)


class ToolUse(Document):
    """1 where the model called the tool so often, else 0. The stored answers of the model count, which no agent can
    forge."""

    type: Literal["tool_use"]
    tool: Word | None = None
    """Null: any tool."""
    at_least: int = Field(default=1, ge=0, le=10**6)
    at_most: int | None = Field(default=None, ge=0, le=10**6)

    @model_validator(mode="after")
    def _bounds_leave_room(self) -> ToolUse:
        if self.at_most is not None and self.at_least > self.at_most:
            raise ValueError(
                f"at_least {self.at_least} exceeds at_most {self.at_most}: write at_least 0 for a tool that should not"
                " be used"
            )
        return self


class SqlResult(_Compared):
    """1 where the query in the text has the result of the reference query, else 0. Both read a database that SQL text
    makes in memory. A query that fails, writes or reaches a limit earns 0; a broken reference makes the component
    `failed`."""

    type: Literal["sql_result"]
    database: Template
    """SQL text that creates tables and inserts rows (SQLite's dialect), such as `{task.database}`; `sqlite3 FILE
    .dump` writes it. Each grade builds the database anew: keep it to some hundred rows. A task without it makes the
    component `not_applicable`."""
    seconds: float = Field(default=1.0, gt=0, le=2.0)
    """Limit on each of the two queries."""
    rows: int = Field(default=1_000, ge=1, le=100_000)
    """The most rows of a reference. The agent's query ends after one more row than the reference has."""


def _is_rubric(rubric: str) -> str:
    if any(path.partition(".")[0] == "output" for path in FIELD.findall(rubric)):
        raise ValueError("the rubric holds {output}: write fields of the task alone, and the judged text as `output`")
    return rubric


class _Judged(_OfText):
    provider: Word
    """A server of OpenAI's chat completions by its name in the grader's `GRADER_PROVIDERS`."""
    model: Word
    """The name of the provider's model."""
    rubric: Annotated[Template, AfterValidator(_is_rubric)]
    """The rules by which the model scores, with fields of the task such as `{task.question}`. A task without one makes
    the component `not_applicable`."""
    votes: int = Field(default=1, ge=1, le=9)
    """Answers whose mean counts. Each is a call."""


class ScoreModel(_Judged):
    """A model's score by a rubric, on the way from the lowest of its range (0) to the highest (1)."""

    type: Literal["score_model"]
    range: Annotated[list[float], Field(min_length=2, max_length=2)] = Field(default=[1.0, 5.0], validate_default=True)
    """The worst score and the best."""

    @model_validator(mode="after")
    def _range_has_a_length(self) -> ScoreModel:
        if self.range[0] >= self.range[1]:
            raise ValueError(f"range {self.range} has no best score above its worst: write the smaller number first")
        return self


class RelativeModel(_Judged):
    """A model's scores from 0 to 1 for the rollouts of a group, which it reads together. Attempts wait until all of
    their group have ended. Equal outputs have equal scores."""

    type: Literal["relative_model"]


class _Code(Document):
    directory: Annotated[FolderPath, Field(pattern=r"^/[^\x00]*$")] | None = None
    """A folder whose files are copied into the grader's working folder; an absolute path on the grader's machine, below
    one that the operator named (`leyden up --graders DIR`). Agents cannot read it."""
    timeout_seconds: float = Field(default=60.0, gt=0, le=3600)
    """Maximum wall time of one grading; then its processes end, and it has failed."""
    memory_bytes: int | None = Field(default=4 * 2**30, ge=2**24, le=2**60)
    """Resident memory of the grader's processes in sum; null for no limit."""
    network: bool = False
    """Whether the grader may open sockets."""


class PythonFunction(_Code):
    """The value that a Python function of your own returns for a task and the stored rollout: a number,
    `{"reward": number, "explanation": text, "extracted": text}`, or None where the component is not applicable."""

    type: Literal["python"]
    function: Annotated[str, Field(max_length=1_000, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*:[A-Za-z_]\w*$")]
    """`grade.py:score`, a file of `directory` and a function in it, or `package.module:score`. It is called with the
    task and the rollout, two dictionaries."""

    @model_validator(mode="after")
    def _a_file_has_a_folder(self) -> PythonFunction:
        path = self.function.partition(":")[0]
        if path.endswith(".py") and (self.directory is None or ".." in path.split("/")):
            raise ValueError(f"function: {path!r} is a file: write its folder as directory, and its path below that")
        if not path.endswith(".py") and ("/" in path or "-" in path):
            raise ValueError(f"function: {path!r} is neither: write grade.py:score or package.module:score")
        return self


class Command(_Code):
    """The value that a program of your own writes for a rollout, which it reads as JSON from stdin: a number,
    `{"reward": number, "explanation": text, "extracted": text}`, or null where the component is not applicable. It
    writes the value to `reward.json` in its working folder, or as the last line of stdout, and exits with 0."""

    type: Literal["command"]
    command: list[Argument] = Field(min_length=1, max_length=256)
    """Program and arguments, no shell. `{python}` as first word is the grader's own interpreter."""


class Container(Document):
    """The number that a container image of your own writes for a rollout, by Harbor's contract: a Job of the cluster
    runs it after the agent's end, with the stored trajectory in ATIF as `/logs/agent/trajectory.json`, beside
    `trajectories.json` (all conversations), `task.json` and `output.txt`. It writes `/logs/verifier/reward.json`,
    numbers by name, or `/logs/verifier/reward.txt`, one number. Its image holds the tests and a shell (`/bin/sh`)."""

    type: Literal["container"]
    image: PinnedImage
    """With a tag other than `latest`, or a digest."""
    command: list[Argument] = Field(default=["bash", "/tests/test.sh"], min_length=1, max_length=256)
    """Program and arguments, no shell. Its exit status does not matter; a signal is a failure."""
    key: Word | None = None
    """The name of the number in `reward.json`; null: `reward`, or the only one there."""
    timeout_seconds: float = Field(default=600.0, gt=0, le=86_400)
    """Maximum wall time of one grading; then its Job ends, and it has failed."""
    resources: Resources = Field(default_factory=Resources)
    """Added to those of the platform's pod template."""
    network: bool = False
    """Whether the container may open connections to the internet, if the operator allows it (chart:
    `grader.containers.allowInternet`). It reaches nothing of the platform."""


CODE = (PythonFunction, Command)
"""The graders that run the operator's own code on the grader's machine."""

Grader = Annotated[
    StringCheck
    | TokenF1
    | Numeric
    | Choice
    | Regex
    | JsonSchema
    | JsonPath
    | TextSimilarity
    | Length
    | CallBudget
    | ToolUse
    | SqlResult
    | ScoreModel
    | RelativeModel
    | PythonFunction
    | Command
    | Container,
    Field(discriminator="type"),
]
"""A grader, by `type`: a built-in function, a judge, code of the operator's own, or a container."""
