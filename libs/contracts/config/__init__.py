"""The configuration of a run. Validation refuses unknown or contradictory fields with their path and the remedy.

Defaults follow the recipe of `make demo`; `docs/how-to` explains when to change them. `run` holds the document, one
module each its parts, and `checks` the contradictions between parts.
"""

from leyden.libs.contracts.config.agents import Agent, GroupAgent, NamedAgent
from leyden.libs.contracts.config.algorithms import (
    Algorithm,
    Cispo,
    Critic,
    DppoTv,
    Gspo,
    ImportanceSampling,
    PpoClip,
    Reinforce,
    Sapo,
    Sft,
    Weighting,
)
from leyden.libs.contracts.config.computation import CPU, Computation, Device
from leyden.libs.contracts.config.corrections import BypassCorrection, DecoupledCorrection
from leyden.libs.contracts.config.credit import (
    Air,
    Baseline,
    Credit,
    CreditRule,
    DiscountedCredit,
    EqualSplitCredit,
    FailureRule,
    IdenticalCredit,
    Overlong,
    OwnCredit,
    Shaping,
    TemporalCredit,
    TemporalDiscountCredit,
    TokenDiscountedCredit,
)
from leyden.libs.contracts.config.distillation import Distillation
from leyden.libs.contracts.config.document import DEFAULT_POOL, BrokenDocument, PoolName, stored_object
from leyden.libs.contracts.config.evaluation import EvaluationPlan
from leyden.libs.contracts.config.override import Override
from leyden.libs.contracts.config.policies import EmbeddingModel, Policy, Role
from leyden.libs.contracts.config.reward import Component, Reward, stored_reward
from leyden.libs.contracts.config.run import RunConfig
from leyden.libs.contracts.config.runners import (
    ContainerRunner,
    ExternalRunner,
    KubernetesRunner,
    ProcessRunner,
    RunnerConfig,
)
from leyden.libs.contracts.config.sampling import Curriculum, Sampling
from leyden.libs.contracts.config.training import EarlyStopping, Lora, Optimizer, Training

__all__ = [
    "CPU",
    "DEFAULT_POOL",
    "Agent",
    "Air",
    "Algorithm",
    "Baseline",
    "BrokenDocument",
    "BypassCorrection",
    "Cispo",
    "Component",
    "Computation",
    "ContainerRunner",
    "Credit",
    "CreditRule",
    "Critic",
    "Curriculum",
    "DecoupledCorrection",
    "Device",
    "DiscountedCredit",
    "Distillation",
    "DppoTv",
    "EarlyStopping",
    "EmbeddingModel",
    "EqualSplitCredit",
    "EvaluationPlan",
    "ExternalRunner",
    "FailureRule",
    "GroupAgent",
    "Gspo",
    "IdenticalCredit",
    "ImportanceSampling",
    "KubernetesRunner",
    "Lora",
    "NamedAgent",
    "Optimizer",
    "Overlong",
    "Override",
    "OwnCredit",
    "Policy",
    "PoolName",
    "PpoClip",
    "ProcessRunner",
    "Reinforce",
    "Reward",
    "Role",
    "RunConfig",
    "RunnerConfig",
    "Sampling",
    "Sapo",
    "Sft",
    "Shaping",
    "TemporalCredit",
    "TemporalDiscountCredit",
    "TokenDiscountedCredit",
    "Training",
    "Weighting",
    "stored_object",
    "stored_reward",
]
