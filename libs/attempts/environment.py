"""The environment of an agent: its identity, its endpoints, its key and its task, and nothing of the platform's own.

The names are those that agent frameworks read: the clients of OpenAI, Azure OpenAI, Ollama, Gemini and Anthropic,
the OpenTelemetry SDKs, and the switches that turn on a framework's own spans or turn off its calls home, which a run
may set otherwise. A backend adds the variables that depend on the place: PATH, HOME, TMPDIR and LEYDEN_TASK_FILE.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from leyden.libs.contracts.config import KubernetesRunner
from leyden.libs.contracts.placeholders import with_task
from leyden.libs.queue.leases import Lease

MAX_TASK_BYTES = 96 * 1024
"""A longer task is in `LEYDEN_TASK_FILE` alone: Linux bounds one environment string at 128 KiB."""

AZURE_VERSIONS = ("AZURE_API_VERSION", "AZURE_OPENAI_API_VERSION", "OPENAI_API_VERSION")
"""Any of these in `agent.environment` brings the other variables of Azure OpenAI; the first one is LiteLLM's."""
AZURE_ADDRESSES = ("AZURE_API_BASE", "AZURE_OPENAI_ENDPOINT")
AZURE_KEYS = ("AZURE_OPENAI_API_KEY", "AZURE_API_KEY")
AZURES_OWN = (*AZURE_ADDRESSES, *AZURE_KEYS)
"""With any of these of its own, an agent speaks to Azure itself."""
GOOGLES_OWN = ("GEMINI_API_BASE", "GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_GEMINI_BASE_URL")
"""With any of these of its own, an agent speaks to Google itself."""
SMITHS_OWN = ("LANGSMITH_API_KEY", "LANGSMITH_ENDPOINT", "LANGCHAIN_API_KEY", "LANGCHAIN_ENDPOINT")
"""With any of these of its own, an agent speaks to LangSmith itself."""

PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"
_BY_SIGNAL = "OTEL_EXPORTER_OTLP_{}_ENDPOINT"

_SWITCHES = {
    "OTEL_SERVICE_NAME": "agent",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    # By signal, too: an SDK may have another default for one.
    PROTOCOL: "http/protobuf",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "ANONYMIZED_TELEMETRY": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    # Its search for tools needs a server of Anthropic's: every tool is in the request.
    "ENABLE_TOOL_SEARCH": "false",
    "CLAUDE_CODE_ENABLE_TELEMETRY": "1",
    "CLAUDE_CODE_ENHANCED_TELEMETRY_BETA": "1",
    # It posts them, with the attempt's key, to OpenAI and nowhere else.
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
}


@dataclass(frozen=True)
class Endpoints:
    """The platform's addresses for one attempt, and the key for them."""

    gateway_url: str
    collector_url: str
    key: str
    grant_reward: bool
    grpc_url: str | None = None


_PROXIES = frozenset({"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"})


def environment_block(lease: Lease, endpoints: Endpoints) -> dict[str, str]:
    """Every variable of an attempt without its key.

    `agent.environment` of the run may set anything except the platform's own names: the run document refuses those.

    Raises: MissingField: it names a field that the task lacks
    """
    path = f"/r/{lease.rollout_id}/{lease.attempt}"
    model = endpoints.gateway_url + path
    headers = f"X-Rollout-Id: {lease.rollout_id}\nX-Attempt: {lease.attempt}"
    otlp = endpoints.collector_url + path
    speaks_grpc = endpoints.grpc_url is not None and lease.agent.environment.get(PROTOCOL) == "grpc"
    block = {
        "LANG": "C.UTF-8",
        **_SWITCHES,
        # An address by signal is used as it is, and some SDKs and images have one of their own.
        **(
            {} if speaks_grpc else {_BY_SIGNAL.format(name): f"{otlp}/v1/{name.lower()}" for name in ("TRACES", "LOGS")}
        ),
        **(_langsmith(otlp) if _speaks_langsmith(lease) else {}),
        "OLLAMA_HOST": model,
        **_azure(lease, model),
        # Clients of Google's append the version, and LiteLLM does not.
        **({"GOOGLE_GEMINI_BASE_URL": model, "GEMINI_API_BASE": f"{model}/v1beta"} if _speaks_gemini(lease) else {}),
        **{name: with_task(value, lease.task) for name, value in lease.agent.environment.items()},
        "OPENAI_BASE_URL": f"{model}/v1",
        "OPENAI_API_BASE": f"{model}/v1",
        "OPENAI_CUSTOM_HEADERS": headers,
        "ANTHROPIC_BASE_URL": model,
        "ANTHROPIC_CUSTOM_HEADERS": headers,
        "OTEL_EXPORTER_OTLP_ENDPOINT": otlp,
        "OTEL_RESOURCE_ATTRIBUTES": f"rollout.id={lease.rollout_id},rollout.attempt={lease.attempt}",
        "LEYDEN_RUN_ID": lease.run_id,
        "LEYDEN_ROLLOUT_ID": lease.rollout_id,
        "LEYDEN_ATTEMPT": str(lease.attempt),
    }
    block |= _past_proxies(block, endpoints)
    if speaks_grpc:
        # A gRPC target has no path; the key names the attempt.
        block |= {"OTEL_EXPORTER_OTLP_ENDPOINT": str(endpoints.grpc_url)}
        block |= {f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL": "grpc" for signal in ("TRACES", "LOGS", "METRICS")}
    # NUL cannot stand in an environment; JSON escapes it, so the text never holds one.
    text = json.dumps(lease.task, ensure_ascii=False)
    if len(text.encode()) <= MAX_TASK_BYTES:
        block["LEYDEN_TASK"] = text
    if lease.trace_parent is not None:
        block["TRACEPARENT"] = lease.trace_parent
    if endpoints.grant_reward:
        block["LEYDEN_REWARD_URL"] = f"{endpoints.collector_url}{path}/reward"
    return block


def _past_proxies(block: Mapping[str, str], endpoints: Endpoints) -> dict[str, str]:
    """The platform's hosts behind the run's own that its proxy does not serve; nothing for a run that names no proxy.

    Each client reads one of the two spellings first. An image or a pod template that names a proxy has its own
    exceptions, which these variables would replace.
    """
    if not any(name.upper() in _PROXIES for name in block):
        return {}
    addresses = (endpoints.gateway_url, endpoints.collector_url, endpoints.grpc_url)
    hosts = [host for address in addresses if address is not None and (host := urlsplit(address).hostname)]
    found = {}
    for name, other in (("NO_PROXY", "no_proxy"), ("no_proxy", "NO_PROXY")):
        own = block.get(name, block.get(other, "")).strip()
        # Clients know an asterisk only where nothing stands beside it.
        found[name] = own if own == "*" else ",".join(dict.fromkeys([*filter(None, [own]), *hosts]))
    return found


def _azure(lease: Lease, model: str) -> dict[str, str]:
    if not _speaks_azure(lease):
        return {}
    own = lease.agent.environment
    version = next(own[name] for name in AZURE_VERSIONS if name in own)
    addresses = dict.fromkeys(AZURE_ADDRESSES, model)
    # With the variables of both, the module of OpenAI's for Python asks which server to use.
    return {**addresses, "AZURE_API_VERSION": with_task(version, lease.task), "OPENAI_API_TYPE": "openai"}


def _speaks_azure(lease: Lease) -> bool:
    """Whether the run names a version of Azure's, without which no client of Azure's starts, and no Azure of its own.

    Other agents get none of Azure's variables: LangChain.js before 0.4 turns to Azure where it finds their key. The
    key goes to no address that the run sets itself, as for embeddings of its own; the same holds for Ollama's.
    """
    return _own_names(lease).isdisjoint(AZURES_OWN) and not lease.agent.environment.keys().isdisjoint(AZURE_VERSIONS)


def _speaks_gemini(lease: Lease) -> bool:
    """Whether the agent has no key or address of Google's: its judge, say, may ask Google's own model."""
    return _own_names(lease).isdisjoint(GOOGLES_OWN)


def _langsmith(otlp: str) -> dict[str, str]:
    return {
        "LANGSMITH_TRACING": "true",
        "LANGSMITH_ENDPOINT": f"{otlp}/langsmith",
        # The collector reads no zstd, and the client would warn of that on stderr.
        "LANGSMITH_DISABLE_RUN_COMPRESSION": "true",
    }


def _speaks_langsmith(lease: Lease) -> bool:
    """Whether the agent has no LangSmith of its own, which then gets its traces where the run turns tracing on."""
    return _own_names(lease).isdisjoint(SMITHS_OWN)


def _own_names(lease: Lease) -> set[str]:
    """The variables that the run sets itself, by a value or by a key of a pod's Secret."""
    secrets = lease.runner.secrets if isinstance(lease.runner, KubernetesRunner) else {}
    return {*lease.agent.environment, *secrets}


def secrets_block(lease: Lease, endpoints: Endpoints) -> dict[str, str]:
    """The variables that hold the attempt's key."""
    return {
        "OPENAI_API_KEY": endpoints.key,
        **(dict.fromkeys(AZURE_KEYS, endpoints.key) if _speaks_azure(lease) else {}),
        **({"GEMINI_API_KEY": endpoints.key} if _speaks_gemini(lease) else {}),
        **({} if "OLLAMA_HOST" in _own_names(lease) else {"OLLAMA_API_KEY": endpoints.key}),
        **({"LANGSMITH_API_KEY": endpoints.key} if _speaks_langsmith(lease) else {}),
        "ANTHROPIC_API_KEY": endpoints.key,
        # Not `authorization=Bearer%20…`: LangSmith's client does not decode it.
        "OTEL_EXPORTER_OTLP_HEADERS": f"x-api-key={endpoints.key}",
    }
