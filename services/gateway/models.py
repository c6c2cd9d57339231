"""The models of the pools: a run's chat template and tokenizer, read when a run of the pool first calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leyden.libs.store.engines import Pool
from leyden.libs.telemetry import logger
from leyden.services.gateway.errors import Unavailable
from leyden.services.gateway.prompt.prefix import PrefixIndex
from leyden.services.gateway.prompt.reasoning import ReasoningParserName
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.prompt.tokenizer import ModelUnreadable
from leyden.services.gateway.prompt.tool_parsers import ToolParserName
from leyden.services.gateway.records.reader import Reader

log = logger()


@dataclass(frozen=True)
class ServedModel:
    """A model with the completed calls that its prompts can continue."""

    pool: str
    chat: ChatModel
    prefixes: PrefixIndex


class PoolModels:
    """The model of each pool. A pool without a model folder has the one of the gateway's own settings.

    Args: default: the model of the settings; history_bytes: for each model; tool_parsers, reasoning_parsers: by pool,
        for those that do not follow their template
    """

    def __init__(
        self,
        default: ChatModel,
        reader: Reader,
        *,
        history_bytes: int,
        tool_parsers: Mapping[str, ToolParserName],
        reasoning_parsers: Mapping[str, ReasoningParserName],
    ) -> None:
        self._default = default
        self._reader = reader
        self._history_bytes = history_bytes
        self._tool_parsers = tool_parsers
        self._reasoning_parsers = reasoning_parsers
        self._served: dict[Pool, ServedModel] = {}
        self._loading = asyncio.Lock()

    async def of_run(self, run_id: str) -> ServedModel:
        """Returns the model of the run's pool.

        Raises: Unavailable: the pool is gone, its folder cannot be read, or the store is down
        """
        pool = await self._reader.pool(run_id)
        if pool not in self._served:
            async with self._loading:
                if pool not in self._served:
                    self._served[pool] = await self._load(pool)
        return self._served[pool]

    async def _load(self, pool: Pool) -> ServedModel:
        chat = self._default
        if pool.model_path is not None:
            try:
                chat = await asyncio.to_thread(
                    ChatModel,
                    Path(pool.model_path),
                    context_length=pool.context_length,
                    tool_parser=self._tool_parsers.get(pool.name),
                    reasoning_parser=self._reasoning_parsers.get(pool.name),
                )
            except ModelUnreadable as error:
                log.warning("model not read", pool=pool.name, cause=str(error))
                message = f"The gateway cannot read the model of pool {pool.name}: {error}."
                raise Unavailable(message, code="model_unavailable", retry_after_seconds=10) from error
        return ServedModel(pool.name, chat, PrefixIndex(chat, max_bytes=self._history_bytes))
