"""Judgements on a run before it begins: its document alone, the shape of its model, and the memory of a machine."""

from leyden.libs.contracts.judgements.finding import Judgement
from leyden.libs.contracts.judgements.machine import judge_memory
from leyden.libs.contracts.judgements.memory import Machine, Part, memory
from leyden.libs.contracts.judgements.rules import judge, warnings_of
from leyden.libs.contracts.judgements.shape import Shape, model_config, untrainable

__all__ = [
    "Judgement",
    "Machine",
    "Part",
    "Shape",
    "judge",
    "judge_memory",
    "memory",
    "model_config",
    "untrainable",
    "warnings_of",
]
