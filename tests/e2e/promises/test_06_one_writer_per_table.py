"""One writer per table, named in the table's docstring."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg
import pytest

from leyden.libs.cli.local.platform import Platform
from leyden.libs.client import Client
from leyden.libs.contracts.api.rollouts import RewardRequest
from leyden.libs.contracts.api.tokens import ApiScope
from leyden.libs.contracts.config import Reward
from leyden.libs.store.tables import Base
from tests.campaigns.soak import QUICK, bandit_run
from tests.support.chaos import kill
from tests.support.waiting import until

# Who writes what, seen by Postgres: every connection says which service it is.
AUDIT = [
    "CREATE TABLE audit (written text NOT NULL, writer text NOT NULL)",
    """
    CREATE FUNCTION note_writer() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO audit VALUES (TG_ARGV[0], current_setting('application_name'));
        RETURN NULL;
    END $$
    """,
    # A table is locked alone, as one that holds another's lock meanwhile could wait for a service that waits for it.
    """
    DO $$ DECLARE target text; BEGIN
        FOR target IN SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace
            AND relkind IN ('r', 'p') AND NOT relispartition AND relname <> 'audit'
        LOOP
            EXECUTE format('CREATE TRIGGER note_writer AFTER INSERT OR UPDATE OR DELETE ON %I
                FOR EACH ROW EXECUTE FUNCTION note_writer(%L)', target, target);
            COMMIT;
        END LOOP;
    END $$
    """,
]
END_OF_AUDIT = [
    """
    DO $$ DECLARE target text; BEGIN
        FOR target IN SELECT DISTINCT tgrelid::regclass FROM pg_trigger WHERE tgname = 'note_writer' AND tgparentid = 0
        LOOP
            EXECUTE format('DROP TRIGGER note_writer ON %s', target);
            COMMIT;
        END LOOP;
    END $$
    """,
    "DROP FUNCTION note_writer",
    "DROP TABLE audit",
]
AT_WORK = "SELECT rollout_id FROM attempts WHERE run_id = %s AND state = 'running'"
SEEN = "SELECT written, array_agg(DISTINCT writer) FROM audit GROUP BY written"
SERVICES = {"api", "controller", "runner", "gateway", "collector", "credit", "grader", "trainer", "migrations"}
NOT_WRITTEN = {
    *("rewards", "feedback", "agent_objects", "evaluations", "state_transitions", "step_replays", "engine_adapters"),
    *("weight_transfers", "damaged_steps", "trainer_ends", "agent_names", "webhook_events", "grading_trials"),
    *("judge_usage", "artifacts", "duels"),
}
"""By this training: no reward door and no conversation is used, no agent has a name, nothing is evaluated, used again,
tried, migrated or sent, no judge scores or compares, no agent's file is kept, none is damaged, no trainer ends early
and no webhook is set."""
MAY_BE_WRITTEN = {"alarms"}
"""By a training that has trouble, as this one may."""
NOT_SEEN = {"outcomes": {"leyden-controller"}, "spans": {"leyden-gateway"}}
"""Writers whose moment comes days after the run, or with an embedding."""


def named_writers(table: type[Base]) -> set[str]:
    """The services that the first sentence of a docstring names: `Writer: gateway.`; a second one says for what."""
    sentence = (table.__doc__ or "").partition(".")[0]
    return {word for word in re.findall(r"[a-z]+", sentence) if word in SERVICES}


@pytest.mark.timeout(900)
def test_every_row_was_written_by_the_service_that_its_table_names(
    platform: Platform, client: Client, received: Path
) -> None:
    with psycopg.connect(platform.facts.database_url, autocommit=True) as connection:
        for statement in AUDIT:
            connection.execute(statement.encode())
        client.create_token("another", [ApiScope.READ])
        client.upload_dataset("more", [{"number": 1}])
        run = client.create_run(bandit_run(received, "audited", 3, **QUICK))
        until(lambda: client.run(run.id).progress.rollouts.get("finished", 0) >= 8, "the first rollouts")
        # Its leases are left to the controller.
        until(lambda: connection.execute(AT_WORK, [run.id]).fetchone() is not None, "an agent at work")
        assert kill(platform, "runner", run.id)
        # A reward is refused once its group has credit, so one of these gets it.
        [(rollout_id,), *_] = connection.execute(AT_WORK, [run.id]).fetchall()
        client.give_reward(rollout_id, RewardRequest(key="mine", value=1.0))
        until(lambda: client.run(run.id).phase == "completed", "the end of the run")
        reward = {"components": [{"name": "outcome", "from": "agent"}]}
        graded = client.create_run(bandit_run(received, "graded", 1, reward=reward, **QUICK))
        until(lambda: client.run(graded.id).phase == "completed", "the end of the graded run")
        a_graded = next(iter(client.rollouts(run=graded.id, state="finished")))
        client.regrade(a_graded.id, Reward.model_validate(reward))
        seen = {table: set(writers) for table, writers in connection.execute(SEEN.encode()).fetchall()}
        for statement in END_OF_AUDIT:
            connection.execute(statement.encode())

    tables = {mapper.class_.__tablename__: mapper.class_ for mapper in Base.registry.mappers}
    promised = {name: {f"leyden-{writer}" for writer in named_writers(table)} for name, table in tables.items()}
    for name in MAY_BE_WRITTEN:
        assert seen.pop(name, set()) <= promised.pop(name)
    assert seen == {
        name: writers - NOT_SEEN.get(name, set()) for name, writers in promised.items() if name not in NOT_WRITTEN
    }
