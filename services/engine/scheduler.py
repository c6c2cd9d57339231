"""Continuous batching: at every step sequences join, advance by one token and leave.

A step first prefills prompts, packed and in chunks, then decodes one token for every sequence whose prompt is computed.
A prompt's last token is decoded, not prefilled, so that all sampling is in one place. A prompt that shares a long
prefix with one being computed waits, and finds the prefix in the cache at the next step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from leyden.services.engine.adapters import Adapter, adapt
from leyden.services.engine.attention import DecodeAttention, PrefillAttention
from leyden.services.engine.cache import PrefixCache
from leyden.services.engine.model import Model
from leyden.services.engine.prefixes import LEAST_GAIN, choose_lengths, longest_match
from leyden.services.engine.rows import SharedPrefix, TokenIds, Workspace, common_length
from leyden.services.engine.sampling import Sampler, logprobs_of, top_logprobs_of
from leyden.services.engine.sequence import Finish, Namespace, Sequence

# A prompt waits for another prompt that computes at least this many of its tokens.
WORTH_WAITING = 16
# Output tokens that a new row has room for; longer outputs move to wider rows as they grow.
_FIRST_ROOM = 64
# Positions whose logits are computed at once for log-probabilities of prompts; bounds memory.
_LOGIT_ROWS = 128


@dataclass(frozen=True)
class Limits:
    """Limits of a scheduler, in tokens or sequences."""

    max_running: int = 128
    max_total_tokens: int = 65536
    prefill_tokens: int = 2048


@dataclass
class Totals:
    """Counts since the scheduler started."""

    prefill_tokens: int = 0
    decode_tokens: int = 0
    cached_tokens: int = 0
    retractions: int = 0
    seconds: float = 0.0


@dataclass
class Scheduler:
    """Schedules all sequences in flight. One thread calls it; no method blocks.

    `version` labels tokens. `epoch` counts the weights served so far; the cache has a namespace for each.
    """

    model: Model
    limits: Limits
    sampler: Sampler
    version: str
    totals: Totals = field(default_factory=Totals)
    epoch: int = 0

    def __post_init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.cache = PrefixCache(self.model.config, self.limits.max_total_tokens)
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._workspace = Workspace(self.model.config)
        self._prefixes: list[SharedPrefix] = []

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.running)

    @property
    def in_flight(self) -> list[Sequence]:
        return [*self.running, *self.prefilling, *self.waiting]

    @property
    def row_tokens(self) -> int:
        """Tokens of the sequences that have rows."""
        return sum(sequence.length for sequence in (*self.running, *self.prefilling))

    def submit(self, sequences: Iterable[Sequence]) -> None:
        self.waiting.extend(sequences)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences with the tokens sampled so far."""
        for sequence in sequences:
            queued = sequence in self.waiting and not sequence.admitted
            self._leave(sequence)
            sequence.end(Finish("abort", message="Abort in waiting queue" if queued else "Aborted"))

    def retract(self, sequences: Iterable[Sequence]) -> None:
        """Returns sequences to the queue, oldest first; their tokens are then computed again or read from the cache."""
        for sequence in sorted(sequences, key=lambda sequence: sequence.received_at, reverse=True):
            self._leave(sequence)
            sequence.computed, sequence.retractions = 0, sequence.retractions + 1
            if not sequence.output_ids:
                # Those of a part of the prompt: the whole prompt is read again, perhaps by other weights.
                sequence.input_logprobs.clear()
                sequence.input_top_logprobs.clear()
            self.totals.retractions += 1
            self.waiting.appendleft(sequence)

    def flush_cache(self) -> bool:
        """Empties the prefix cache; returns False without a change while a sequence has a row."""
        if self.running or self.prefilling:
            return False
        self.cache.flush()
        return True

    def drop_all(self, finish: Finish) -> list[Sequence]:
        """Ends all sequences and empties rows and cache, after an error that may have corrupted them."""
        dropped = self.in_flight
        for sequence in dropped:
            sequence.row = None
            sequence.end(finish)
        self._reset()
        return dropped

    def replace_model(self, model: Model, version: str | None) -> None:
        """Serves other weights from the next step on; running sequences retain their old keys and values."""
        self.model = model
        self.epoch += 1
        self.version = self.version if version is None else version

    @torch.no_grad()
    def step(self) -> list[Sequence]:
        """Runs one iteration; returns the sequences that gained a token or ended."""
        started = time.perf_counter()
        self._admit()
        ended = self._prefill() if self.prefilling else []
        self._make_room()
        advanced = self._decode() if self.running else []
        self.totals.seconds += time.perf_counter() - started
        return ended + advanced

    def _admit(self) -> None:
        """Gives rows to queued sequences in order, within the limits and this step's budget of prompt tokens."""
        budget = self.limits.prefill_tokens - sum(s.target - s.computed for s in self.prefilling)
        used = self.row_tokens
        computing = [sequence.token_ids() for sequence in self.prefilling]
        chosen: list[tuple[Sequence, TokenIds, int]] = []
        for sequence in list(self.waiting):
            full = len(self.running) + len(self.prefilling) + len(chosen) >= self.limits.max_running
            if full or budget <= 0 or used + sequence.length + 1 > self.limits.max_total_tokens:
                break
            token_ids = sequence.token_ids()
            cached = self._cached_length(sequence, token_ids)
            if any(common_length(token_ids, other) - cached >= WORTH_WAITING for other in computing):
                continue
            if cached < sequence.target:
                computing.append(token_ids)
            budget -= sequence.target - cached
            used += sequence.length + 1
            chosen.append((sequence, token_ids, cached))
        if chosen:
            self._seat_all(chosen)

    def _cached_length(self, sequence: Sequence, token_ids: TokenIds) -> int:
        adapter = sequence.adapter.serial if sequence.adapter is not None else 0
        sequence.namespace = Namespace(self.epoch, sequence.prompt.salt, adapter)
        return len(self.cache.find(sequence.namespace, token_ids[: sequence.needed_from]))

    def _seat_all(self, chosen: list[tuple[Sequence, TokenIds, int]]) -> None:
        joined = {id(sequence) for sequence, _, _ in chosen}
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in joined)
        shared: dict[int, int] = {}
        for namespace in {sequence.namespace for sequence, _, _ in chosen}:
            part = [entry for entry in chosen if entry[0].namespace == namespace]
            peers = [s.token_ids() for s in (*self.running, *self.prefilling) if s.namespace == namespace]
            lengths = choose_lengths([(ids, cached) for _, ids, cached in part], peers)
            shared.update((id(sequence), length) for (sequence, _, _), length in zip(part, lengths, strict=True))
        for sequence, token_ids, _ in chosen:
            self._seat(sequence, token_ids, shared[id(sequence)])

    def _seat(self, sequence: Sequence, token_ids: TokenIds, shared: int) -> None:
        assert sequence.namespace is not None
        slots = self.cache.find(sequence.namespace, token_ids[: sequence.needed_from])
        prefix = longest_match(self._prefixes, sequence.namespace, token_ids[: len(slots)])
        if shared >= (0 if prefix is None else len(prefix)) + LEAST_GAIN or (prefix is None and shared):
            kv = self.cache.read(slots[:shared])
            prefix = self._workspace.share(sequence.namespace, token_ids[:shared].copy(), kv)
            self._prefixes.append(prefix)
        start = 0 if prefix is None else len(prefix)
        room = min(sequence.max_length - sequence.length, _FIRST_ROOM)
        sequence.row = self._workspace.seat(prefix, sequence.length - start + room)
        self._workspace.write(sequence.row, self.cache.read(slots[start:]))
        sequence.computed = len(slots)
        sequence.experts = [] if self.model.config.experts is None else [self.cache.read_experts(slots)]
        if not sequence.admitted:
            sequence.admitted, sequence.admitted_at = True, time.monotonic()
            sequence.cached_tokens = len(slots)
            self.totals.cached_tokens += len(slots)
        self.prefilling.append(sequence)

    def _prefill(self) -> list[Sequence]:
        """Computes prompts up to this step's budget; returns the sequences that end here: those with no output."""
        budget = self.limits.prefill_tokens
        batch: list[tuple[Sequence, TokenIds]] = []
        for sequence in self.prefilling:
            count = min(budget, sequence.target - sequence.computed)
            if count > 0:
                ids = sequence.token_ids()[sequence.computed : sequence.computed + count]
                batch.append((sequence, ids))
                budget -= count
        if batch:
            self._prefill_batch(batch)
        done = [sequence for sequence in self.prefilling if sequence.computed == sequence.target]
        self.prefilling = [sequence for sequence in self.prefilling if sequence.computed < sequence.target]
        self.running.extend(done)
        ended = [sequence for sequence in done if sequence.length >= sequence.max_length]
        for sequence in ended:
            self._leave(sequence)
            sequence.end(Finish("length"))
        return ended

    def _prefill_batch(self, batch: list[tuple[Sequence, TokenIds]]) -> None:
        rows, counts = [], []
        for sequence, ids in batch:
            assert sequence.row is not None
            self._workspace.reserve(sequence.row, sequence.row.length + len(ids))
            rows.append(sequence.row)
            counts.append(len(ids))
        attention = PrefillAttention(rows, counts, self.model.config.heads)
        token_ids = torch.tensor([token for _, ids in batch for token in ids.tolist()])
        positions = torch.cat([torch.arange(s.computed, s.computed + len(ids)) for s, ids in batch])
        model = self._adapted([s.adapter for s, ids in batch for _ in ids])
        routing = model.empty_routing(len(token_ids))
        hidden = model.hidden(token_ids, positions, attention, routing)
        self.totals.prefill_tokens += len(token_ids)
        begin = 0
        for (sequence, ids), row in zip(batch, rows, strict=True):
            row.length += len(ids)
            self._read_prompt_logprobs(sequence, hidden[begin : begin + len(ids)])
            sequence.computed += len(ids)
            if routing is not None:
                sequence.experts.append(routing[begin : begin + len(ids)])
            begin += len(ids)
            self._remember(sequence)

    def _read_prompt_logprobs(self, sequence: Sequence, hidden: torch.Tensor) -> None:
        """Stores the log-probabilities of the prompt tokens that follow these hidden states, if requested."""
        prompt = sequence.prompt
        if not prompt.return_logprob or prompt.logprob_start_len < 0 or sequence.output_ids:
            return
        first = max(sequence.computed, prompt.logprob_start_len)
        following = sequence.prompt_ids[first + 1 : sequence.computed + len(hidden) + 1].tolist()
        wanted = hidden[first - sequence.computed :]
        for begin in range(0, len(following), _LOGIT_ROWS):
            logits = self.model.logits(wanted[begin : begin + _LOGIT_ROWS])
            sequence.input_logprobs += logprobs_of(logits, following[begin : begin + _LOGIT_ROWS])
            if prompt.top_logprobs_num:
                sequence.input_top_logprobs += top_logprobs_of(logits, prompt.top_logprobs_num)

    def _make_room(self) -> None:
        """Retracts the youngest sequences until the next tokens fit the token limit."""
        while len(self.running) > 1 and self.row_tokens + len(self.running) > self.limits.max_total_tokens:
            self.retract([max(self.running, key=lambda sequence: sequence.received_at)])

    def _decode(self) -> list[Sequence]:
        """Decodes one token for every running sequence."""
        by_row = {}
        for sequence in self.running:
            assert sequence.row is not None
            self._workspace.reserve(sequence.row, sequence.row.length + 1)
            by_row[id(sequence.row)] = sequence
        attention = DecodeAttention([s.row for s in self.running if s.row is not None], self.model.config.heads)
        batch = [by_row[id(row)] for row in attention.rows]
        token_ids = torch.tensor([sequence.last_id for sequence in batch])
        positions = torch.tensor([sequence.computed for sequence in batch])
        model = self._adapted([sequence.adapter for sequence in batch])
        routing = model.empty_routing(len(token_ids))
        hidden = model.hidden(token_ids, positions, attention, routing)
        logits = self.model.logits(hidden)
        drawn = self.sampler.sample(logits, [sequence.draw for sequence in batch])
        for number, (sequence, row, token) in enumerate(zip(batch, attention.rows, drawn, strict=True)):
            row.length += 1
            sequence.computed += 1
            if routing is not None:
                sequence.experts.append(routing[number : number + 1])
            sequence.append(token, self.version)
        # After all rows have grown, because removing a row moves another one, which needs its final length.
        for sequence in batch:
            if sequence.finish is not None:
                self._leave(sequence)
        self.totals.decode_tokens += len(batch)
        return batch

    def _adapted(self, adapters: list[Adapter | None]) -> Model:
        """The model of a batch whose tokens have these adapters."""
        return self.model.with_weights(adapt(self.model.weights, adapters))

    def _leave(self, sequence: Sequence) -> None:
        """Removes a sequence from every list; its keys and values stay in the cache."""
        for place in (self.running, self.prefilling, self.waiting):
            if sequence in place:
                place.remove(sequence)
        if sequence.row is None:
            return
        self._remember(sequence)
        prefix = sequence.row.prefix
        self._workspace.release(sequence.row)
        sequence.row = None
        if prefix is not None and prefix.users == 0:
            self._prefixes.remove(prefix)

    def _remember(self, sequence: Sequence) -> None:
        """Stores a row's keys and values in the cache, unless the weights have changed."""
        namespace, row = sequence.namespace, sequence.row
        assert namespace is not None
        assert row is not None
        if namespace.epoch != self.epoch:
            return
        cached, slots = self.cache.claim(namespace, sequence.token_ids()[: sequence.computed])
        if len(slots):
            self.cache.write(slots, self._workspace.read(row, cached, cached + len(slots)))
            if sequence.experts:
                self.cache.write_experts(slots, torch.cat(sequence.experts)[cached : cached + len(slots)])
