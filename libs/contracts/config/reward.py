"""The sources of a rollout's reward: named components, and their total."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator

from leyden.libs.contracts.config.document import BrokenDocument, Document
from leyden.libs.contracts.config.graders import CODE, FIELD, Container, Grader, RelativeModel, ScoreModel


class Gate(Document):
    """A condition on a component without which its rollout earns nothing."""

    at_least: float
    """The smallest value that passes. Below it the total is at most 0, so that no failed gate ends a loss."""


class Component(Document):
    """One number of a rollout, with its source: `from: agent`, `from: feedback`, or a grader."""

    model_config = ConfigDict(serialize_by_alias=True)

    name: Annotated[str, Field(max_length=100, pattern=r"^[A-Za-z_][\w.-]*$")]
    weight: float = Field(default=1.0, ge=-1e3, le=1e3)
    """The factor of the component in the total. 0 without a gate: a metric, which earns and excludes nothing."""
    source: Literal["agent", "feedback", "otlp"] | None = Field(default=None, alias="from")
    """`agent`: the reward line, which is the agent's last line with `reward`. `feedback`: values that people and other
    programs give to the rollout while it waits (`reward.wait`). `otlp`: evaluation events in the agent's telemetry."""
    combine: Literal["mean", "last"] = "mean"
    """The value of `from: feedback` or `from: otlp` where several came."""
    grader: Grader | None = None
    """A grader of the platform, which the agent cannot reach."""
    gate: Gate | None = None
    """The total is at most 0 while the value is below a bound."""

    @property
    def counts(self) -> bool:
        """Whether the total depends on the component."""
        return self.weight != 0 or self.gate is not None

    @model_validator(mode="after")
    def _has_one_source(self) -> Component:
        if (self.source is None) == (self.grader is None):
            raise ValueError(
                f"component {self.name!r} needs one source: write from: agent, from: feedback, from: otlp, or"
                " grader: {type: …}"
            )
        if self.combine != "mean" and self.source not in ("feedback", "otlp"):
            raise ValueError(f"component {self.name!r}: combine acts on from: feedback and from: otlp alone: remove it")
        return self


class Wait(Document):
    """The wait for feedback."""

    seconds: float = Field(ge=0, le=30 * 86_400)
    """A rollout whose `from: feedback` components have no value waits for so long, counted from its agent's end. After
    that the component has failed."""
    values: int = Field(default=1, ge=1, le=1000)
    """The wait ends once each component has so many values. After `seconds` fewer count, too. With more than can come,
    every rollout waits for all of its time."""


class Reward(Document):
    """Weighted components make the rollout's reward, known once every component is graded."""

    components: list[Component] = Field(min_length=1, max_length=50)
    """In the order of screens."""
    wait: Wait | None = None
    """Needed with `from: feedback`."""
    total: Literal["weighted_sum", "weighted_mean"] = "weighted_sum"
    """`weighted_sum` adds weight times value; `weighted_mean` divides that by the sum of the weights of the components
    that have a value. A component that is not applicable is in neither."""
    clip: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """The smallest and the largest total, after gates. Values and contributions of components stay as they are."""
    missing: Literal["exclude", "zero", "renormalise"] = "exclude"
    """A component with a weight that failed after all tries: `exclude` leaves the rollout out of its group and of all
    means, `zero` lets the component earn 0, `renormalise` scales the others' sum up to the whole weight, signs left
    out: beside weights 1 and -0.2, a lost reward makes the penalty -1.2. A failed gate has passed for nobody: with
    `renormalise`, too, it excludes the rollout."""

    judge_tokens: int | None = Field(default=None, ge=1, le=10**15)
    """The most tokens that the run's judges may use, questions and answers together. Then attempts wait for their
    grades, and the run has the alarm `judge_budget`; those that judges read at that moment go beyond it. Null: no
    bound."""
    judge_cost: float | None = Field(default=None, gt=0, le=1e12)
    """The most money that the run's judges may cost, in the currency of the prices in GRADER_PROVIDERS; as
    `judge_tokens`. A component whose provider has no price fails. Null: no bound."""

    @property
    def has_agents_line(self) -> bool:
        """Whether a component is the agent's reward line."""
        return any(one.source == "agent" for one in self.components)

    @property
    def has_code(self) -> bool:
        """Whether a grader is code of the operator's own."""
        return any(isinstance(one.grader, CODE) for one in self.components)

    @property
    def needs_service(self) -> bool:
        """Whether a grader is code, a container or a judge, which the service `grader` alone runs or asks."""
        return any(isinstance(one.grader, (*CODE, Container, ScoreModel, RelativeModel)) for one in self.components)

    @property
    def compares(self) -> bool:
        """Whether a judge compares the attempts of a group."""
        return any(isinstance(one.grader, RelativeModel) for one in self.components)

    @property
    def feedback_names(self) -> list[str]:
        """The components that people and other programs give."""
        return [one.name for one in self.components if one.source == "feedback"]

    @property
    def needs_agents_line(self) -> bool:
        """Whether an attempt without a reward line has failed."""
        return any(one.source == "agent" and one.counts for one in self.components)

    def task_fields(self) -> list[tuple[str, tuple[str, ...]]]:
        """The paths of the task's fields that graders read, each after the place in the document that names it."""
        return [
            (f"reward.components.{place}.grader.{name}", tuple(path.split(".")[1:]))
            for place, one in enumerate(self.components)
            if one.grader is not None
            for name, text in one.grader.model_dump(include={"output", "reference", "rubric", "database"}).items()
            for path in FIELD.findall(text or "")
            if path.startswith("task.")
        ]

    @model_validator(mode="after")
    def _names_are_unique(self) -> Reward:
        names = [one.name for one in self.components]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"components: {double} name two components each: give each a name of its own")
        return self

    @model_validator(mode="after")
    def _feedback_has_a_wait(self) -> Reward:
        if self.feedback_names and self.wait is None:
            raise ValueError(f"wait: feedback ({self.feedback_names[0]!r}) needs a time: write wait: {{seconds: 3600}}")
        if self.wait is not None and not self.feedback_names:
            raise ValueError("wait: no component is from: feedback, so that nothing waits: remove it")
        return self

    @model_validator(mode="after")
    def _a_budget_has_judges(self) -> Reward:
        judges = [one for one in self.components if isinstance(one.grader, ScoreModel | RelativeModel)]
        for name in ("judge_tokens", "judge_cost"):
            if getattr(self, name) is not None and not judges:
                raise ValueError(f"{name}: no component is a judge, so that nothing uses tokens: remove it")
        return self

    @model_validator(mode="after")
    def _total_is_defined(self) -> Reward:
        negative = [one.name for one in self.components if one.weight < 0]
        if self.total == "weighted_mean" and negative:
            raise ValueError(f"components: {negative} have negative weights, and a mean has none: write weighted_sum")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip: {self.clip} leaves one total or none: write the smaller number first")
        return self

    @model_validator(mode="after")
    def _something_counts(self) -> Reward:
        if not any(one.weight for one in self.components):
            raise ValueError("components: every weight is 0, so that no rollout earns anything: give one a weight")
        return self


def with_line(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a run's document whose runner reads the reward line if a component is `from: agent`, and else does not.

    A value of the document's own stays, for `checks` to compare.
    """
    reward, runner = document.get("reward"), document.get("runner", {})
    components = reward.get("components") if isinstance(reward, Mapping) else None
    if not isinstance(components, list) or not isinstance(runner, Mapping):
        return document
    has_line = any(isinstance(one, Mapping) and one.get("from") == "agent" for one in components)
    return {**document, "runner": {"stdout_reward": has_line, **runner}}


def stored_reward(document: object) -> Reward:
    """Returns the reward of a stored document, without what a newer version has added to it.

    Raises: BrokenDocument
    """
    try:
        return Reward.model_validate(document, extra="ignore")
    except ValidationError as error:
        raise BrokenDocument.of(error, "reward") from error
