"""The document of a run: its parts, its recipe, and the documents of its further policies."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator

from leyden.libs.contracts.config import checks
from leyden.libs.contracts.config.agents import Agent, GroupAgent, NamedAgent, with_external_agent, with_runners
from leyden.libs.contracts.config.algorithms import Algorithm, PpoClip
from leyden.libs.contracts.config.computation import Computation, Device
from leyden.libs.contracts.config.credit import Credit
from leyden.libs.contracts.config.document import DEFAULT_POOL, BrokenDocument, Document, FolderPath, PoolName, Word
from leyden.libs.contracts.config.evaluation import EvaluationPlan
from leyden.libs.contracts.config.policies import EmbeddingModel, Policy, Role
from leyden.libs.contracts.config.rates import usual_rate, with_rate
from leyden.libs.contracts.config.reward import Reward, with_line
from leyden.libs.contracts.config.runners import ProcessRunner, RunnerConfig
from leyden.libs.contracts.config.sampling import Sampling
from leyden.libs.contracts.config.training import Optimizer, Training
from leyden.libs.contracts.recipes import RECIPES, expanded


class RunConfig(Document):
    """The body of `POST /v1/runs`."""

    name: str = Field(min_length=1, max_length=200, pattern=r"^[\w][\w .:-]*$")
    recipe: Word | None = None
    """Settings to begin with (`leyden recipes`): the document overrides them. The stored one holds all values and no
    recipe."""
    dataset: Word
    """Id or name of the training dataset."""
    agent: Agent | None = None
    """The run's one agent. With `runner.type: external` it may be left out, and has no command."""
    agents: list[NamedAgent] = Field(default_factory=list, max_length=20)
    """Several agents in place of `agent`, which share tasks and policies. Each group of training is played by one of
    them, in turn by the group's number; an evaluation plays each task with each of them."""
    model: FolderPath | None = None
    """Absolute folder of the base model (Hugging Face format), no id of the Hub; null for the model of the pool.
    Its tokens and architecture are the pool's; its weights and chat template may be its own."""
    pool: PoolName = DEFAULT_POOL
    """The pool of engines that samples the run (`leyden pools`). Runs of one pool take turns."""
    runner: RunnerConfig = Field(default_factory=ProcessRunner)
    roles: list[Role] = Field(default_factory=list, max_length=100)
    """Names for the agents of a rollout that has several, in the order in which they are tried."""
    train: list[Word] | None = Field(default=None, max_length=100)
    """The roles whose calls train; calls of other roles, or of none, stay context. Null: all calls train."""
    policies: dict[Word, Policy] = Field(default_factory=dict, max_length=20)
    """Further models of the run by name, each for the calls of the roles that name it."""
    embeddings: EmbeddingModel | None = None
    """The model of agents' embeddings. Null: the server of the gateway's `GATEWAY_EMBEDDINGS_URL`, else the bundled
    model where it is installed."""
    reward: Reward | None = None
    """The components of a rollout's reward. Null: the agent's reward line, and all that is given beside it."""
    sampling: Sampling = Field(default_factory=Sampling)
    credit: Credit = Field(default_factory=Credit)
    algorithm: Algorithm = Field(default_factory=PpoClip)
    optimizer: Optimizer = Field(default_factory=Optimizer)
    training: Training = Field(default_factory=Training)
    evaluation: EvaluationPlan | None = None

    @classmethod
    def stored(cls, document: Mapping[str, Any]) -> RunConfig:
        """Returns the run of a stored document, without what a newer version has added to it.

        Raises: BrokenDocument
        """
        try:
            return cls.model_validate(document, extra="ignore")
        except ValidationError as error:
            raise BrokenDocument.of(error) from error

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> RunConfig | BrokenDocument:
        """As `stored`; a document that does not parse is returned as such, so that it stops no other run."""
        try:
            return cls.stored(document)
        except BrokenDocument as broken:
            return broken

    def storable(self) -> dict[str, Any]:
        """Returns the document for the store. It leaves out values that the version before does not read, and that
        mean the same when they are absent."""
        document = self.model_dump(mode="json")
        if self.sampling.failure_reward is None:
            del document["sampling"]["failure_reward"]
        if self.agent is not None and not self.agent.artifacts:
            del document["agent"]["artifacts"]
        for name in ("agent", "embeddings", "reward"):
            if document[name] is None:
                del document[name]
        if self.embeddings is not None and self.embeddings.pool is None:
            del document["embeddings"]["pool"]
        if not self.agents:
            del document["agents"]
        # The trainer's device decides. The version before computes with its own defaults.
        for part, name in (("training", "precision"), ("training", "attention"), ("algorithm", "correction")):
            if document[part][name] is None:
                del document[part][name]
        if self.training.lora is not None and self.training.lora.base_dtype is None:
            del document["training"]["lora"]["base_dtype"]
        if self.credit.baseline.type != "monte_carlo":
            del document["credit"]["baseline"]["calls"], document["credit"]["baseline"]["samples"]
        if self.algorithm.critic is not None:
            # The rule does not act, and the version before takes its own default alone.
            del document["credit"]["rule"]
        return document

    @model_validator(mode="before")
    @classmethod
    def _begins_with_its_recipe(cls, document: Any) -> Any:
        if not isinstance(document, Mapping):
            return document
        return with_external_agent(with_runners(with_rate(with_line(expanded(document)))))

    @field_validator("recipe")
    @classmethod
    def _a_recipe_exists(cls, name: str | None) -> str | None:
        if name is not None:
            raise ValueError(f"there is no recipe {name!r}: write one of {', '.join(RECIPES)}")
        return name

    @model_validator(mode="after")
    def _parts_agree(self) -> RunConfig:
        checks.check_critic(self.algorithm, self.credit, self.sampling)
        baseline = self.credit.baseline
        checks.check_demonstrations(self.algorithm, self.sampling, self.training, baseline, self.policies)
        checks.check_distillation(self.algorithm, self.sampling, self.credit.baseline)
        checks.check_moving_average(self.credit.baseline, self.sampling, self.agents)
        checks.check_rerolls(self.credit, self.sampling, self.reward)
        checks.check_schedule(self.optimizer, self.training.steps)
        checks.check_refills(self.sampling, self.algorithm, self.credit.baseline)
        checks.check_narrow_band(self.algorithm, self.sampling)
        checks.check_stopping(self.training.early_stopping, self.evaluation)
        checks.check_number_of_evaluations(self.evaluation, self.training.steps)
        checks.check_roles(self.roles, self.train, self.credit.baseline)
        checks.check_policies(self.policies, self.roles, self.train, self.training.steps)
        for name in self.served_policies:
            self.policy_document(name)
        checks.check_agents(self.agent, self.agents, self.runner)
        for one in self.group_agents:
            checks.check_agents_files(one)
            checks.check_task_file(one)
        checks.check_mini_batches(self.algorithm, self.sampling)
        checks.check_reward(self.reward, self.runner)
        return self

    @property
    def group_agents(self) -> list[GroupAgent]:
        """The run's agents, of which one plays each group: `agents` in their order, or `agent` alone."""
        if self.agent is not None:
            return [GroupAgent(None, "agent", self.agent, self.runner)]
        return [GroupAgent(one.name, f"agents.{number}", one, one.runner) for number, one in enumerate(self.agents)]

    def computation(self, device: Device) -> Computation:
        """The settings that the document leaves to the device of its trainer, resolved."""
        return Computation.of(self.training, self.algorithm, device)

    def computed_as(self, computation: Computation) -> RunConfig:
        """The document with resolved settings in place of null."""
        algorithm = self.algorithm.model_copy(update={"correction": computation.correction})
        training = computation.of_training(self.training)
        return self.model_copy(update={"training": training, "algorithm": algorithm})

    @property
    def rollouts_per_step(self) -> int:
        """The most rollouts that a step samples: siblings, and what the baseline adds to a group.

        >>> credit = {"rule": {"type": "identical"}, "baseline": {"type": "monte_carlo", "calls": 2, "samples": 3}}
        >>> document = {"name": "a", "dataset": "b", "agent": {"command": ["c"]}, "credit": credit}
        >>> RunConfig.model_validate(document).rollouts_per_step
        448
        """
        added = self.credit.baseline.added_rollouts(self.sampling.group_size)
        return self.sampling.groups_per_step * (self.sampling.group_size + added)

    @property
    def served_policies(self) -> list[str]:
        """The further policies whose models the platform serves: all but those of providers."""
        return [name for name, policy in self.policies.items() if policy.provider is None]

    @property
    def _optimizer_of_policies(self) -> Optimizer:
        """The run's optimiser; a policy has its own usual rate where the run has its."""
        is_usual = self.optimizer.rate == usual_rate(self.training.lora)
        return self.optimizer.model_copy(update={"learning_rate": None}) if is_usual else self.optimizer

    def policy_document(self, policy: str) -> RunConfig:
        """Returns the document by which a further policy trains: this one with the policy's own settings.

        Raises: ValueError: they contradict the settings of this run
        """
        own, shown = self.policies[policy], re.sub(r"[^\w .:-]", "-", policy[:90])
        training = self.training.model_copy(
            update={
                "lora": own.lora,
                # These are of the run's own model.
                "frozen": [],
                "router": "frozen",
                "routing_replay": False,
                "early_stopping": None,
                **({"steps": 0} if own.frozen else {}),
            }
        )
        changes: dict[str, Any] = {
            "name": f"{self.name[:100]}:{shown}",
            "model": own.model,
            "pool": own.pool,
            "roles": [role.model_copy(update={"policy": None}) for role in self.roles],
            "policies": {},
            "evaluation": None,
            "training": training,
            "algorithm": own.algorithm or self.algorithm,
            "optimizer": own.optimizer or self._optimizer_of_policies,
        }
        return RunConfig.model_validate(self.model_copy(update=changes).model_dump(mode="json"))
