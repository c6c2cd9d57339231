"""The models of the runs: chat template and tokenizer, read when a run first calls.

A run's model owns both. A run that names none has the model of its pool.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from weakref import WeakValueDictionary

from cachetools import LRUCache

from leyden.libs.store.engines import Pool
from leyden.libs.telemetry import logger
from leyden.services.gateway.errors import Unavailable
from leyden.services.gateway.prompt.prefix import PrefixCache, PrefixIndex
from leyden.services.gateway.prompt.reasoning import ReasoningParserName
from leyden.services.gateway.prompt.rendering import Renderer
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.prompt.tokenizer import ModelUnreadable
from leyden.services.gateway.prompt.tools.parsers import ToolParserName
from leyden.services.gateway.records.reader import Reader

log = logger()


@dataclass(frozen=True)
class ServedModel:
    """A model with the completed calls that its prompts can continue."""

    pool: str
    chat: ChatModel
    prefixes: PrefixIndex


class _Source(NamedTuple):
    """A pool, and the folder of the model; None: that of the settings. All runs over both share the model."""

    pool: Pool
    folder: str | None


MAX_MODELS = 32
"""Models in memory; the one that was used least recently is read again when a run calls it."""


class PoolModels:
    """The model of each run. One whose run and pool name no folder is that of the gateway's own settings.

    Args: default: the model of the settings; history_bytes: of all models together; tool_parsers, reasoning_parsers:
        by pool, for those that do not follow their template; a run's own model follows its own
    """

    def __init__(
        self,
        default: ChatModel,
        reader: Reader,
        *,
        history_bytes: int,
        renderer: Renderer,
        tool_parsers: Mapping[str, ToolParserName],
        reasoning_parsers: Mapping[str, ReasoningParserName],
    ) -> None:
        self._default = default
        self._reader = reader
        self._prefixes = PrefixCache(history_bytes)
        self._renderer = renderer
        self._tool_parsers = tool_parsers
        self._reasoning_parsers = reasoning_parsers
        self._served: LRUCache[_Source, ServedModel] = LRUCache(MAX_MODELS)
        self._loading: WeakValueDictionary[_Source, asyncio.Lock] = WeakValueDictionary()

    async def of_run(self, run_id: str) -> ServedModel:
        """Returns the model of the run.

        Raises: Unavailable: the pool is gone, the model's folder cannot be read, or the store is down
        """
        model = await self._reader.run_model(run_id)
        source = _Source(model.pool, model.own or model.pool.model_path)
        served = self._served.get(source)
        return served or await self._load_once(source)

    async def chat(self, run_id: str) -> ChatModel:
        return (await self.of_run(run_id)).chat

    async def _load_once(self, source: _Source) -> ServedModel:
        # One lock a model: a folder that is slow to read delays no other.
        lock = self._loading.setdefault(source, asyncio.Lock())
        async with lock:
            served = self._served.get(source)
            if served is None:
                served = self._served[source] = await self._load(source)
            return served

    async def _load(self, source: _Source) -> ServedModel:
        pool, folder = source
        if folder is None or (pool.model_path is None and await asyncio.to_thread(self._is_default, Path(folder))):
            chat = self._default
        else:
            chat = await self._read(pool, Path(folder))
        prefixes = PrefixIndex(chat, self._prefixes, scope=source, renderer=self._renderer)
        return ServedModel(pool.name, chat, prefixes)

    def _is_default(self, folder: Path) -> bool:
        """Whether a model that the trainer has named is the gateway's own, which may have another path here."""
        if not folder.is_dir():
            log.warning(
                "model not here: the gateway's own serves", folder=str(folder), default=str(self._default.folder)
            )
            return True
        return folder.samefile(self._default.folder)

    async def _read(self, pool: Pool, folder: Path) -> ChatModel:
        is_pools, length = pool.model_path == str(folder), pool.context_length
        if pool.model_path is None:
            length = self._default.tokenizer.context_length
        try:
            return await asyncio.to_thread(
                ChatModel,
                folder,
                context_length=length,
                tool_parser=self._tool_parsers.get(pool.name) if is_pools else None,
                reasoning_parser=self._reasoning_parsers.get(pool.name) if is_pools else None,
            )
        except ModelUnreadable as error:
            log.warning("model not read", pool=pool.name, folder=str(folder), cause=str(error))
            message = f"The gateway cannot read the model of pool {pool.name}: {error}."
            raise Unavailable(message, code="model_unavailable", retry_after_seconds=10) from error
