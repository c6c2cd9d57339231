"""The critic as a model of its own: the decoder of a causal LM with a value head in place of the vocabulary's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel

from leyden.services.trainer.model.forward import Outputs, Policy, Prefix, Reads
from leyden.services.trainer.rows.tree import Pack


class ValueModel(Policy):
    """Computes values over the same trees and packs as the policy; its log-probabilities are 0."""

    def __init__(self, model: PreTrainedModel, **options: Any) -> None:
        super().__init__(model.base_model, values=True, **options)

    def forward(
        self, pack: Pack, path: Sequence[Prefix], reads: Reads, *, values_alone: bool = False, entropies: bool = False
    ) -> Outputs:
        """The value of the state before each token of `reads`."""
        hidden_U_H, _, states_K = self._states(pack, path, reads)
        values_K = self._values(hidden_U_H)[states_K]
        return Outputs(torch.zeros_like(values_K), values_K)


def require_same_tokens(base: Path, folder: Path, field: str = "algorithm.critic.model") -> None:
    """Refuses a model whose tokenizer gives its tokens other numbers than the policy's. Args: field: names the model

    Raises: ValueError
    """
    if folder == base:
        return
    own, other = (AutoTokenizer.from_pretrained(one, local_files_only=True).get_vocab() for one in (base, folder))
    if own != other:
        raise ValueError(
            f"{field}: the tokens of {folder} are not those of {base}: choose a model of the same vocabulary, or leave"
            " the field out"
        )
