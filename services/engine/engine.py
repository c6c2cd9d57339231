"""The engine: one thread runs the scheduler, and all other code accesses its state by commands to that thread."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import torch

from leyden.libs.faults import fault_point
from leyden.libs.service.memory import return_freed_memory
from leyden.libs.telemetry import logger
from leyden.services.engine import metrics
from leyden.services.engine.adapters import Adapter, load_adapter
from leyden.services.engine.config import ModelConfig, read_config
from leyden.services.engine.errors import BadRequest, EngineError, WeightsRefused
from leyden.services.engine.gate import Gate
from leyden.services.engine.grammar import Grammars
from leyden.services.engine.model import Model
from leyden.services.engine.request import GenerateRequest, Prompt
from leyden.services.engine.sampling import Draw, Sampler
from leyden.services.engine.scheduler import Limits, Scheduler
from leyden.services.engine.sequence import Finish, Sequence
from leyden.services.engine.settings import Settings
from leyden.services.engine.text import StopStrings, Text
from leyden.services.engine.weights import load_weights

log = logger()

PauseMode = Literal["abort", "retract", "in_place"]
T = TypeVar("T")


class Engine:
    """Serves one model. Construct and call it on the event loop's thread; `start` and `stop` control its own thread."""

    def __init__(self, settings: Settings) -> None:
        """Loads the model.

        Raises:  UnsupportedModel, WeightsRefused: the folder cannot be served
        """
        self.settings = settings
        self.config: ModelConfig = read_config(settings.model_path)
        self.text = Text(settings.model_path)
        self.model_path = str(settings.model_path)
        self.weight_version = settings.weight_version
        self.context_length = min(
            settings.context_length or self.config.context_length, self.config.context_length, settings.max_total_tokens
        )
        self.adapters: dict[str, Adapter] = {}
        self.gate = Gate()
        self._grammars = Grammars(settings.model_path, self.config.vocab_size, self.config.end_ids)
        self._metrics_name = self.model_path
        self._scheduler = _build_scheduler(settings, self.config)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._live: dict[str, Sequence] = {}
        self._frozen = False
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for reading counts; only the engine's thread changes it."""
        return self._scheduler

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        """Starts the engine's thread; it wakes the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Aborts all requests in flight and ends the thread."""
        await self.abort_all()
        self._stopping = True
        self._commands.put(_nothing)
        await asyncio.to_thread(self._thread.join)

    def prepare(self, request: GenerateRequest) -> list[Sequence]:
        """Returns a request's sequences, `n` for each prompt in order, without submitting them.

        Raises:  BadRequest: too long, outside of the vocabulary, or the id of a request in flight
        """
        changed = asyncio.Event()
        sequences = []
        for prompt in request.prompts:
            ids = self._prompt_ids(prompt)
            self._check(prompt, ids)
            for index in range(prompt.sampling.n):
                sequences.append(self._sequence(prompt, ids, index, changed, request.stream))
        if any(sequence.rid in self._live for sequence in sequences):
            raise BadRequest("a request with this rid is in flight: give each request an id of its own")
        return sequences

    async def submit(self, sequences: list[Sequence]) -> None:
        """Hands sequences to the scheduler; their `changed` is set as they advance."""
        self._live.update((sequence.rid, sequence) for sequence in sequences)
        await self._call(lambda: self._scheduler.submit(sequences))

    async def abort(self, rid: str) -> None:
        """Ends the request with this id and all its choices; ignores an unknown id."""
        await self.abort_sequences([s for s in self._live.values() if rid in (s.rid, s.group_rid)])

    async def abort_all(self) -> None:
        """Ends every request in flight."""
        await self.abort_sequences(list(self._live.values()))

    async def pause(self, mode: PauseMode) -> None:
        """Makes new requests wait; aborts, retracts to the queue, or stops those in flight."""
        await self.gate.set_paused(True)

        def freeze() -> None:
            self._frozen = True
            if mode == "retract":
                self._scheduler.retract([*self._scheduler.running, *self._scheduler.prefilling])
            self._observe()

        await self._call(freeze)
        if mode == "abort":
            await self.abort_all()

    async def resume(self) -> None:
        """Continues after `pause`."""

        def thaw() -> None:
            self._frozen = False

        await self._call(thaw)
        await self.gate.set_paused(False)

    async def flush_cache(self) -> bool:
        """Empties the prefix cache; False when a request holds a row."""
        return await self._call(self._scheduler.flush_cache)

    async def update_weights(self, folder: Path, version: str | None, flush_cache: bool) -> bool:
        """Loads and serves the weights in `folder`; returns False when the cache could not be flushed.

        After False the engine serves the new weights and labels tokens with the new version, but `/model_info` reports
        the old version, as SGLang does.

        Raises:  WeightsRefused: nothing was changed
        """
        started = time.monotonic()
        async with self.gate.update():
            model = await asyncio.to_thread(self._load, folder)
            fault_point("engine.weights_read")

            def swap() -> bool:
                self._scheduler.replace_model(model, version)
                return not flush_cache or self._scheduler.flush_cache()

            flushed = await self._call(swap)
        fault_point("engine.weights_swapped")
        # Why: an engine of SmolLM2-135M kept 520 MB after an update: the weights before it, and the reading of the new.
        await asyncio.to_thread(return_freed_memory)
        if flushed:
            self.model_path = str(folder)
            self.weight_version = self.weight_version if version is None else version
        metrics.WEIGHT_LOAD.labels(self._metrics_name).observe(time.monotonic() - started)
        log.info("weights loaded", weight_version=version, flushed=flushed, seconds=time.monotonic() - started)
        return flushed

    def _load(self, folder: Path) -> Model:
        return self._scheduler.model.with_weights(load_weights(folder, self.config, self.settings.dtype))

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serves requests that name this LoRA adapter.

        Raises:  WeightsRefused: the name is taken, or the folder holds no adapter of this model
        """
        adapter = await asyncio.to_thread(load_adapter, folder, self.config)
        if name in self.adapters:
            raise WeightsRefused(f"LoRA adapter {name} is loaded already: choose another name, or unload it")
        self.adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Refuses new requests with this adapter; those in flight end with it.

        Raises:  WeightsRefused: there is none of this name
        """
        if self.adapters.pop(name, None) is None:
            raise WeightsRefused(f"LoRA adapter {name} is not loaded")

    async def rename_weights(self, version: str) -> None:
        """Changes the version label of the current weights."""

        def relabel() -> None:
            self._scheduler.version = version

        await self._call(relabel)
        self.weight_version = version

    async def abort_sequences(self, sequences: list[Sequence]) -> None:
        """Ends those of the sequences that have not ended."""

        def end() -> None:
            live = [sequence for sequence in sequences if sequence.finish is None]
            self._scheduler.abort(live)
            self._publish(live)

        await self._call(end)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return prompt.input_ids if prompt.input_ids is not None else self.text.encode(prompt.text or "")

    def _check(self, prompt: Prompt, ids: list[int]) -> None:
        size, context = len(ids), self.context_length
        if not ids:
            raise BadRequest("the prompt is empty: give at least one token")
        biased = map(_bias_id, prompt.sampling.logit_bias)
        for token in (*ids, *prompt.sampling.stop_token_ids, *prompt.token_ids_logprob, *biased):
            if not 0 <= token < self.config.vocab_size:
                raise BadRequest(f"token id {token} is outside of the vocabulary of {self.config.vocab_size}")
        if size >= context:
            raise BadRequest(f"The input ({size} tokens) is longer than the model's context length ({context} tokens).")
        if size + prompt.sampling.max_new_tokens > context:
            raise BadRequest(
                f"Requested token count exceeds the model's maximum context length of {context} tokens: {size} of the "
                f"prompt and {prompt.sampling.max_new_tokens} new; lower max_new_tokens"
            )
        if prompt.return_routed_experts and prompt.routed_experts_start_len > size:
            start = prompt.routed_experts_start_len
            raise BadRequest(f"routed_experts_start_len {start} lies beyond the prompt of {size} tokens")
        if prompt.logprob_start_len >= size:
            raise BadRequest(f"logprob_start_len {prompt.logprob_start_len} lies beyond the prompt of {size} tokens")

    def _sequence(self, prompt: Prompt, ids: list[int], index: int, changed: asyncio.Event, streams: bool) -> Sequence:
        sampling, group_rid = prompt.sampling, prompt.rid
        if sampling.n > 1:
            prompt = prompt.model_copy(update={"rid": f"{group_rid}_{index}"})
        draw = Draw(sampling, self.config.end_ids, prompt.top_logprobs_num, prompt.token_ids_logprob)
        draw.matcher = self._grammars.matcher(sampling)
        if sampling.sampling_seed is not None:
            # Choices of one request differ: each has the seed after the one before.
            draw.seed, draw.prompt_tokens = sampling.sampling_seed + index, len(ids)
        stops = StopStrings(self.text, sampling.stop) if sampling.stop else None
        adapter = self._adapter(prompt.lora_path)
        return Sequence(prompt, np.array(ids, np.int32), draw, stops, group_rid, changed, streams, adapter)

    def _adapter(self, name: str | None) -> Adapter | None:
        if name is not None and name not in self.adapters:
            raise BadRequest(f"LoRA adapter {name!r} is not loaded: send /load_lora_adapter first")
        return None if name is None else self.adapters[name]

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs a function on the engine's thread, between two steps."""
        if not self.alive:
            raise EngineError("the engine's thread has ended: restart the process")
        future: Future[T] = Future()

        def command() -> None:
            # The command runs even if its caller was cancelled, because later commands may depend on it.
            awaited = future.set_running_or_notify_cancel()
            try:
                result = function()
            # The waiting caller receives the exception.
            except Exception as error:  # noqa: BLE001
                if awaited:
                    future.set_exception(error)
                return
            if awaited:
                future.set_result(result)

        self._commands.put(command)
        return await asyncio.wrap_future(future)

    def _run(self) -> None:
        while not self._stopping:
            working = self._scheduler.has_work and not self._frozen
            self._run_commands(wait=not working)
            if not self._scheduler.has_work or self._frozen:
                continue
            try:
                touched = self._scheduler.step()
            # After an error the thread drops all rows, ends their requests, and continues with new requests.
            except Exception:
                log.exception("step failed", running=len(self._scheduler.running))
                touched = self._scheduler.drop_all(Finish("abort", message="the engine failed", status_code=500))
            self._publish(touched)

    def _run_commands(self, wait: bool) -> None:
        """Runs the queued commands; commands that arrive meanwhile run after the next step."""
        for _ in range(max(wait, self._commands.qsize())):
            self._commands.get()()

    def _publish(self, sequences: list[Sequence]) -> None:
        """Wakes the routes of sequences that stream or ended."""
        for sequence in sequences:
            if sequence.finish is not None:
                metrics.observe_end(self._metrics_name, sequence)
        self._observe()
        news = [sequence for sequence in sequences if sequence.streams or sequence.finish is not None]
        if news and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._wake, news)

    def _wake(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence.finish is not None:
                self._live.pop(sequence.rid, None)
            sequence.changed.set()

    def _observe(self) -> None:
        metrics.observe_step(self._metrics_name, self._scheduler, self._frozen)


def _build_scheduler(settings: Settings, config: ModelConfig) -> Scheduler:
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    limits = Limits(settings.max_running_requests, settings.max_total_tokens, settings.chunked_prefill_size)
    model = Model(config, load_weights(settings.model_path, config, settings.dtype))
    return Scheduler(model, limits, Sampler(settings.seed), settings.weight_version)


def _nothing() -> None:
    pass


def _bias_id(name: str) -> int:
    """Parses the token id in a key of `logit_bias`.

    Raises:  BadRequest: no number
    """
    try:
        return int(name)
    except ValueError:
        raise BadRequest(f"logit_bias: {name!r} is no token id") from None
