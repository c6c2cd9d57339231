"""Attention over rows and shared prefixes; a forward pass creates one object, for prefill or for decoding.

Each query attends to its shared prefix and to its row; the two results are joined by their log-sum-exps, which is
exact. A prefix is read once for all its queries.

Legend: N tokens of the batch, H query heads, K key-value heads, G = H / K, D head size, n rows, T own tokens, P prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leyden.services.engine.rows import Bucket, Row, SharedPrefix

# Own tokens are padded to a multiple of this, so that shapes repeat from step to step.
_PAD = 16
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class PrefixAttention:
    """Joins attention to the shared prefixes into attention to the rows' own tokens."""

    def __init__(self, rows: Sequence[Row], counts: Sequence[int], scale: float) -> None:
        """Args:    counts: how many of the batch's tokens, in order, belong to each of `rows`"""
        self._scale = scale
        tokens: dict[SharedPrefix, list[int]] = {}
        position = 0
        for row, count in zip(rows, counts, strict=True):
            if row.prefix is not None:
                tokens.setdefault(row.prefix, []).extend(range(position, position + count))
            position += count
        self._groups = [
            (prefix, None if len(indices) == position else torch.tensor(indices)) for prefix, indices in tokens.items()
        ]

    def join(self, layer: int, queries: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        """Returns [N, K, G, D] attention to all tokens.

        Args:    out: [N, K, G, D] attention to own tokens, may be overwritten
                 lse: [N, K, G] log of the sum of exponentials of own scores
        """
        for prefix, indices in self._groups:
            if indices is None:
                return self._join_group(layer, prefix, queries, out, lse)
            out[indices] = self._join_group(layer, prefix, queries[indices], out[indices], lse[indices])
        return out

    def _join_group(self, layer: int, prefix: SharedPrefix, queries: Tensor, out: Tensor, lse: Tensor) -> Tensor:
        n, heads, group, size = queries.shape
        flat = queries.permute(1, 0, 2, 3).reshape(1, heads, n * group, size)
        keys, values = prefix.keys[layer].unsqueeze(0), prefix.values[layer].unsqueeze(0)
        shared_out, shared_lse = _flash(flat, keys, values, 0.0, False, scale=self._scale)
        shared_out = shared_out.view(heads, n, group, size).permute(1, 0, 2, 3)
        shared_lse = shared_lse.view(heads, n, group).permute(1, 0, 2)
        share = torch.sigmoid(shared_lse - lse).unsqueeze(-1)
        return torch.lerp(out, shared_out, share)


@dataclass(frozen=True)
class _BucketPart:
    """The rows of one bucket in a decoding batch: batch rows `begin` to `end`, in the bucket at `indices`."""

    bucket: Bucket
    begin: int
    end: int
    indices: Tensor
    positions: Tensor
    full: bool
    mask: Tensor


class DecodeAttention:
    """Attention for decoding: one new token for each of many rows."""

    def __init__(self, rows: Sequence[Row], heads: int) -> None:
        """Orders the batch by bucket: `rows` here is the order that the tokens must have.

        Args:    rows: each with room for one more token
                 heads: H
        """
        by_bucket: dict[Bucket, list[Row]] = {}
        for row in rows:
            by_bucket.setdefault(row.bucket, []).append(row)
        self.rows = [row for part in by_bucket.values() for row in sorted(part, key=lambda row: row.index)]
        size = self.rows[0].bucket.keys.shape[-1]
        self._heads, self._scale = heads, size**-0.5
        self._parts: list[_BucketPart] = []
        for bucket in by_bucket:
            begin = self._parts[-1].end if self._parts else 0
            self._parts.append(_bucket_part(bucket, begin, self.rows[begin : begin + len(by_bucket[bucket])]))
        self._prefixes = PrefixAttention(self.rows, [1] * len(self.rows), self._scale)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `model.Attention`."""
        n, kv_heads, size = keys.shape
        queries = queries.reshape(n, kv_heads, self._heads // kv_heads, size)
        results = [
            self._attend_own(layer, part, *(x[part.begin : part.end] for x in (queries, keys, values)))
            for part in self._parts
        ]
        outs, lses = zip(*results, strict=True)
        out, lse = (outs[0], lses[0]) if len(results) == 1 else (torch.cat(outs), torch.cat(lses))
        return self._prefixes.join(layer, queries, out, lse).reshape(n, -1)

    def _attend_own(
        self, layer: int, part: _BucketPart, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        all_keys, all_values = part.bucket.keys[layer], part.bucket.values[layer]
        all_keys[part.indices, :, part.positions] = keys
        all_values[part.indices, :, part.positions] = values
        kv_heads, group, size = queries.shape[1:]
        n = len(part.bucket.rows)
        if not part.full:
            queries = queries.new_zeros(n, kv_heads, group, size).index_copy_(0, part.indices, queries)
        length = part.mask.shape[-1]
        all_keys, all_values = (x[:n, :, :length].flatten(0, 1) for x in (all_keys, all_values))
        scores = torch.baddbmm(
            part.mask, queries.reshape(n * kv_heads, group, size), all_keys.transpose(1, 2), alpha=self._scale
        )
        largest = scores.amax(-1, keepdim=True)
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True)
        out = torch.bmm(weights, all_values).div_(total).view(n, kv_heads, group, size)
        lse = (largest + total.log_()).view(n, kv_heads, group)
        return (out, lse) if part.full else (out[part.indices], lse[part.indices])


def _bucket_part(bucket: Bucket, begin: int, rows: list[Row]) -> _BucketPart:
    lengths = torch.tensor([row.length for row in bucket.rows])
    padded = min(bucket.width, (max(row.length for row in rows) + _PAD) // _PAD * _PAD)
    kv_heads = bucket.keys.shape[2]
    # The new token, at position `length`, is attended to as well.
    hidden = torch.arange(padded) > lengths.unsqueeze(1)
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return _BucketPart(
        bucket=bucket,
        begin=begin,
        end=begin + len(rows),
        indices=torch.tensor([row.index for row in rows]),
        positions=torch.tensor([row.length for row in rows]),
        full=len(rows) == len(bucket.rows),
        mask=mask.repeat_interleave(kv_heads, dim=0).unsqueeze(1),
    )


class PrefillAttention:
    """Attention for prefill: many new tokens for each of several rows, with a causal mask."""

    def __init__(self, rows: Sequence[Row], counts: Sequence[int], heads: int) -> None:
        """Args:    counts: new tokens of each row, in the batch's order; room for them was reserved"""
        size = rows[0].bucket.keys.shape[-1]
        self._heads, self._scale = heads, size**-0.5
        self._pieces: list[tuple[Row, slice, Tensor]] = []
        begin = 0
        for row, count in zip(rows, counts, strict=True):
            self._pieces.append((row, slice(begin, begin + count), _causal_mask(row.length, count)))
            begin += count
        self._prefixes = PrefixAttention(rows, counts, self._scale)

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """See `model.Attention`."""
        n, kv_heads, size = keys.shape
        queries = queries.reshape(n, kv_heads, self._heads // kv_heads, size)
        out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:3])
        for row, piece, mask in self._pieces:
            count, length = mask.shape[-2:]
            all_keys, all_values = row.bucket.keys[layer, row.index], row.bucket.values[layer, row.index]
            all_keys[:, length - count : length] = keys[piece].transpose(0, 1)
            all_values[:, length - count : length] = values[piece].transpose(0, 1)
            piece_out, piece_lse = _flash(
                queries[piece].permute(1, 2, 0, 3),
                all_keys[:, None, :length].expand(-1, queries.shape[2], -1, -1),
                all_values[:, None, :length].expand(-1, queries.shape[2], -1, -1),
                0.0,
                False,
                attn_mask=mask,
                scale=self._scale,
            )
            out[piece], lse[piece] = piece_out.permute(2, 0, 1, 3), piece_lse.permute(2, 0, 1)
        return self._prefixes.join(layer, queries, out, lse).reshape(n, -1)


def _causal_mask(past: int, count: int) -> Tensor:
    """Returns the causal mask [1, 1, count, past + count] to add to scores."""
    hidden = torch.ones(count, past + count, dtype=torch.bool).triu_(past + 1)
    return torch.zeros(1, 1, count, past + count).masked_fill_(hidden, -torch.inf)
