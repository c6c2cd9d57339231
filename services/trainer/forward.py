"""Log-probabilities of sampled tokens, computed over token trees through an unmodified Hugging Face causal LM.

Axes: P prefix tokens, M nodes of a pack, K sampled tokens to read, H hidden size. A prefix is computed once; its keys
and values become leaves that every pack attends to, their gradients add up over packs, and one backward pass through
the prefix at the end makes the sum exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from services.trainer import attention
from services.trainer.head import sampled_logprobs
from services.trainer.tree import Forest, Pack


@dataclass(frozen=True)
class Reads:
    """Which log-probabilities to read from a pack: nodes_K holds the parent of each token, [K] each.

    temperatures_K: what the token was sampled at; logits are divided by it.
    """

    nodes_K: NDArray[np.int64]
    token_ids_K: NDArray[np.int64]
    temperatures_K: NDArray[np.float32]


@dataclass
class KeyValues:
    """Keys and values of a common prefix, per layer: as computed, with their graph, and as leaves for the packs."""

    computed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    leaves: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def detach(self) -> KeyValues:
        """Makes the leaves; float32 at least, so that the gradients of many packs add up without loss."""
        for layer, pair in self.computed.items():
            keys, values = (_leaf(states) for states in pair)
            self.leaves[layer] = (keys, values)
        return self

    def backward(self) -> None:
        """Carries what the packs left on the leaves back through the prefix. Call once, after the last pack."""
        ends: list[Tensor] = []
        gradients: list[Tensor] = []
        for layer, pair in self.computed.items():
            for states, leaf in zip(pair, self.leaves[layer], strict=True):
                if leaf.grad is not None:
                    ends.append(states)
                    gradients.append(leaf.grad.to(states.dtype))
        if ends:
            torch.autograd.backward(ends, gradients)


class _Recording:
    """Stands in for a transformers cache: keeps what a prefix computes. Safe to run again under checkpointing."""

    def __init__(self, into: KeyValues) -> None:
        self.into = into

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.into.computed.setdefault(layer, (keys, values))
        return keys, values


class _Behind:
    """Stands in for a transformers cache: puts the prefix before a pack's own keys and values, and keeps nothing."""

    def __init__(self, prefix: KeyValues) -> None:
        self.prefix = prefix

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        if layer not in self.prefix.leaves:
            return keys, values
        prefix_keys, prefix_values = self.prefix.leaves[layer]
        return (
            torch.cat([prefix_keys.to(keys.dtype), keys], dim=2),
            torch.cat([prefix_values.to(values.dtype), values], dim=2),
        )


class Policy(nn.Module):
    """A causal LM that answers for token trees.

    Args: model: full causal attention, logits that are its head's product with its last hidden states
        (`services.trainer.model` checks); activation_checkpointing: recompute each layer in the backward pass.
    """

    def __init__(self, model: PreTrainedModel, *, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.model = model
        # Dropout would make the policy differ from the engine's: the trainer always computes in evaluation mode.
        self.model.eval()
        self.model.set_attn_implementation(attention.NAME)
        if activation_checkpointing:
            _checkpoint_layers(model)

    @property
    def device(self) -> torch.device:
        """Where inputs belong."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def prefix(self, forest: Forest) -> KeyValues:
        """Keys and values of the batch's common prefix, with leaves for the packs; empty without a prefix."""
        states = KeyValues()
        length = len(forest.prefix_P)
        if length:
            positions_P = np.arange(length)
            chain = Pack(forest.prefix_P, positions_P, np.full(length, length), [0], [positions_P])
            self._hidden(chain, _Recording(states), prefix=0)
        return states.detach()

    def forward(self, pack: Pack, prefix: KeyValues, prefix_length: int, reads: Reads) -> Tensor:
        """The log-probability, float32 at least, of each token that `reads` names, [K], at its temperature."""
        hidden_M_H = self._hidden(pack, _Behind(prefix), prefix=prefix_length)
        return self._read(hidden_M_H, reads)

    def _hidden(self, pack: Pack, cache: _Recording | _Behind, prefix: int) -> Tensor:
        dtype = self.model.get_input_embeddings().weight.dtype
        hidden: Tensor = self.model.base_model(
            input_ids=torch.from_numpy(pack.token_ids_M).to(self.device)[None],
            position_ids=torch.from_numpy(pack.depths_M).to(self.device)[None],
            tree=attention.TreeLayout(pack, prefix, dtype, self.device),
            past_key_values=cache,
            use_cache=False,
        ).last_hidden_state
        return hidden[0]

    def _read(self, hidden_M_H: Tensor, reads: Reads) -> Tensor:
        # Siblings that drew from the same state read the same logits.
        pairs_K = np.stack([reads.nodes_K, reads.temperatures_K.view(np.int32)]).astype(np.int64)
        _, first_U, rows_K = np.unique(pairs_K[0] << 32 | pairs_K[1], return_index=True, return_inverse=True)
        nodes_U, temperatures_U, rows, token_ids_K = (
            torch.from_numpy(column).to(self.device)
            for column in (reads.nodes_K[first_U], reads.temperatures_K[first_U], rows_K, reads.token_ids_K)
        )
        head = self.model.get_output_embeddings()
        return sampled_logprobs(head, hidden_M_H[nodes_U], temperatures_U, rows, token_ids_K)


def _leaf(states: Tensor) -> Tensor:
    wide = states.detach().to(torch.promote_types(states.dtype, torch.float32))
    return wide.requires_grad_(states.requires_grad)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Turns on transformers' own layer checkpointing; our stand-in caches only read, so a second run is harmless."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._can_checkpoint_with_cache = True
            # Only the layer's own flag: its children stay in evaluation mode, without dropout.
            module.training = True
