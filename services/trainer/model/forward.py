"""Log-probabilities of sampled tokens, computed over token trees through an unmodified Hugging Face causal LM.

Axes: M nodes of a pack or prefix, K sampled tokens to read, U distinct states they were sampled from, G key heads, D
head size, H hidden size. A prefix is computed once. Its keys, values and hidden states become leaves: every pack behind
it reads them and adds to their gradients, and one backward pass through the prefix at the end sends the exact sum back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from leyden.services.trainer.model import attention
from leyden.services.trainer.model.experts import RoutingReplay, use_tree_experts
from leyden.services.trainer.model.head import sampled_outputs
from leyden.services.trainer.model.tensors import product_dtype
from leyden.services.trainer.model.value_head import ValueHead
from leyden.services.trainer.rows.tree import Pack


@dataclass(frozen=True)
class Reads:
    """The log-probabilities to read behind a pack: [K] each.

    places_K: the parent of each token: its position if it lies in a prefix, else `prefix_tokens` plus its node;
    temperatures_K: the sampling temperatures, which divide the logits.
    """

    places_K: NDArray[np.int64]
    token_ids_K: NDArray[np.int64]
    temperatures_K: NDArray[np.float32]


class Outputs(NamedTuple):
    """For each token of `Reads`, [K], float32 at least: its log-probability at its temperature, and of the state before
    it the value head's output, None without one, and the entropy in nats, None unless asked for."""

    logprobs_K: Tensor
    values_K: Tensor | None = None
    entropies_K: Tensor | None = None


class Prefix:
    """A prefix's keys and values per layer and its hidden states, with their graph, and the same tensors as leaves.

    Args: states: per layer, keys and values [1, G, M, D]. Leaves are float32 at least: gradients of many packs add up
        there without loss. (Not a dataclass: FSDP rebuilds those among a forward's arguments.)
    """

    def __init__(self, states: dict[int, tuple[Tensor, Tensor]], hidden_M_H: Tensor) -> None:
        self.states, self.hidden_M_H = states, hidden_M_H
        self.leaves = {layer: (_leaf(keys), _leaf(values)) for layer, (keys, values) in states.items()}
        self.hidden_leaf_M_H = _leaf(hidden_M_H)

    def backward(self, *, whole: bool = False) -> None:
        """Sends the gradients of the leaves back through the prefix. Call once, after the last pack behind it.

        Args: whole: pass every layer from its end, as each rank does of a model that is divided by layer
        """
        pairs = [(self.hidden_M_H, self.hidden_leaf_M_H)]
        if whole and self.hidden_M_H.requires_grad and self.hidden_leaf_M_H.grad is None:
            self.hidden_leaf_M_H.grad = torch.zeros_like(self.hidden_leaf_M_H)
        for layer, states in self.states.items():
            pairs += zip(states, self.leaves[layer], strict=True)
        moved = [(states, leaf.grad.to(states.dtype)) for states, leaf in pairs if leaf.grad is not None]
        if moved:
            ends, gradients = zip(*moved, strict=True)
            torch.autograd.backward(ends, gradients)


class _Cache:
    """Stands in for a transformers cache: puts the prefixes' keys and values before a pack's own.

    Args: states: filled with the pack's own of each layer; a second run under checkpointing leaves it as it is
    """

    def __init__(self, path: Sequence[Prefix], states: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        self.path, self.states = path, states

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch does not type it
    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int | Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        layer = int(layer_idx)
        if self.states is not None:
            self.states.setdefault(layer, (keys, values))
        if not self.path:
            return keys, values
        before = [prefix.leaves[layer] for prefix in self.path]
        return (
            torch.cat([*(prefix_keys.to(keys.dtype) for prefix_keys, _ in before), keys], dim=2),
            torch.cat([*(prefix_values.to(values.dtype) for _, prefix_values in before), values], dim=2),
        )


class Policy(nn.Module):
    """A causal LM that computes log-probabilities over token trees.

    Args: model: full causal attention, and logits equal to the head applied to the last hidden states (`families`
        checks both); activation_checkpointing: recompute each layer in the backward pass; values: add a value head;
        kernel: of attention on CUDA devices; compiled: compile the parts of each layer; replays: compute a pack's
        tokens with the experts that it names

    `value_head` is in float32 at least; None without values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        activation_checkpointing: bool = False,
        values: bool = False,
        kernel: attention.Kernel = "dense",
        compiled: bool = False,
        replays: bool = False,
    ) -> None:
        super().__init__()
        self.model, self.kernel = model, kernel
        self.value_head: ValueHead | None = _value_head(model) if values else None
        # Dropout would make the policy differ from the engine's: the trainer always computes in evaluation mode.
        self.model.eval()
        self.model.set_attn_implementation(attention.NAME)
        use_tree_experts(self.model)
        self.routing = RoutingReplay(self.model) if replays else None
        if activation_checkpointing:
            _checkpoint_layers(model)
        if compiled:
            _compile_layers(model)

    @property
    def device(self) -> torch.device:
        """The device of the model's inputs."""
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    def prefix(self, pack: Pack, path: Sequence[Prefix]) -> Prefix:
        """Computes a prefix behind those of `path`."""
        return Prefix(*self.states(pack, path))

    def states(self, pack: Pack, path: Sequence[Prefix]) -> tuple[dict[int, tuple[Tensor, Tensor]], Tensor]:
        """The arguments of `Prefix`: tensors whose gradients FSDP sees."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        return found, self._hidden(pack, _Cache(path, found))

    def forward(
        self, pack: Pack, path: Sequence[Prefix], reads: Reads, *, values_alone: bool = False, entropies: bool = False
    ) -> Outputs:
        """The outputs for each token of `reads`.

        Args: values_alone: gradients reach the value head and nothing else; entropies: compute them, too
        """
        with torch.set_grad_enabled(torch.is_grad_enabled() and not values_alone):
            hidden_U_H, temperatures_U, rows_K = self._states(pack, path, reads)
            found = self._outputs(hidden_U_H, temperatures_U, rows_K, reads, entropies=entropies)
        if self.value_head is None:
            return found
        return found._replace(values_K=self._values(hidden_U_H)[rows_K])

    def _values(self, hidden_U_H: Tensor) -> Tensor:
        assert self.value_head is not None
        values_U: Tensor = self.value_head(hidden_U_H)[:, 0]
        return values_U

    def _outputs(
        self, hidden_U_H: Tensor, temperatures_U: Tensor, rows_K: Tensor, reads: Reads, *, entropies: bool
    ) -> Outputs:
        token_ids_K = torch.from_numpy(reads.token_ids_K).to(self.device)
        head = self.model.get_output_embeddings()
        logprobs_K, entropies_U = sampled_outputs(
            head, hidden_U_H, temperatures_U, rows_K, token_ids_K, entropies=entropies
        )
        return Outputs(logprobs_K, entropies_K=None if entropies_U is None else entropies_U[rows_K])

    def _states(self, pack: Pack, path: Sequence[Prefix], reads: Reads) -> tuple[Tensor, Tensor, Tensor]:
        """The distinct states of `reads` [U, H], their temperatures [U], and the state of each token, [K]."""
        hidden_M_H = self._hidden(pack, _Cache(path))
        # Siblings that drew from the same state read the same logits.
        keys_K = reads.places_K << 32 | reads.temperatures_K.view(np.int32)
        _, first_U, rows_K = np.unique(keys_K, return_index=True, return_inverse=True)
        places_U = reads.places_K[first_U]
        if (places_U < pack.prefix_tokens).any():
            hidden_M_H = torch.cat([*(prefix.hidden_leaf_M_H.to(hidden_M_H.dtype) for prefix in path), hidden_M_H])
        else:
            places_U = places_U - pack.prefix_tokens
        nodes_U, temperatures_U, states_K = (
            torch.from_numpy(column).to(self.device) for column in (places_U, reads.temperatures_K[first_U], rows_K)
        )
        return hidden_M_H[nodes_U], temperatures_U, states_K

    def _hidden(self, pack: Pack, cache: _Cache) -> Tensor:
        dtype = product_dtype(self.model.get_input_embeddings().weight)
        hidden: Tensor = self.model.base_model(
            input_ids=torch.from_numpy(pack.token_ids_M).to(self.device)[None],
            position_ids=torch.from_numpy(pack.depths_M).to(self.device)[None],
            tree=attention.TreeLayout(pack, dtype, self.device, self.kernel),
            past_key_values=cache,
            use_cache=False,
            **({} if self.routing is None else self.routing.arguments(pack.experts_M_S, self.device)),
        ).last_hidden_state
        return hidden[0]


def _value_head(model: PreTrainedModel) -> ValueHead:
    weight = model.get_input_embeddings().weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    return ValueHead(weight.shape[1], torch.promote_types(weight.dtype, torch.float32), device)


def _leaf(states: Tensor) -> Tensor:
    wide = states.detach().to(torch.promote_types(states.dtype, torch.float32))
    return wide.requires_grad_(states.requires_grad)


def _checkpoint_layers(model: PreTrainedModel) -> None:
    """Turns on transformers' layer checkpointing. A layer may run twice: `_Cache` records only its first run."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module._can_checkpoint_with_cache = True
            # Only the layer's own flag: its children stay in evaluation mode, without dropout.
            module.training = True


def _compile_layers(model: PreTrainedModel) -> None:
    """Compiles norms, attention's projections and MLP of each layer, for any number of tokens.

    Layers of the same kind share the compiled code. The layer itself is not compiled: torch would leave out one with
    activation checkpointing.
    """
    for layer in model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            for part in layer.children():
                if hasattr(part, "layer_idx"):
                    # Only the cache reads it. As an int it would be a constant of the code, which no layer could share.
                    part.layer_idx = torch.tensor(int(part.layer_idx))
                # Gradients or none, a prefix or none, adapters or none, a reference, a critic: each has its own code.
                part.compile(dynamic=True, recompile_limit=64)
