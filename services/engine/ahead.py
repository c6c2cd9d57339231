"""What sequences in flight will need of the next weights, computed by these while the old ones still serve.

All of it goes into the prefix cache, in the namespace of the new weights, where the sequences find it once these are
served; what is sampled meanwhile is computed after it, until little is left to be computed while everybody waits.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from leyden.libs.faults import fault_point
from leyden.services.engine.attention import PrefillAttention
from leyden.services.engine.model import Model
from leyden.services.engine.rows import Row, TokenIds, Workspace, common_length
from leyden.services.engine.scheduler import WORTH_WAITING, Scheduler
from leyden.services.engine.sequence import Namespace

# Tokens computed between two steps of the old weights, and how many may be left in the end. More makes agents wait
# longer, less makes new weights late: two cores take 0.8 ms for a token of SmolLM2-135M.
SLICE = 256
# Tokens before those of a slice that are copied for it at a time, some 0.75 GB of that model.
READ = 16_384


@dataclass(frozen=True)
class _Part:
    """Tokens that a sequence needs: `cached` of them are there, `shared` are there or needed by another, too."""

    namespace: Namespace
    token_ids: TokenIds
    cached: int
    shared: int


class Ahead:
    """The work that `model` does before it is served. Called between two steps, by the scheduler's thread."""

    def __init__(self, scheduler: Scheduler, model: Model) -> None:
        self._scheduler, self._model = scheduler, model
        self._workspace = Workspace(model.config)
        self._computed = 0
        self._most: int | None = None

    @torch.no_grad()
    def advance(self) -> bool:
        """Computes a slice; False when little is left after it, or more than half of what is computed comes anew."""
        parts = self._parts()
        left = sum(len(part.token_ids) - part.shared for part in parts)
        self._most = 2 * left if self._most is None else self._most
        if left <= SLICE or self._computed >= self._most:
            return False
        budget, read = SLICE, 0
        batch: list[tuple[_Part, int]] = []
        for part in sorted(parts, key=lambda part: part.shared - len(part.token_ids)):
            # One that needs tokens of another comes after it.
            if part.shared - part.cached < WORTH_WAITING and budget and len(part.token_ids) > part.cached:
                if batch and read + part.cached > READ:
                    continue
                end = min(part.cached + budget, len(part.token_ids))
                batch.append((part, end))
                read += part.cached
                budget -= end - part.cached
        self._compute(batch)
        fault_point("engine.slice_computed")
        self._computed += SLICE - budget
        # Not looked at again after a step: all wait a step less for the new weights.
        return left - (SLICE - budget) > SLICE

    def _parts(self) -> list[_Part]:
        scheduler = self._scheduler
        needed = [
            (Namespace(self._model.epoch, sequence.prompt.salt), sequence.token_ids()[: sequence.target])
            for sequence in (*scheduler.running, *scheduler.prefilling)
        ]
        # Sorted, those that begin alike come one after another.
        needed.sort(key=lambda entry: (entry[0].salt, entry[1].tobytes()))
        parts: list[_Part] = []
        for namespace, token_ids in needed:
            cached = shared = len(scheduler.cache.find(namespace, token_ids))
            if parts and parts[-1].namespace == namespace:
                shared = max(cached, common_length(parts[-1].token_ids, token_ids))
            parts.append(_Part(namespace, token_ids, cached, shared))
        return parts

    def _compute(self, batch: Many[tuple[_Part, int]]) -> None:
        """Stores each part's tokens up to a place, from the first one that the cache lacks."""
        cache, workspace = self._scheduler.cache, self._workspace
        rows = [self._seat(part, end) for part, end in batch]
        counts = [end - part.cached for part, end in batch]
        attention = PrefillAttention(rows, counts, self._model.config.heads)
        token_ids = torch.cat([torch.from_numpy(part.token_ids[part.cached : end]) for part, end in batch])
        positions = torch.cat([torch.arange(part.cached, end) for part, end in batch])
        self._model.hidden(token_ids, positions, attention)
        for row, count in zip(rows, counts, strict=True):
            row.length = count
        # After all rows have grown: one that is released makes another move, with the tokens it counts.
        for row, (part, end) in zip(rows, batch, strict=True):
            known, slots = cache.claim(part.namespace, part.token_ids[:end])
            cache.write(slots, workspace.read(row, known, known + len(slots)))
            workspace.release(row)

    def _seat(self, part: _Part, end: int) -> Row:
        cache, prefix = self._scheduler.cache, None
        if part.cached:
            known = part.token_ids[: part.cached]
            prefix = self._workspace.share(part.namespace, known, cache.read(cache.find(part.namespace, known)))
        return self._workspace.seat(prefix, end - part.cached)
