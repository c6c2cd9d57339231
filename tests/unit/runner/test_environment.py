from __future__ import annotations

import json
from datetime import UTC, datetime

from leyden.libs.contracts.config import Agent, ProcessRunner
from leyden.libs.queue.leases import Lease
from leyden.services.runner.environment import MAX_TASK_BYTES, Endpoints, environment_block, secrets_block

ENDPOINTS = Endpoints("http://gateway:1", "http://collector:2", key="signed", grant_reward=False)


def block(*, task: dict[str, object] | None = None, endpoints: Endpoints = ENDPOINTS, **extra: str) -> dict[str, str]:
    # Built past its checks: a run document refuses the platform's own names.
    agent = Agent.model_construct(command=["agent"], environment=extra)
    lease = Lease(
        run_id="run-a",
        group_id="run-a.0",
        rollout_id="run-a.0.1",
        attempt=2,
        lease_id="lease",
        expires_at=datetime(2026, 1, 1, tzinfo=UTC),
        dataset_id="data",
        task_number=0,
        task=task or {"question": "Café?"},
        agent=agent,
        runner=ProcessRunner(),
        trace_parent="00-trace",
    )
    return environment_block(lease, endpoints)


def test_the_agent_finds_its_endpoints_its_key_and_its_task() -> None:
    found = block() | secrets_block(ENDPOINTS)
    assert {
        name: found.get(name)
        for name in (
            *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
            *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"),
            *("LEYDEN_RUN_ID", "LEYDEN_ROLLOUT_ID", "LEYDEN_ATTEMPT", "LEYDEN_REWARD_URL"),
            *("LANG", "TRACEPARENT", "OPENAI_CUSTOM_HEADERS"),
        )
    } == {
        "OPENAI_BASE_URL": "http://gateway:1/r/run-a.0.1/2/v1",
        "OPENAI_API_BASE": "http://gateway:1/r/run-a.0.1/2/v1",
        "OPENAI_API_KEY": "signed",
        "ANTHROPIC_BASE_URL": "http://gateway:1/r/run-a.0.1/2",
        "ANTHROPIC_API_KEY": "signed",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:2/r/run-a.0.1/2",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20signed",
        "OTEL_RESOURCE_ATTRIBUTES": "rollout.id=run-a.0.1,rollout.attempt=2",
        "LEYDEN_RUN_ID": "run-a",
        "LEYDEN_ROLLOUT_ID": "run-a.0.1",
        "LEYDEN_ATTEMPT": "2",
        "LEYDEN_REWARD_URL": None,
        "LANG": "C.UTF-8",
        "TRACEPARENT": "00-trace",
        "OPENAI_CUSTOM_HEADERS": "X-Rollout-Id: run-a.0.1\nX-Attempt: 2",
    }
    assert json.loads(found["LEYDEN_TASK"]) == {"question": "Café?"}


def test_the_key_is_among_the_secrets_alone() -> None:
    assert "signed" not in "".join(block().values())


def test_the_reward_endpoint_is_there_only_where_the_run_grants_it() -> None:
    granted = Endpoints("http://gateway:1", "http://collector:2", key="signed", grant_reward=True)
    assert block(endpoints=granted)["LEYDEN_REWARD_URL"] == "http://collector:2/r/run-a.0.1/2/reward"


def test_a_run_adds_its_own_names_and_never_the_platforms() -> None:
    found = block(OPENAI_MODEL="policy", LANG="de_DE.UTF-8", LEYDEN_TASK="forged")
    assert (found["OPENAI_MODEL"], found["LANG"]) == ("policy", "de_DE.UTF-8")
    assert found["LEYDEN_TASK"] != "forged"


def test_a_task_too_long_for_an_environment_is_in_the_file_alone() -> None:
    assert "LEYDEN_TASK" not in block(task={"text": "x" * MAX_TASK_BYTES})
