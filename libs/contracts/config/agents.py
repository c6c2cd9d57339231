"""The command that runs an agent, and the variables that it may not set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator, model_validator

from leyden.libs.contracts.config.document import BrokenDocument, Document, FolderPath, stored_object
from leyden.libs.contracts.placeholders import task_fields

Argument = Annotated[str, Field(max_length=100_000, pattern=r"^[^\x00]*$")]
"""A word of a command or a value of its environment; Linux limits one to 128 KiB."""
VariableName = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^=\x00]+$")]


def _below_the_workspace(pattern: str) -> str:
    if pattern.startswith("/") or not {"", ".", ".."}.isdisjoint(pattern.split("/")):
        raise ValueError(f"{pattern!r}: write a path below the working folder, such as report.md, src/*.py or src/**")
    return pattern


ArtifactPattern = Annotated[FolderPath, Field(max_length=255), AfterValidator(_below_the_workspace)]
"""Names with `*`, `?` and `[…]`; `**` is any number of folders."""

RESERVED_NAMES = frozenset(
    {
        *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_CUSTOM_HEADERS"),
        *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_CUSTOM_HEADERS"),
        *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES", "TRACEPARENT"),
    }
)
"""Variables of agents that carry the platform's addresses, keys and ids, beside those in `LEYDEN_`."""


def reserved_names(names: Iterable[str]) -> list[str]:
    """Those that the platform sets in every agent's environment."""
    return sorted(name for name in names if name.startswith("LEYDEN_") or name in RESERVED_NAMES)


class Agent(Document):
    """The command that runs the agent once; the environment holds its task and its endpoints."""

    command: list[Argument] = Field(min_length=1, max_length=256)
    """Program and arguments, no shell. `{python}` as first word is the runner's own interpreter. `{task.question}` is
    that field of the task, `{task.user.name}` one of an object in it, `{task}` the complete task as JSON, and
    `{{task.question}}` the text `{task.question}`."""
    environment: dict[VariableName, Argument] = Field(default_factory=dict, max_length=256)
    """Variables added to the agent's environment, with placeholders as in `command`. Names that the platform sets
    itself are refused."""
    directory: Annotated[FolderPath, Field(pattern=r"^/[^\x00]*$")] | None = None
    """A folder whose files are copied into the attempt's working folder; an absolute path on the runner's machine."""

    task: Literal["environment", "stdin"] = "environment"
    """The way of the task to the agent: `LEYDEN_TASK` and `LEYDEN_TASK_FILE` alone, or as JSON on stdin, too. In a pod
    the image needs `/bin/sh` for stdin."""
    task_file: Annotated[FolderPath, Field(max_length=255)] | None = None
    """One more file with the task as JSON: a name in the working folder, such as `input.json`, in place of a file of
    `directory` with that name; in a pod an absolute path, such as `/app/input.json`."""

    artifacts: list[ArtifactPattern] = Field(default_factory=list, max_length=64)
    """Files of the working folder that are kept when the attempt ends, for graders and people: `report.md`, `src/**`.
    At most 200, and 2 MiB in sum, in the order of their paths; what is cut or left out is marked, as links are."""

    hosted_tools: Literal["leave_out", "refuse"] = "leave_out"
    """Tools in a request that a vendor's server would run, such as `web_search`: `leave_out` does not offer them to the
    model, and the call's record names them; `refuse` answers such a request with status 400."""

    def task_fields(self) -> list[tuple[str, ...]]:
        """The paths of the task's fields that placeholders name."""
        return task_fields([*self.command, *self.environment.values()])

    @model_validator(mode="after")
    def _platform_names_are_reserved(self) -> Agent:
        if reserved := reserved_names(self.environment):
            raise ValueError(f"environment sets {reserved}, which the platform sets itself: remove them")
        return self


class ExternalAgent(Agent):
    """An agent that the platform does not start (`runner.type: external`): clients get its environment."""

    command: list[Argument] = Field(default_factory=list, max_length=0)
    directory: None = None
    task: Literal["environment"] = "environment"
    task_file: None = None
    artifacts: list[ArtifactPattern] = Field(default_factory=list, max_length=0)

    @field_validator("command", "directory", "task", "task_file", "artifacts", mode="before")
    @classmethod
    def _clients_start_it(cls, value: Any) -> Any:
        if value and value != "environment":
            raise ValueError("clients start the agents of runner.type 'external': remove it, or runner.type")
        return value


class _External(BaseModel):
    agent: ExternalAgent = Field(default_factory=ExternalAgent)


def with_external_agent(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's document with the agent of `runner.type: external`; others as they are.

    Raises: ValidationError: a field that starts an agent, with its path
    """
    if not is_external(document):
        return document
    return {**document, "agent": _External.model_validate(document).agent}


def stored_agent(document: object) -> Agent:
    """Returns the agent of a stored document, without what a newer version has added to it.

    Raises: BrokenDocument
    """
    stored = stored_object(document)
    kind = ExternalAgent if is_external(stored) else Agent
    try:
        return kind.model_validate(stored.get("agent"), extra="ignore")
    except ValidationError as error:
        raise BrokenDocument.of(error, "agent") from error


def is_external(document: Mapping[str, Any]) -> bool:
    """Whether the platform does not start the agents of a run's document."""
    runner = document.get("runner")
    return isinstance(runner, Mapping) and runner.get("type") == "external"
