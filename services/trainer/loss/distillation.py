"""On-policy distillation: a teacher's log-probabilities of sampled tokens become their advantages."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts.config import Distillation


def teacher_advantages(
    distillation: Distillation,
    advantages_K: NDArray[np.floating],
    old_K: NDArray[np.float64],
    teacher_K: NDArray[np.float64],
) -> NDArray[np.float64]:
    """The advantages of K trained tokens, [K]: coefficient · (log π_teacher - log π_old), beside those of rewards where
    the document adds them.

    A token that the policy samples with probability 0.5 and the teacher with 0.25 gets -0.693, one that the teacher
    prefers a positive number, and the mean over the policy's own tokens is minus the reverse KL.

    Args:   advantages_K: those of rewards; old_K, teacher_K: log-probabilities, of the policy at the step's start
    Source: MiniLLM (arXiv 2306.08543), single-step decomposition; TRL's `IWOPDTrainer` with `iw_opd_gamma` 0
    """
    judged_K = distillation.coefficient * (teacher_K - old_K)
    return judged_K if distillation.rewards == "ignore" else advantages_K + judged_K
