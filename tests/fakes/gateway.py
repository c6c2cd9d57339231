"""The real gateway on a free port, with a key for any attempt and the official OpenAI client in front of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from sqlalchemy import select

from leyden.libs.attempts import Endpoints, environment_block, secrets_block
from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.contracts.config import Agent, ProcessRunner
from leyden.libs.contracts.conversation import turn_json
from leyden.libs.queue.leases import Lease
from leyden.libs.service import serving
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.records.chains import FullCall, full_calls
from leyden.services.gateway.app import create_app
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.settings import Settings
from tests.fakes.chat_model import CHATML, EOS, make_chat_model
from tests.fakes.model_families import ModelFamily
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support import builders


@dataclass
class GatewayUnderTest:
    """Address and key ring of a running gateway."""

    url: str
    ring: KeyRing
    stop: Callable[[], Awaitable[None]]
    """Ends the calls in hand, as a process does before its last words."""
    run_id: str = "run-test"

    def key(
        self,
        rollout_id: str,
        attempt: int = 1,
        *,
        lasts_seconds: int = 600,
        scope: Scope = Scope.MODEL,
        more_scopes: Iterable[Scope] = (),
        greedy: bool = False,
    ) -> str:
        """The key that the runner would give to this attempt's agent."""
        return sign(
            self.ring,
            Capability(
                run_id=self.run_id,
                rollout_id=rollout_id,
                attempt=attempt,
                scopes=frozenset({scope, *more_scopes}),
                expires_at=int(time.time()) + lasts_seconds,
                greedy=greedy,
            ),
        )

    def base_url(self, rollout_id: str, attempt: int = 1) -> str:
        """The agent's OPENAI_BASE_URL."""
        return f"{self.url}/r/{rollout_id}/{attempt}/v1"

    def client(self, rollout_id: str, attempt: int = 1, **options: Any) -> AsyncOpenAI:
        """An agent's client; it does not retry unless told to."""
        return AsyncOpenAI(
            base_url=self.base_url(rollout_id, attempt),
            **{"api_key": self.key(rollout_id, attempt), "max_retries": 0, **options},
        )

    def anthropic(self, rollout_id: str, attempt: int = 1, **options: Any) -> AsyncAnthropic:
        """An agent's Anthropic client; it does not retry unless told to."""
        return AsyncAnthropic(
            base_url=self.base_url(rollout_id, attempt).removesuffix("/v1"),
            api_key=self.key(rollout_id, attempt),
            **{"max_retries": 0, **options},
        )


@asynccontextmanager
async def running_gateway(
    folder: Path, *, model_path: Path, database_url: str, run_id: str, **settings: Any
) -> AsyncIterator[GatewayUnderTest]:
    """A gateway with its key ring in a folder; further arguments are its settings."""
    keys = folder / "keys.json"
    if not keys.exists():
        write_keys(keys, {"test": "s" * 40})
    values = {"hold_seconds": 10.0, "record_hold_seconds": 30.0, "engine_poll_seconds": 0.02, **settings}
    app = create_app(Settings(model_path=model_path, database_url=database_url, capability_keys_file=keys, **values))
    async with serving(app, shutdown_seconds=2) as port:
        yield GatewayUnderTest(f"http://127.0.0.1:{port}", KeyRing(keys), app.state.give_up, run_id)


async def all_calls(database: Database) -> Sequence[tables.ModelCall]:
    """Every recorded call in full, in order."""
    async with database.read() as session:
        table = tables.ModelCall
        calls = (await session.scalars(select(table).order_by(table.sequence, table.choice))).all()
        found = await full_calls(session, calls)
    for call, full in zip(calls, found, strict=True):
        assert isinstance(full, FullCall)
        call.prompt_ids, call.tools = full.prompt_ids, list(full.tools)
        call.turns = [turn_json(turn) for turn in full.turns]
    return calls


@dataclass
class Scene:
    """A run, a scripted engine, and a gateway between the engine and the test."""

    run_id: str
    rollout: tables.Rollout
    model: ChatModel
    engine: ScriptedEngine
    gateway: GatewayUnderTest
    database: Database
    folder: Path
    settings: dict[str, Any]

    @property
    def rollout_id(self) -> str:
        """The rollout whose door the tests use."""
        return self.rollout.id

    def client(self, **options: Any) -> AsyncOpenAI:
        """The agent's client of attempt 1."""
        return self.gateway.client(self.rollout_id, **options)

    def anthropic(self, **options: Any) -> AsyncAnthropic:
        """The Anthropic client of attempt 1's agent."""
        return self.gateway.anthropic(self.rollout_id, **options)

    async def calls(self) -> Sequence[tables.ModelCall]:
        """Every recorded call, in order."""
        return await all_calls(self.database)

    def another_gateway(self, **settings: Any) -> Any:
        """A second gateway on the same store and engine: a replica, or the same one after a restart."""
        return running_gateway(self.folder, run_id=self.run_id, **{**self.settings, **settings})


def attempt_environment(
    stage: Scene, gateway_url: str, collector_url: str, task: dict[str, Any], **variables: str
) -> dict[str, str]:
    """The variables that the runner gives to the agent of attempt 1. variables: of the run."""
    lease = Lease(
        run_id=stage.run_id,
        group_id=stage.rollout.group_id,
        rollout_id=stage.rollout_id,
        attempt=1,
        lease_id="lease",
        expires_at=datetime.now(UTC),
        dataset_id="data",
        task_number=0,
        task=task,
        agent=Agent(command=["agent"], environment=variables),
        runner=ProcessRunner(),
        trace_parent=None,
    )
    key = stage.gateway.key(stage.rollout_id, more_scopes=[Scope.TELEMETRY])
    endpoints = Endpoints(gateway_url, collector_url, key=key, grant_reward=False)
    return environment_block(lease, endpoints) | secrets_block(lease, endpoints)


Says = Callable[[dict[str, Any]], Sequence[int]] | str | Sequence[str]


@asynccontextmanager
async def scene(
    folder: Path,
    database: Database,
    *,
    says: Says = "Hello.",
    template: str = CHATML,
    context_length: int = 4096,
    run: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    family: ModelFamily | None = None,
    **settings: Any,
) -> AsyncIterator[Scene]:
    """Everything running, attempt 1 of twelve siblings included.

    `says` is one text for every call, or one per call in order, ended by the end of turn where it has no end mark.
    `family` replaces `template` and `context_length`.
    """
    created = await builders.add_run(database, config=run)
    _, rollouts = await builders.add_group(database, created, size=12)
    # Older than the gateway, which then asks the store whether a request repeats one of a gateway that died.
    began = datetime.now(tz=UTC) - timedelta(minutes=1)
    for rollout in rollouts:
        await builders.add_attempt(database, rollout, created_at=began)
    if family is None:
        make_chat_model(folder / "model", template, context_length=context_length)
    else:
        family.write(folder / "model")
    model = ChatModel(folder / "model")
    said = ScriptedEngine(_script(model, says), model.tokenizer.decode, f"{created.id}:0", **(engine or {}))
    async with running(said):
        values = {
            "model_path": folder / "model",
            "database_url": database.dsn,
            "engine_urls": [said.url],
            **settings,
        }
        async with running_gateway(folder, run_id=created.id, **values) as gateway:
            yield Scene(created.id, rollouts[0], model, said, gateway, database, folder, values)


def _script(model: ChatModel, says: Says) -> Callable[[dict[str, Any]], Sequence[int]]:
    if callable(says):
        return says
    texts = [says] if isinstance(says, str) else list(says)

    def next_text(_body: dict[str, Any]) -> Sequence[int]:
        text = texts.pop(0) if len(texts) > 1 else texts[0]
        ids: list[int] = model.tokenizer.encode(text).tolist()
        return ids if ids and ids[-1] in model.tokenizer.eos_ids else [*ids, EOS]

    return next_text
