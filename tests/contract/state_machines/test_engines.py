"""An engine that restarts, vanishes, refuses and is left paused by a controller that died, against a model.

One reconciliation brings it to the target version where that is possible, and the store says what it serves.
"""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from leyden.libs.queue.notifications import Notifications
from leyden.libs.store import tables
from leyden.services.controller.engines.client import EngineClient
from leyden.services.controller.engines.discovery import StaticEngines
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings
from leyden.services.controller.worker import make_fleet
from tests.contract.gateway.test_process import free_port
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support.state_machines import StoreMachine, walk

NO_REDIS = "redis://127.0.0.1:1/0"
RUN = "run-a"


class EngineMachine(StoreMachine):
    @initialize()
    def begin(self) -> None:
        self.open()
        self.engine = ScriptedEngine()
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.notifications = Notifications(NO_REDIS)
        self.server: contextlib.AbstractAsyncContextManager[Any] | None = None
        self.http = self.await_(self._client())
        self.start()
        self.become_leader()

    async def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=5, trust_env=False, verify=False)

    def teardown(self) -> None:
        if hasattr(self, "http"):
            self.vanish()
            self.await_(self.http.aclose())
            self.await_(self.notifications.close())
        super().teardown()

    @rule()
    def start(self) -> None:
        """With the weights that it was started with, not those that it served before."""
        if self.server is None:
            self.engine.weight_version, self.engine.paused = "default", False
            self.server = running(self.engine, self.port)
            self.await_(self.server.__aenter__())

    @rule()
    def vanish(self) -> None:
        server, self.server = self.server, None
        if server is not None:
            self.await_(server.__aexit__(None, None, None))

    @rule(left_paused=st.booleans())
    def become_leader(self, left_paused: bool = False) -> None:
        """Another controller leads; the last one may have died between pause and continue."""
        self.engine.paused = self.engine.paused or (left_paused and self.server is not None)
        settings = Settings(engine_urls=[self.url], engine_refusal_seconds=0.0)
        self.fleet = make_fleet(settings, StaticEngines(frozenset({self.url})), self.database, self.notifications)
        self.member = self.fleet.add(EngineClient(self.url, self.http, settings))
        self.target: TargetVersion | None = None

    @rule(version=st.integers(0, 3))
    def set_target(self, version: int) -> None:
        self.target = TargetVersion(RUN, version, f"/weights/{version}", "hash")
        self.fleet.set_target(self.target)

    @rule(versions=st.frozensets(st.integers(0, 3), max_size=2))
    def damage(self, versions: frozenset[int]) -> None:
        self.engine.bad_paths = {f"/weights/{version}" for version in versions}

    @rule()
    def reconcile(self) -> None:
        before = self.engine.weight_version
        self.await_(self.fleet.reconcile(self.member))
        target = self.target
        label = None if target is None else f"{RUN}:{target.version}"
        refused = target is not None and target.path in self.engine.bad_paths and label != before
        served = before if label is None or refused else label
        if self.server is None:
            assert self.stored() == ("unreachable", None, None)
            return
        assert not self.engine.paused
        assert self.engine.weight_version == served
        if target is not None and served != label:
            assert self.stored() == ("unreachable", None, None)
        elif served == "default":
            assert self.stored() == ("updating", None, None)
        else:
            assert self.stored() == ("serving", RUN, int(served.rpartition(":")[2]))
        version = self.fleet.served_version(RUN)
        assert (version is None) == (self.stored()[0] != "serving")

    @rule(version=st.integers(0, 3))
    def set_target_and_reconcile(self, version: int) -> None:
        self.set_target(version)
        self.reconcile()

    def stored(self) -> tuple[str, str | None, int | None]:
        async def read() -> tuple[str, str | None, int | None]:
            async with self.database.read() as session:
                row = await session.get_one(tables.Engine, self.url)
            return row.state, row.run_id, row.policy_version

        return self.await_(read())


def test_engines_follow_the_model_in_any_order(postgres_dsn: str) -> None:
    walk(EngineMachine, postgres_dsn, examples=40, steps=20)
