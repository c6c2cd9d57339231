"""Brings every engine to the wanted policy version, over SGLang's control endpoints, and notices when one falls back.

A version changes in three calls: pause (requests in flight return to the engine's queue, new ones wait), load, continue,
the last in a `finally`. Agents never see it: the gateway waits. `/model_info` decides which version an engine serves. The
next poll finds an engine that restarted with other weights and brings it back.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.contracts.ids import parse_weight_version, weight_version
from leyden.libs.contracts.states import EngineState
from leyden.libs.faults import fault_point
from leyden.libs.queue.notifications import Notifications, Topic
from leyden.libs.service import pause
from leyden.libs.service.secrets import read_secret
from leyden.libs.store.database import AWAY, Database, cause
from leyden.libs.store.engines import SeenEngine, forget_other_engines, write_engines
from leyden.libs.telemetry import SECONDS_BUCKETS, RateLimitedLogger, logger
from leyden.services.controller.settings import Settings

log = logger()
limited_log = RateLimitedLogger(log)

UPDATES = Counter("controller_engine_updates_total", "Weight updates of engines.", ["result"])
UPDATE_SECONDS = Histogram("controller_engine_update_seconds", "Pause to continue.", buckets=SECONDS_BUCKETS)
SERVING = Gauge("controller_engines_serving", "Engines that serve the wanted version.")


class EngineRefused(Exception):
    """The engine answered, and did not do what it was asked; the message is its own."""


@dataclass(frozen=True)
class Wanted:
    """The policy that every engine should serve."""

    run_id: str
    version: int
    path: str


@dataclass(frozen=True)
class EngineKeys:
    """What opens the engines: SGLang's control routes refuse the API key where there is an admin key."""

    api_key: str | None = None
    admin_key: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> EngineKeys:
        """The keys that settings name.

        Raises: SecretError: a key's file cannot be used
        """
        return cls(
            read_secret(settings.engine_api_key, settings.engine_api_key_file),
            read_secret(settings.engine_admin_key, settings.engine_admin_key_file),
        )

    @property
    def looking(self) -> dict[str, str]:
        """Headers of a look at what the engine serves."""
        return {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}

    @property
    def control(self) -> dict[str, str]:
        """Headers of a change."""
        return self.looking if self.admin_key is None else {"authorization": f"Bearer {self.admin_key}"}


class EngineClient:
    """The control endpoints of one engine. Bodies are always JSON: SGLang answers 400 to an empty one."""

    def __init__(
        self, url: str, http: httpx.AsyncClient, *, update_seconds: float, keys: EngineKeys = EngineKeys()
    ) -> None:
        self.url = url
        self._http = http
        self._update_seconds = update_seconds
        self._keys = keys

    async def weight_version(self) -> str:
        """What the engine says that it serves.

        Raises: httpx.HTTPError: it does not answer; ValueError: what it answers is not what an engine answers
        """
        answer = await self._http.get(f"{self.url}/model_info", headers=self._keys.looking)
        answer.raise_for_status()
        return str(_document(answer).get("weight_version"))

    async def update(self, wanted: Wanted) -> None:
        """Pauses, loads and continues. Safe to repeat.

        Raises: EngineRefused: the weights could not be loaded, the old ones stay; httpx.HTTPError: it does not answer.
        """
        await self._post("/pause_generation", {"mode": "retract"})
        fault_point("controller.engine_paused")
        try:
            await self._load(wanted)
        finally:
            # Shielded: an engine that stays paused would hold every agent for good.
            resuming = asyncio.ensure_future(self.resume())
            # Whoever waited may be cancelled: an exception that nobody fetches is no accident.
            resuming.add_done_callback(lambda task: task.cancelled() or task.exception())
            await asyncio.shield(resuming)

    async def resume(self) -> None:
        """Lets a paused engine go on; changes nothing on one that is not paused."""
        await self._post("/continue_generation", {})

    async def _load(self, wanted: Wanted) -> None:
        body = {
            "model_path": wanted.path,
            "weight_version": weight_version(wanted.run_id, wanted.version),
            "flush_cache": True,
        }
        answer = await self._post("/update_weights_from_disk", body, seconds=self._update_seconds)
        fault_point("controller.engine_loaded")
        told = _document(answer)
        if not told.get("success"):
            raise EngineRefused(str(told.get("message"))[:500])

    async def _post(self, path: str, body: dict[str, object], seconds: float | None = None) -> httpx.Response:
        limit = httpx.USE_CLIENT_DEFAULT if seconds is None else httpx.Timeout(seconds)
        answer = await self._http.post(self.url + path, json=body, timeout=limit, headers=self._keys.control)
        if answer.status_code >= 400:
            raise EngineRefused(f"{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer


class Fleet:
    """Every configured engine, and what it was last seen serving."""

    def __init__(self, settings: Settings, database: Database, notifications: Notifications) -> None:
        self._settings = settings
        self._database = database
        self._notifications = notifications
        self._wanted: Wanted | None = None
        self._changed = {url: asyncio.Event() for url in settings.engine_urls}
        self._seen: dict[str, SeenEngine] = {}
        self._resumed: set[str] = set()
        self._refused: dict[str, tuple[Wanted, float]] = {}

    def want(self, wanted: Wanted | None) -> None:
        """Changes what engines should serve; None leaves them as they are."""
        if wanted is not None and wanted != self._wanted:
            self._wanted = wanted
            for changed in self._changed.values():
                changed.set()

    def wants(self, run_id: str, version: int) -> bool:
        """Whether this is what engines are being brought to already."""
        return self._wanted is not None and (self._wanted.run_id, self._wanted.version) == (run_id, version)

    def served_version(self, run_id: str) -> int | None:
        """The oldest version that a serving engine has of the run; None when none serves it."""
        versions = [
            engine.policy_version
            for engine in self._seen.values()
            if engine.state is EngineState.SERVING and engine.run_id == run_id and engine.policy_version is not None
        ]
        return min(versions, default=None)

    def trouble(self) -> str | None:
        """Why no engine serves or will soon, for people; None when one does."""
        if any(engine.state is not EngineState.UNREACHABLE for engine in self._seen.values()):
            return None
        return "; ".join(f"{engine.url}: {engine.detail}" for engine in self._seen.values() if engine.detail) or None

    async def keep(self) -> None:
        """Looks and corrects, for ever; each engine by itself, so that one that hangs does not hold up the others."""
        keys = EngineKeys.of(self._settings)
        timeout = httpx.Timeout(self._settings.engine_answer_seconds)
        async with httpx.AsyncClient(timeout=timeout, trust_env=False) as http:
            seconds = self._settings.engine_update_seconds
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forget_others())
                for url in self._changed:
                    group.create_task(self._keep(EngineClient(url, http, update_seconds=seconds, keys=keys)))

    async def _forget_others(self) -> None:
        """Once, as soon as the store can be reached."""
        while True:
            try:
                async with self._database.session() as session:
                    await forget_other_engines(session, self._settings.engine_urls)
            except AWAY as error:
                limited_log.warning("engines not noted", cause=cause(error))
                await asyncio.sleep(self._settings.engine_poll_seconds)
            else:
                return

    async def _keep(self, client: EngineClient) -> None:
        changed = self._changed[client.url]
        while True:
            changed.clear()
            try:
                await self._look_and_correct(client)
            except AWAY as error:
                limited_log.warning("engines not noted", cause=cause(error))
            # The loop must live: the engine is looked at again.
            except Exception:
                log.exception("engine not seen", url=client.url)
            await pause(changed, self._settings.engine_poll_seconds)

    async def _look_and_correct(self, client: EngineClient) -> None:
        wanted = self._wanted
        refused, until = self._refused.get(client.url, (None, 0.0))
        if refused == wanted and time.monotonic() < until:
            return
        try:
            await self._resume_once(client)
            seen = await _look(client)
            if wanted is not None and (seen.run_id, seen.policy_version) != (wanted.run_id, wanted.version):
                fault_point("controller.version_noticed")
                await self._note(SeenEngine(client.url, EngineState.UPDATING, detail=f"loading {wanted.version}"))
                seen = await _correct(client, wanted)
        # AttributeError: what the HTTP client makes of a connection that is reset while it opens.
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            self._resumed.discard(client.url)
            seen = SeenEngine(client.url, EngineState.UNREACHABLE, detail=_cause(error))
        except EngineRefused as error:
            UPDATES.labels("refused").inc()
            if wanted is not None:
                self._refused[client.url] = (wanted, time.monotonic() + self._settings.engine_refusal_seconds)
            seen = SeenEngine(client.url, EngineState.UNREACHABLE, detail=str(error))
        await self._note(seen)

    async def _resume_once(self, client: EngineClient) -> None:
        """At first sight: a controller that was killed between pause and continue left the engine paused."""
        if client.url not in self._resumed:
            await client.resume()
            self._resumed.add(client.url)

    async def _note(self, seen: SeenEngine) -> None:
        """Keeps what was seen, and writes it where it is new."""
        if self._seen.get(seen.url) == seen:
            return
        async with self._database.session() as session:
            await write_engines(session, [seen])
        self._seen[seen.url] = seen
        log.info("engine seen", url=seen.url, state=seen.state, version=seen.policy_version, detail=seen.detail)
        SERVING.set(_count_serving(list(self._seen.values()), self._wanted))
        await self._notifications.notify(Topic.ENGINES)


async def _look(client: EngineClient) -> SeenEngine:
    told = await client.weight_version()
    try:
        run_id, version = parse_weight_version(told)
    except ValueError:
        return SeenEngine(client.url, EngineState.UPDATING, detail=f"serves {told!r}, which no run gave it")
    return SeenEngine(client.url, EngineState.SERVING, run_id, version)


async def _correct(client: EngineClient, wanted: Wanted) -> SeenEngine:
    with UPDATE_SECONDS.time():
        await client.update(wanted)
    UPDATES.labels("done").inc()
    return await _look(client)


def _count_serving(engines: Sequence[SeenEngine], wanted: Wanted | None) -> int:
    if wanted is None:
        return 0
    target = (EngineState.SERVING, wanted.run_id, wanted.version)
    return sum((engine.state, engine.run_id, engine.policy_version) == target for engine in engines)


def _document(answer: httpx.Response) -> dict[str, Any]:
    """Raises ValueError where the answer is no JSON object."""
    document = answer.json()
    if not isinstance(document, dict):
        raise ValueError(f"{answer.url.path} answered {str(document)[:100]!r}, no JSON object")
    return document


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
