"""An engine that restarts, vanishes, refuses and is left paused by a controller that died, against a model.

Whatever happened before, one look brings it to the wanted version where it can be, and the store says what it serves.
"""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from leyden.libs.queue.notifications import Notifications
from leyden.libs.store import tables
from leyden.services.controller.engines import EngineClient, Fleet, Wanted
from leyden.services.controller.settings import Settings
from tests.contract.gateway.test_process import free_port
from tests.fakes.engine_control import FakeEngineControl, running
from tests.state_machines import StoreMachine, walk

NO_REDIS = "redis://127.0.0.1:1/0"
RUN = "run-a"


class EngineMachine(StoreMachine):
    @initialize()
    def begin(self) -> None:
        self.open()
        self.engine = FakeEngineControl()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.notifications = Notifications(NO_REDIS)
        self.living: contextlib.AbstractAsyncContextManager[Any] | None = None
        self.http = self.await_(self._client())
        self.start()
        self.become_leader()

    async def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=5, trust_env=False)

    def teardown(self) -> None:
        if hasattr(self, "http"):
            self.vanish()
            self.await_(self.http.aclose())
            self.await_(self.notifications.close())
        super().teardown()

    @rule()
    def start(self) -> None:
        """With the weights that it was started with, not those that it served before."""
        if self.living is None:
            self.engine.weight_version, self.engine.paused = "default", False
            self.living = running(self.engine, self.port)
            self.await_(self.living.__aenter__())

    @rule()
    def vanish(self) -> None:
        living, self.living = self.living, None
        if living is not None:
            self.await_(living.__aexit__(None, None, None))

    @rule(left_paused=st.booleans())
    def become_leader(self, left_paused: bool = False) -> None:
        """Another controller leads; the last one may have died between pause and continue."""
        self.engine.paused = self.engine.paused or (left_paused and self.living is not None)
        settings = Settings(engine_urls=[self.url], engine_refusal_seconds=0.0)
        self.fleet = Fleet(settings, self.database, self.notifications)
        self.client = EngineClient(self.url, self.http, update_seconds=5.0)
        self.wanted: Wanted | None = None

    @rule(version=st.integers(0, 3))
    def want(self, version: int) -> None:
        self.wanted = Wanted(RUN, version, f"/weights/{version}")
        self.fleet.want(self.wanted)

    @rule(versions=st.frozensets(st.integers(0, 3), max_size=2))
    def damage(self, versions: frozenset[int]) -> None:
        self.engine.bad_paths = {f"/weights/{version}" for version in versions}

    @rule()
    def look(self) -> None:
        before = self.engine.weight_version
        self.await_(self.fleet._look_and_correct(self.client))
        wanted = self.wanted
        told = None if wanted is None else f"{RUN}:{wanted.version}"
        served = (
            before if told is None or (wanted and wanted.path in self.engine.bad_paths and told != before) else told
        )
        if self.living is None:
            assert self.stored() == ("unreachable", None, None)
            return
        assert not self.engine.paused
        assert self.engine.weight_version == served
        if wanted is not None and served != told:
            assert self.stored() == ("unreachable", None, None)
        elif served == "default":
            assert self.stored() == ("updating", None, None)
        else:
            assert self.stored() == ("serving", RUN, int(served.rpartition(":")[2]))
        version = self.fleet.served_version(RUN)
        assert (version is None) == (self.stored()[0] != "serving")

    @rule(version=st.integers(0, 3))
    def want_and_look(self, version: int) -> None:
        self.want(version)
        self.look()

    def stored(self) -> tuple[str, str | None, int | None]:
        async def read() -> tuple[str, str | None, int | None]:
            async with self.database.read() as session:
                row = await session.get_one(tables.Engine, self.url)
            return row.state, row.run_id, row.policy_version

        return self.await_(read())


def test_engines_follow_the_model_in_any_order(postgres_dsn: str) -> None:
    walk(EngineMachine, postgres_dsn, examples=40, steps=20)
