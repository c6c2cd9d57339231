"""An operator's bounds on what a run may ask for: images of agents; secrets, nodes, tolerations, resources of pods."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase

from pydantic import BaseModel, ConfigDict, Field

from leyden.libs.contracts.config import ContainerRunner, KubernetesRunner
from leyden.libs.contracts.config.document import LabelName, Quantity, Resources
from leyden.libs.contracts.config.graders import Container

VALUE = "rollouts.allow"
"""The chart's value that holds the rules."""
SETTING = "API_AGENT_RULES"
"""The setting that holds them on one machine."""
_QUANTITY = re.compile(r"([0-9.]+)(m|k|[MGTPE]i?|Ki)?")


class AgentRules(BaseModel):
    """The rules. Patterns are those of file names: `registry.example/*` allows every image of a registry."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    secrets: tuple[str, ...] = ()
    """Patterns of the Secrets that a run may give to its agents; none by default."""
    images: tuple[str, ...] = ("*",)
    """Patterns of images, of containers on one machine as of pods."""
    nodes: tuple[str, ...] = ("*",)
    """Patterns of `label=value` in a node selector."""
    tolerations: tuple[str, ...] = ("*",)
    """Patterns of the keys of taints; a toleration of every taint has the key `*`."""
    attempts_per_pod: int = Field(default=1, ge=1)
    """The most attempts of a run that may share a pod; 1: none do."""
    limits: Mapping[LabelName, Quantity] = Field(default_factory=dict)
    """The most of a resource that a run may request, or limit its agents to; others are unbounded."""

    def refusals(self, runner: ContainerRunner | KubernetesRunner) -> list[str]:
        """One sentence for each part of the document that the operator has not allowed."""
        if isinstance(runner, ContainerRunner):
            return list(self._names({"images": [runner.image]}, SETTING))
        asked = {
            "secrets": [one.name for one in runner.secrets.values()],
            "images": [runner.image],
            "nodes": [f"{name}={value}" for name, value in runner.node_selector.items()],
            "tolerations": [one.key or "*" for one in runner.tolerations],
        }
        shared = f"runner.attempts_per_pod {runner.attempts_per_pod} is above {self.attempts_per_pod}"
        many = [f"{shared} (rollouts.attemptsPerPod)"] if runner.attempts_per_pod > self.attempts_per_pod else []
        return [*self._names(asked), *self._amounts("runner.resources", runner.resources), *many]

    def refusals_of_grader(self, path: str, grader: Container) -> list[str]:
        """The same for a grader's image and resources. Args: path: of the grader in the document"""
        return [*self._names({"images": [grader.image]}), *self._amounts(f"{path}.resources", grader.resources)]

    def _names(self, asked: Mapping[str, list[str]], place: str = VALUE) -> Iterator[str]:
        for kind, names in asked.items():
            patterns: tuple[str, ...] = getattr(self, kind)
            for name in sorted(set(names)):
                if not any(fnmatchcase(name, pattern) for pattern in patterns):
                    allowed = ", ".join(patterns) or "none"
                    yield f"{name} is not among the {kind} that runs may name ({place}.{kind}: {allowed})"

    def _amounts(self, path: str, resources: Resources) -> Iterator[str]:
        for part, amounts in (("requests", resources.requests), ("limits", resources.limits)):
            for name, amount in amounts.items():
                most = self.limits.get(name)
                if most is not None and quantity(amount) > quantity(most):
                    yield f"{path}.{part}: {amount} of {name} is above {most} ({VALUE}.limits)"


def quantity(text: str) -> float:
    """The number that a quantity of Kubernetes stands for, such as 0.5 for `500m`."""
    found = _QUANTITY.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no quantity, such as 500m or 2Gi")
    number, unit = float(found[1]), found[2] or ""
    if unit == "m":
        return number / 1000
    base = 1024 if unit.endswith("i") else 1000
    return number * float(base ** (" KMGTPE".index(unit[0].upper()) if unit else 0))
