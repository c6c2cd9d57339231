"""The OpenAI client against the gateway: answers, streams and the record behind each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import select

from libs.store import tables
from libs.store.database import Database
from services.gateway.render import ChatModel
from tests import builders
from tests.fakes import engine as fake
from tests.fakes.chat_model import CHATML, CHATML_WITH_TOOLS, EOS, make_chat_model
from tests.fakes.engine import FakeEngine
from tests.fakes.gateway import GatewayUnderTest, running_gateway


async def test_smoke(tmp_path, database, postgres_dsn):
    run = await builders.add_run(database)
    model = ChatModel(make_chat_model(tmp_path / "model"))
    eng = FakeEngine(says=lambda body: [*model.encode("Hello.").tolist(), EOS], decode=model.decode, weight_version=f"{run.id}:0")
    async with fake.running(eng), running_gateway(tmp_path, model_path=tmp_path/"model", database_url=postgres_dsn, run_id=run.id, engine_urls=[eng.url]) as gw:
        client = gw.client(f"{run.id}.0.0")
        async with client:
            r = await client.chat.completions.create(model="m", messages=[{"role":"user","content":"hi"}])
            print(r)
            s = await client.chat.completions.create(model="m", messages=[{"role":"user","content":"hi"},{"role":"assistant","content":"Hello."},{"role":"user","content":"x"}], stream=True, stream_options={"include_usage":True})
            async for c in s: print(c)
    async with database.read() as session:
        for row in await session.scalars(select(tables.ModelCall)):
            print({k:v for k,v in vars(row).items()})
