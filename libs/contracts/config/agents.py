"""The commands that run the agents of a run, each with its runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, field_validator, model_validator

from leyden.libs.contracts.config.document import Argument, BrokenDocument, Document, FolderPath, stored_object
from leyden.libs.contracts.config.runners import (
    OF_REWARDS,
    ProcessRunner,
    RunnerConfig,
    VariableName,
    reserved_names,
    stored_runner,
)
from leyden.libs.contracts.placeholders import task_fields

AgentName = Annotated[str, Field(max_length=100, pattern=r"^\w[\w.-]*$")]


def _below_the_workspace(pattern: str) -> str:
    if pattern.startswith("/") or not {"", ".", ".."}.isdisjoint(pattern.split("/")):
        raise ValueError(f"{pattern!r}: write a path below the working folder, such as report.md, src/*.py or src/**")
    return pattern


ArtifactPattern = Annotated[FolderPath, Field(max_length=255), AfterValidator(_below_the_workspace)]
"""Names with `*`, `?` and `[…]`; `**` is any number of folders."""


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


class NamedAgent(Agent):
    """One of several agents of a run. It plays whole groups: all siblings of a task are its own."""

    name: AgentName
    """The name by which people see and filter its rollouts."""
    command: list[Argument] = Field(default_factory=list, max_length=256)
    """As that of `agent`: required, and none with `runner.type: external`."""
    runner: RunnerConfig = Field(default_factory=ProcessRunner)
    """Its fields go over those of the run's `runner`; with another `type` it has the fields that it names alone. Left
    out, it is the run's `runner`, which alone says `stdout_reward` and `grant_reward`."""

    @model_validator(mode="before")
    @classmethod
    def _is_one_of_its_runner(cls, document: Any) -> Any:
        if isinstance(document, Mapping):
            _kind_of(document).model_validate(_fields_of(document))
        return document


@dataclass(frozen=True)
class GroupAgent:
    """An agent of a run, with its runner, as its groups have it."""

    name: str | None
    """Null for the one agent of a run without `agents`."""
    path: str
    """Its place in the document: `agent`, or `agents.1` for the second one."""
    agent: Agent
    runner: RunnerConfig

    @property
    def runner_path(self) -> str:
        """The place of its runner in the document."""
        return "runner" if self.name is None else f"{self.path}.runner"


class _External(BaseModel):
    agent: ExternalAgent = Field(default_factory=ExternalAgent)


def with_external_agent(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's document with the agent of `runner.type: external`; others as they are.

    Raises: ValidationError: a field that starts an agent, with its path
    """
    if document.get("agents") or not is_external(document):
        return document
    return {**document, "agent": _External.model_validate(document).agent}


def with_runners(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's document each of whose `agents` has its complete runner; others as they are."""
    agents, runner = document.get("agents"), document.get("runner", {})
    if not isinstance(agents, list) or not isinstance(runner, Mapping):
        return document
    return {**document, "agents": [_with_runner(one, runner) for one in agents]}


def _with_runner(agent: Any, runner: Mapping[str, Any]) -> Any:
    own = agent.get("runner", {}) if isinstance(agent, Mapping) else None
    if not isinstance(own, Mapping):
        return agent
    kinds = [one.get("type", "process") for one in (runner, {**runner, **own})]
    shared = runner if kinds[0] == kinds[1] else {name: runner[name] for name in OF_REWARDS if name in runner}
    return {**agent, "runner": {**shared, **own}}


def stored_agent(document: object, name: str | None) -> GroupAgent:
    """Returns an agent of a stored document, without what a newer version has added to it.

    Args:   name: as the agent's group has it
    Raises: BrokenDocument
    """
    stored = stored_object(document)
    if name is None:
        return GroupAgent(None, "agent", _read(stored, stored.get("agent"), "agent"), stored_runner(stored))
    agents = stored.get("agents")
    named = [one if isinstance(one, Mapping) else {} for one in agents] if isinstance(agents, list) else []
    found = next((number for number, one in enumerate(named) if one.get("name") == name), None)
    if found is None:
        raise BrokenDocument(f"the stored document does not parse: agents: it has no agent {name!r}")
    path, own = f"agents.{found}", named[found]
    return GroupAgent(name, path, _read(own, _fields_of(own), path), stored_runner(own, path))


def _read(document: Mapping[str, Any], agent: Any, path: str) -> Agent:
    """Args: document: of the run or of a named agent: it has the runner"""
    try:
        return _kind_of(document).model_validate(agent, extra="ignore")
    except ValidationError as error:
        raise BrokenDocument.of(error, path) from error


def _kind_of(document: Mapping[str, Any]) -> type[Agent]:
    return ExternalAgent if is_external(document) else Agent


def _fields_of(agent: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a named agent that every agent has."""
    return {name: value for name, value in agent.items() if name in Agent.model_fields}


def is_external(document: Mapping[str, Any]) -> bool:
    """Whether the platform does not start the agent that has this runner."""
    runner = document.get("runner")
    return isinstance(runner, Mapping) and runner.get("type") == "external"
