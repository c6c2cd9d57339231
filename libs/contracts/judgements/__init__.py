"""Judgements on a run before it begins: its document alone, the shape of its model, and the memory of a machine."""

from leyden.libs.contracts.judgements.finding import Judgement
from leyden.libs.contracts.judgements.machine import judge_memory, judge_model
from leyden.libs.contracts.judgements.memory import GB, Machine, Models, Need, engine_arguments, memory, size_bytes
from leyden.libs.contracts.judgements.rewards import judge_rewards
from leyden.libs.contracts.judgements.rules import judge
from leyden.libs.contracts.judgements.shape import Shape, model_config

__all__ = [
    "GB",
    "Judgement",
    "Machine",
    "Models",
    "Need",
    "Shape",
    "engine_arguments",
    "judge",
    "judge_memory",
    "judge_model",
    "judge_rewards",
    "memory",
    "model_config",
    "size_bytes",
]
