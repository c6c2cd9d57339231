"""Postgres in trouble while agents work: everything holds or says 503, recovers by itself, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.faults.proxy import COPY_END, Trouble
from tests.faults.stage import SERVICES, Stage, stage
from tests.support.long import long_only
from tests.support.waiting import until

# As Postgres says it: the statement fails, and everything else goes on. A table is locked alone, as one that
# holds another's lock meanwhile could wait for a service that waits for it.
NO_SPACE = """
    CREATE OR REPLACE FUNCTION no_space() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'could not extend file "base/5/16444": No space left on device' USING ERRCODE = 'disk_full';
    END $$
"""
EVERY_TABLE = """
    DO $$ DECLARE target regclass; BEGIN
        FOR target IN SELECT oid FROM pg_class WHERE relnamespace = 'public'::regnamespace
            AND relkind IN ('r', 'p') AND NOT relispartition
        LOOP
            EXECUTE format('{}', target);
            COMMIT;
        END LOOP;
    END $$
"""
FULL = EVERY_TABLE.format("CREATE TRIGGER no_space BEFORE INSERT OR UPDATE ON %s EXECUTE FUNCTION no_space()")
FREED = EVERY_TABLE.format("DROP TRIGGER no_space ON %s")


@dataclass(frozen=True)
class Case:
    """A trouble. `cause`: what /readyz of every service says meanwhile; None where all stay ready."""

    begin: Callable[[Stage], object]
    end: Callable[[Stage], object]
    cause: str | None = None


def through_proxy(trouble: Trouble, cause: str | None = None) -> Case:
    return Case(lambda on: setattr(on.postgres_proxy, "trouble", trouble), lambda on: on.postgres_proxy.heal(), cause)


def by_sql(*begin: str, end: str, cause: str | None = None, cut: bool = False) -> Case:
    def start(on: Stage) -> None:
        for statement in begin:
            on.execute(statement)
        if cut:
            on.postgres_proxy.cut()

    return Case(start, lambda on: on.execute(end), cause)


def restart(on: Stage) -> None:
    on.servers[0].stop()
    assert on.servers[0].start() == on.database


def commit_lost(on: Stage) -> None:
    until(lambda: on.postgres_proxy.cuts > 0, "the answer to a commit is lost")
    on.postgres_proxy.heal()


CASES = {
    "connections are cut in mid-transaction": Case(lambda on: on.postgres_proxy.cut(), lambda _: None),
    "answers to commits are lost": Case(
        lambda on: setattr(on.postgres_proxy, "trouble", Trouble(cut_at=b"COMMIT", cut_answer=True)), commit_lost
    ),
    "answers to records are lost": Case(
        lambda on: setattr(on.postgres_proxy, "trouble", Trouble(cut_at=COPY_END, cut_answer=True)), commit_lost
    ),
    "it is restarted": Case(restart, lambda _: None),
    "it is refused": through_proxy(Trouble(refuse=True), "Connection refused"),
    "every query takes 200 ms": through_proxy(Trouble(delay_seconds=0.2)),
    "its disk is full": by_sql(NO_SPACE, FULL, end=FREED),
    "it has no connection left": by_sql(
        "ALTER ROLE services CONNECTION LIMIT 0",
        end="ALTER ROLE services CONNECTION LIMIT -1",
        cause="too many connections",
        cut=True,
    ),
    "it is read-only after a failover": by_sql(
        "ALTER DATABASE leyden SET default_transaction_read_only = on",
        end="ALTER DATABASE leyden RESET default_transaction_read_only",
        cause="session is read-only",
        cut=True,
    ),
    "it is silent": through_proxy(Trouble(hang=True), "no answer within"),
}
HELD_SECONDS = 1.5


def suffer(on: Stage, case: Case) -> None:
    """The trouble, from its beginning until it is over; readiness tells its cause and no secret."""
    case.begin(on)
    try:
        if case.cause is not None:
            told = {service: blame(on, service, case.cause) for service in SERVICES}
            assert on.database.split(":")[2].split("@")[0] not in str(told)
            refused_by_api(on)
        time.sleep(HELD_SECONDS)
    finally:
        case.end(on)


def blame(on: Stage, service: str, cause: str) -> dict[str, str]:
    """The checks of a service once one of them names the cause."""
    until(lambda: on.readiness(service)[0] == 503 and cause in str(on.readiness(service)), f"{service} tells {cause!r}")
    return on.readiness(service)[1]


def refused_by_api(on: Stage) -> None:
    headers = {"authorization": f"Bearer {on.platform.token}"}
    answer = httpx.get(f"{on.platform.facts.url('api')}/v1/runs", headers=headers, timeout=60, trust_env=False)
    assert (answer.status_code, answer.headers["retry-after"], answer.json()["cause"]) == (503, "2", "database")


@long_only
@pytest.mark.timeout(900)
def test_a_training_survives_every_failure_of_postgres_without_lost_or_duplicate_rows(tmp_path: Path) -> None:
    with stage(tmp_path) as on:
        run = on.train(steps=6 + len(CASES))
        for case in CASES.values():
            suffer(on, case)
            on.wait_for_rollouts(run.id, 4)
        ended = on.ended(run.id)
        assert (ended.phase, ended.reason) == ("completed", None)
        assert on.damage(run.id) == {}
        assert on.repeated(times=12) == {}
        assert on.database.split(":")[2].split("@")[0] not in on.logs()
