"""Weights that divide the loss among tokens: one per trained token, from counts of the entire optimiser batch.

Axes: K trained tokens of the global batch (all ranks, all micro-batches), so the loss is a plain sum over tokens and
does not depend on how the batch was cut into pieces. Denominators count all tokens that the step consumed: masking a
token or leaving a zero-variance group out of the computation changes none of them.
"""

from __future__ import annotations

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from leyden.libs.contracts.config import Weighting

Ids = NDArray[np.int64]


def token_weights(
    weighting: Weighting, rows_K: Ids, rollouts_K: Ids, groups_K: Ids, *, sum_constant: int | None = None
) -> NDArray[np.float64]:
    """The weight of each trained token's loss; their sum is 1 except under `rollout_sum_const`.

    A rollout of three tokens beside one of one: `rollout_mean` gives 1/6, 1/6, 1/6, 1/2 and `token_mean` 1/4 each.
    All but `seq_mean_token_mean` stay the same when a row is split at a fork.

    Args:    rows_K, rollouts_K, groups_K: the row, rollout and group of each token, from 0; sum_constant: L_const.
    Returns: weights_K: float64
    Source:  token_mean: DAPO (arXiv 2503.14476) equation 8. seq_mean_token_mean: GRPO (arXiv 2402.03300) equation 3.
        rollout_sum_const: Dr. GRPO (arXiv 2503.20783) section 3.2, with the rollout as the unit. rollout_mean and
        prompt_mean: the same mean over rollouts or groups instead of rows.
    """
    match weighting:
        case "token_mean":
            return np.full(len(rows_K), 1 / max(len(rows_K), 1))
        case "seq_mean_token_mean":
            return _equal_shares(rows_K)
        case "rollout_mean":
            return _equal_shares(rollouts_K)
        case "prompt_mean":
            return _equal_shares(groups_K)
        case "rollout_sum_const":
            if sum_constant is None:
                raise ValueError("weighting 'rollout_sum_const' divides by a constant: set algorithm.sum_constant")
            return np.full(len(rows_K), 1 / (max(len(np.unique(rollouts_K)), 1) * sum_constant))
        case _:
            assert_never(weighting)


def _equal_shares(units_K: Ids) -> NDArray[np.float64]:
    _, unit_K, tokens_of_unit = np.unique(units_K, return_inverse=True, return_counts=True)
    shares_K: NDArray[np.float64] = 1 / (len(tokens_of_unit) * tokens_of_unit[unit_K])
    return shares_K
