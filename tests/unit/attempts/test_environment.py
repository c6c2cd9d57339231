from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from pydantic import ValidationError

from leyden.libs.attempts.environment import MAX_TASK_BYTES, Endpoints, environment_block, secrets_block
from leyden.libs.contracts.config import Agent, KubernetesRunner, ProcessRunner
from leyden.libs.contracts.config.runners import SecretKey
from leyden.libs.queue.leases import Lease

ENDPOINTS = Endpoints("http://gateway:1", "http://collector:2", key="signed", grant_reward=False)


def lease_of(task: dict[str, object] | None = None, **extra: str) -> Lease:
    # Built past its checks: a run document refuses the platform's own names.
    agent = Agent.model_construct(command=["agent"], environment=extra)
    return Lease(
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


def block(*, task: dict[str, object] | None = None, endpoints: Endpoints = ENDPOINTS, **extra: str) -> dict[str, str]:
    return environment_block(lease_of(task, **extra), endpoints)


def whole(**extra: str) -> dict[str, str]:
    return block(**extra) | secrets_block(lease_of(**extra), ENDPOINTS)


@pytest.mark.parametrize("version", ["OPENAI_API_VERSION", "AZURE_OPENAI_API_VERSION", "AZURE_API_VERSION"])
def test_a_run_that_names_a_version_of_azure_gets_its_other_variables(version: str) -> None:
    of_azure = {name: value for name, value in whole(**{version: "v"}).items() if name not in whole()}
    assert of_azure == {
        version: "v",
        "AZURE_API_VERSION": "v",
        "OPENAI_API_TYPE": "openai",
        "AZURE_OPENAI_ENDPOINT": "http://gateway:1/r/run-a.0.1/2",
        "AZURE_OPENAI_API_KEY": "signed",
        "AZURE_API_BASE": "http://gateway:1/r/run-a.0.1/2",
        "AZURE_API_KEY": "signed",
    }


def test_a_run_with_an_azure_of_its_own_gets_no_key_for_it() -> None:
    """LiteLLM sends any key of Azure's to the address that it finds."""
    found = whole(AZURE_API_BASE="https://mine", AZURE_API_VERSION="v")
    assert [name for name in found if "AZURE" in name] == ["AZURE_API_BASE", "AZURE_API_VERSION"]


@pytest.mark.parametrize("own", ["AZURE_API_KEY", "AZURE_OPENAI_API_KEY"])
def test_a_key_of_azures_of_the_runs_own_stays_and_brings_no_address(own: str) -> None:
    found = whole(**{own: "mine", "AZURE_API_VERSION": "v"})
    assert {name: value for name, value in found.items() if "AZURE" in name} == {own: "mine", "AZURE_API_VERSION": "v"}


@pytest.mark.parametrize("own", ["GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GEMINI_BASE_URL", "GEMINI_API_BASE"])
def test_an_agent_with_a_key_or_address_of_googles_keeps_them_alone(own: str) -> None:
    assert {name: value for name, value in whole(**{own: "mine"}).items() if "GEMINI" in name or "GOOGLE" in name} == {
        own: "mine"
    }


def test_secrets_of_a_pod_count_as_its_own() -> None:
    """Those of Google's, of Azure's and the address of an Ollama: none of the platform's go beside them."""
    own = ("GEMINI_API_KEY", "AZURE_API_BASE", "AZURE_API_KEY", "OLLAMA_HOST")
    runner = KubernetesRunner(image="agent:1", secrets={name: SecretKey(name="tools", key="a") for name in own})
    found = replace(lease_of(AZURE_API_VERSION="v"), runner=runner)
    assert not {*own, "OLLAMA_API_KEY"} & secrets_block(found, ENDPOINTS).keys()
    block = environment_block(found, ENDPOINTS)
    assert [name for name in block if "GEMINI" in name or "AZURE" in name] == ["AZURE_API_VERSION"]


def test_a_run_may_have_servers_of_azures_and_ollamas_of_its_own_which_never_get_the_attempts_key() -> None:
    own = {"AZURE_OPENAI_ENDPOINT": "https://mine", "OPENAI_API_VERSION": "v", "OLLAMA_HOST": "http://mine"}
    assert Agent(command=["agent"], environment=own).environment == own
    found = whole(**own)
    assert {name: found[name] for name in own} == own
    assert not {"AZURE_OPENAI_API_KEY", "OLLAMA_API_KEY", "OPENAI_API_TYPE"} & found.keys()


def test_the_agent_finds_its_endpoints_its_key_and_its_task() -> None:
    found = whole()
    assert {
        name: found.get(name)
        for name in (
            *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY"),
            *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS", "OTEL_RESOURCE_ATTRIBUTES"),
            *("LEYDEN_RUN_ID", "LEYDEN_ROLLOUT_ID", "LEYDEN_ATTEMPT", "LEYDEN_REWARD_URL"),
            *("AZURE_OPENAI_ENDPOINT", "AZURE_OPENAI_API_KEY", "OLLAMA_HOST", "OLLAMA_API_KEY"),
            *("GOOGLE_GEMINI_BASE_URL", "GEMINI_API_BASE", "GEMINI_API_KEY", "GOOGLE_API_KEY"),
            *("LANG", "TRACEPARENT", "OPENAI_CUSTOM_HEADERS"),
        )
    } == {
        "OPENAI_BASE_URL": "http://gateway:1/r/run-a.0.1/2/v1",
        "OPENAI_API_BASE": "http://gateway:1/r/run-a.0.1/2/v1",
        "OPENAI_API_KEY": "signed",
        "AZURE_OPENAI_ENDPOINT": None,
        "AZURE_OPENAI_API_KEY": None,
        "OLLAMA_HOST": "http://gateway:1/r/run-a.0.1/2",
        "OLLAMA_API_KEY": "signed",
        "GOOGLE_GEMINI_BASE_URL": "http://gateway:1/r/run-a.0.1/2",
        "GEMINI_API_BASE": "http://gateway:1/r/run-a.0.1/2/v1beta",
        "GEMINI_API_KEY": "signed",
        "GOOGLE_API_KEY": None,
        "ANTHROPIC_BASE_URL": "http://gateway:1/r/run-a.0.1/2",
        "ANTHROPIC_API_KEY": "signed",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:2/r/run-a.0.1/2",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-api-key=signed",
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


def test_the_key_appears_only_among_the_secrets() -> None:
    assert "signed" not in "".join(block().values())


def test_the_reward_endpoint_is_there_only_where_the_run_grants_it() -> None:
    granted = Endpoints("http://gateway:1", "http://collector:2", key="signed", grant_reward=True)
    assert block(endpoints=granted)["LEYDEN_REWARD_URL"] == "http://collector:2/r/run-a.0.1/2/reward"


def test_a_run_adds_its_own_names_and_never_the_platforms() -> None:
    found = block(OPENAI_MODEL="policy", LANG="de_DE.UTF-8", LEYDEN_TASK="forged")
    assert (found["OPENAI_MODEL"], found["LANG"]) == ("policy", "de_DE.UTF-8")
    assert found["LEYDEN_TASK"] != "forged"


def test_no_framework_calls_home_unless_the_run_asks_for_it() -> None:
    found = block()
    assert found["OPENAI_AGENTS_DISABLE_TRACING"] == "1"
    own = {"OPENAI_AGENTS_DISABLE_TRACING": "0"}
    assert own.items() <= block(**own).items()


@pytest.mark.parametrize(
    ("own", "upper", "lower"),
    [
        ({}, "gateway,collector", "gateway,collector"),
        ({"NO_PROXY": "a,.b"}, "a,.b,gateway,collector", "a,.b,gateway,collector"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, "a,gateway,collector", "b,gateway,collector"),
        ({"no_proxy": "*"}, "*", "*"),
    ],
)
def test_no_proxy_of_a_run_gets_calls_of_the_platform(own: dict[str, str], upper: str, lower: str) -> None:
    found = block(HTTP_PROXY="http://proxy:3128", **own)
    assert (found["HTTP_PROXY"], found["NO_PROXY"], found["no_proxy"]) == ("http://proxy:3128", upper, lower)
    # An image's own exceptions stay.
    assert "NO_PROXY" not in block()


def test_langsmiths_clients_post_to_the_collector_with_the_attempts_key() -> None:
    found = whole()
    assert {name: value for name, value in found.items() if name.startswith("LANGSMITH_")} == {
        "LANGSMITH_TRACING": "true",
        "LANGSMITH_ENDPOINT": "http://collector:2/r/run-a.0.1/2/langsmith",
        "LANGSMITH_DISABLE_RUN_COMPRESSION": "true",
        "LANGSMITH_API_KEY": "signed",
    }


@pytest.mark.parametrize("own", ["LANGSMITH_API_KEY", "LANGSMITH_ENDPOINT", "LANGCHAIN_API_KEY", "LANGCHAIN_ENDPOINT"])
def test_an_agent_with_a_langsmith_of_its_own_keeps_it_and_turns_tracing_on_itself(own: str) -> None:
    found = whole(**{own: "mine"})
    assert {name: value for name, value in found.items() if name.startswith(("LANGSMITH", "LANGCHAIN"))} == {
        own: "mine"
    }


def test_every_sdk_and_signal_gets_the_protocol_of_the_endpoint() -> None:
    found = block()
    assert {found[f"OTEL_EXPORTER_OTLP_{signal}PROTOCOL"] for signal in ("", "TRACES_", "LOGS_", "METRICS_")} == {
        "http/protobuf"
    }


def test_traces_and_logs_have_complete_addresses_unless_the_run_has_its_own() -> None:
    found = block()
    assert found["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] == "http://collector:2/r/run-a.0.1/2/v1/traces"
    assert found["OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"] == "http://collector:2/r/run-a.0.1/2/v1/logs"
    own = {"OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "http://own.example/v1/logs", "ENABLE_TOOL_SEARCH": "true"}
    assert own.items() <= block(**own).items()


def test_a_run_that_speaks_grpc_gets_the_address_without_a_path() -> None:
    endpoints = replace(ENDPOINTS, grpc_url="http://collector:4317")
    found = block(endpoints=endpoints, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")
    assert found["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:4317"
    assert not {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"} & found.keys()
    assert found["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == found["OTEL_EXPORTER_OTLP_PROTOCOL"] == "grpc"
    assert block(endpoints=endpoints)["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector:2/r/run-a.0.1/2"


def test_only_names_that_carry_our_addresses_keys_and_ids_are_reserved() -> None:
    free = ("OPENAI_MODEL_NAME", "OPENAI_AGENTS_DISABLE_TRACING", "OPENAI_LOG", "OTEL_EXPORTER_OTLP_COMPRESSION")
    assert Agent(command=["agent"], environment=dict.fromkeys(free, "1")).environment.keys() == set(free)
    reserved = [
        name
        for name in whole(OPENAI_API_VERSION="2025-04-01-preview")
        if any(part in name for part in ("_KEY", "_URL"))
    ]
    addresses = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS")
    own = {"LANGSMITH_API_KEY", "AZURE_OPENAI_API_KEY", "AZURE_API_KEY", "OLLAMA_API_KEY", "GEMINI_API_KEY"}
    for name in {*reserved, *addresses} - own - {"GOOGLE_GEMINI_BASE_URL"}:
        with pytest.raises(ValidationError, match="which the platform sets itself"):
            Agent(command=["agent"], environment={name: "x"})


def test_a_task_too_long_for_a_variable_is_only_in_the_file() -> None:
    assert "LEYDEN_TASK" not in block(task={"text": "x" * MAX_TASK_BYTES})
