"""The forward pass of a Llama or Qwen style decoder over a flat batch of tokens, dense or with experts.

Legend: L layers, N tokens of any mixture of sequences, V vocabulary, E hidden size, H query heads, K key-value heads,
D head size. The `Attention` given to `Model.hidden` decides which tokens a token attends to.
"""

from __future__ import annotations

import copy
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from leyden.services.engine.config import ModelConfig
from leyden.services.engine.weights import Layer, Weights


class Attention(Protocol):
    """Stores a layer's new keys and values and attends with its queries; one object per forward pass."""

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """[N, H, D] queries, [N, K, D] keys and values, rotated -> [N, H * D]."""
        ...


class Model:
    """Weights and the forward pass. Everything except the linear products is float32."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config = config
        self.weights = weights
        self._cos, self._sin = _rotary_tables(config)

    def with_weights(self, weights: Weights) -> Model:
        """Returns a copy of the model with other weights."""
        other = copy.copy(self)
        other.weights = weights
        return other

    def empty_routing(self, tokens: int) -> Tensor | None:
        """[N, L, chosen], to which `hidden` writes each token's experts; None for a dense model."""
        experts = self.config.experts
        return None if experts is None else torch.zeros(tokens, self.config.layers, experts.chosen, dtype=torch.int32)

    def hidden(
        self, token_ids: Tensor, positions: Tensor, attention: Attention, routing: Tensor | None = None
    ) -> Tensor:
        """Computes final hidden states: [N] ids at [N] positions -> [N, E], normalised for `logits`.

        Args:    routing: filled with the experts of each token
        """
        # The table has the type of its file.
        x = F.embedding(token_ids, self.weights.embedding).to(torch.float32)
        cos, sin = self._cos[positions], self._sin[positions]
        for index, layer in enumerate(self.weights.layers):
            x += layer.output(self._attend(index, layer, self._norm(x, layer.input_norm), cos, sin, attention))
            inner = self._norm(x, layer.mlp_norm)
            if layer.experts is None:
                x += self._mlp(layer, inner)
                continue
            found, chosen = layer.experts(inner)
            x += found
            if routing is not None:
                routing[:, index] = chosen
        return self._norm(x, self.weights.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """Computes logits: [M, E] -> [M, V]."""
        return self.weights.head(hidden)

    def _attend(self, index: int, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        config = self.config
        rotated_heads = config.heads + config.kv_heads
        qkv = layer.qkv(x).view(len(x), rotated_heads + config.kv_heads, config.head_dim)
        heads = qkv[:, :rotated_heads]
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = (layer.query_norm, config.heads), (layer.key_norm, config.kv_heads)
            heads = self._norm_heads(heads, torch.cat([norm.expand(count, -1) for norm, count in norms]))
        rotated = _rotate(heads, cos, sin)
        return attention.attend(index, rotated[:, : config.heads], rotated[:, config.heads :], qkv[:, rotated_heads:])

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        assert layer.gate_up is not None
        assert layer.down is not None
        inner = self.config.intermediate_size
        gate_up = layer.gate_up(x)
        return layer.down(F.silu(gate_up[:, :inner]).mul_(gate_up[:, inner:]))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (self.config.hidden_size,), weight, self.config.norm_eps)

    def _norm_heads(self, heads: Tensor, weights: Tensor) -> Tensor:
        """[N, H + K, D] heads, each with its row of weights [H + K, D]."""
        return F.rms_norm(heads, (self.config.head_dim,), eps=self.config.norm_eps) * weights


def _rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Returns the cosines and sines of all positions, each [context_length, 1, D]."""
    frequencies = torch.tensor(config.rope.frequencies(config.head_dim), dtype=torch.float32)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequencies)
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
    return torch.addcmul(heads * cos, turned, sin)
