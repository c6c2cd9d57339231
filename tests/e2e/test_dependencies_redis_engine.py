"""Redis and engines in trouble while agents work: Redis costs speed and engines cost time, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from tests.faults.proxy import Trouble
from tests.faults.stage import Stage, stage
from tests.support.chaos import kill
from tests.support.long import long_only
from tests.support.waiting import until

NO_JSON = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nnot json!"
REDIS = {
    "it is gone": Trouble(refuse=True),
    "it is silent": Trouble(hang=True),
}
ENGINE = {
    "it is silent": Trouble(hang=True),
    "it is slow": Trouble(delay_seconds=0.5),
    "it answers no JSON": Trouble(answer=NO_JSON),
    "its answers end early": Trouble(truncate_bytes=150),
    "it is gone": Trouble(refuse=True),
}
HELD_SECONDS = 2.0
pytestmark = [long_only, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("stage")) as running:
        yield running


@contextmanager
def server_of(on: Stage) -> Iterator[redis.Redis]:
    """The Redis server itself, past the proxy, its settings as before afterwards."""
    with redis.Redis.from_url(on.redis) as client:
        yield client
        client.config_set("maxmemory", 0)
        client.replicaof("NO", "ONE")


def finish(on: Stage, run_id: str) -> None:
    ended = on.ended(run_id)
    assert (ended.phase, ended.reason) == ("completed", None)
    assert on.damage(run_id) == {}
    assert on.repeated(times=12) == {}


def reports_that_redis_is_away(on: Stage) -> bool:
    status, checks = on.readiness("runner")
    return status == 503 and "QueueUnavailable" in str(checks)


def test_a_training_continues_without_redis(on: Stage) -> None:
    run = on.train(steps=16)
    with server_of(on) as server:
        for trouble in REDIS.values():
            on.redis_proxy.trouble = trouble
            until(lambda: reports_that_redis_is_away(on), "the runner tells that Redis is away")
            told = str([on.readiness(service) for service in ("controller", "runner")])
            assert str(server.connection_pool.connection_kwargs["password"]) not in told
            on.wait_for_rollouts(run.id, 4)
            on.redis_proxy.heal()
        server.config_set("maxmemory", 1)
        on.wait_for_rollouts(run.id, 36)
        server.config_set("maxmemory", 0)
        server.replicaof("127.0.0.1", "9")
        on.wait_for_rollouts(run.id, 4)
        server.replicaof("NO", "ONE")
        server.flushall()
        on.wait_for_rollouts(run.id, 4)
        on.servers[1].stop()
        assert on.servers[1].start() == on.redis
        on.wait_for_rollouts(run.id, 4)
    finish(on, run.id)


def test_a_training_survives_every_failure_of_its_engine(on: Stage) -> None:
    run = on.train(steps=4 + 2 * len(ENGINE))
    for trouble in ENGINE.values():
        on.engine_proxy.trouble = trouble
        time.sleep(HELD_SECONDS)
        on.engine_proxy.heal()
        on.wait_for_rollouts(run.id, 4)
    # It comes back with the weights of the base model, which are not those that the run has come to.
    assert kill(on.platform, "engine", run.id)
    on.wait_for_rollouts(run.id, 4)
    # Rollouts may end by what their agents had asked before the kill, when it is not back yet.
    until(lambda: _unreachable(on) == [None], "the engine serves again, beside the one that never answers")
    finish(on, run.id)


def _unreachable(on: Stage) -> list[str | None]:
    """The runs that unreachable engines serve."""
    return [engine.run_id for engine in on.client.engines() if engine.state == "unreachable"]
