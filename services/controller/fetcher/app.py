"""The fetcher's HTTP application: one route, which answers once the version is in the cache."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from leyden.libs.service import Problem
from leyden.libs.service.app import create_app
from leyden.libs.service.secrets import read_secret
from leyden.libs.telemetry import logger
from leyden.libs.weights import Damaged, NotPublished, VersionKey
from leyden.libs.weights.cache import NodeCache
from leyden.services.controller.fetcher.settings import Settings

log = logger()


class Wanted(BaseModel):
    """A version that an engine is to load; `adapter`: its LoRA adapter alone."""

    model_config = ConfigDict(extra="forbid")

    run_id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]{0,99}$")]
    version: Annotated[int, Field(ge=0)]
    content_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    adapter: bool = False


class Fetched(BaseModel):
    """The folder of the version on this node."""

    path: str


def create_fetcher_app(settings: Settings) -> FastAPI:
    """Raises: StoreUnusable: the store's client is not installed; SecretError: the key's file cannot be used"""
    store = settings.open_weight_store()
    assert store is not None
    cache = NodeCache(settings.folder.absolute(), store, settings.folder_bytes)
    key = read_secret(settings.key, settings.key_file)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield

    app = create_app("fetcher", lifespan=lifespan, max_body_bytes=2**16, error_handlers={})

    @app.post("/fetch")
    async def fetch(request: Request, wanted: Wanted) -> Fetched:
        _require_key(request, key)
        version = VersionKey(wanted.run_id, wanted.version, wanted.content_sha256)
        try:
            path = await asyncio.to_thread(cache.fetch, version, adapter=wanted.adapter)
        except NotPublished as error:
            raise Problem(404, str(error), cause="unknown") from error
        except Damaged as error:
            log.error("version damaged", run_id=wanted.run_id, version=wanted.version, cause=str(error))
            raise Problem(409, str(error), cause="damaged") from error
        except OSError as error:
            raise Problem(503, str(error), cause="store") from error
        return Fetched(path=str(path))

    return app


def _require_key(request: Request, key: str | None) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if key is not None and not (scheme.lower() == "bearer" and secrets.compare_digest(given.encode(), key.encode())):
        raise Problem(401, "send the engines' admin key as a bearer token", cause="unauthorised")
