"""What an agent finds in its environment, all of it: who it is, its doors, its task. Nothing of the platform's own.

The names follow what the agent frameworks read: the OpenAI and Anthropic clients, the OpenTelemetry SDKs, and the
switches that turn on a framework's own spans or turn off its calls home.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_TASK_BYTES = 96 * 1024
"""A longer task is in `LEYDEN_TASK_FILE` alone: Linux bounds one environment string at 128 KiB."""

_SWITCHES = {
    "OTEL_SERVICE_NAME": "agent",
    "OTEL_TRACES_EXPORTER": "otlp",
    "OTEL_LOGS_EXPORTER": "otlp",
    "OTEL_METRICS_EXPORTER": "none",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_BSP_SCHEDULE_DELAY": "200",
    "OTEL_SEMCONV_STABILITY_OPT_IN": "gen_ai_latest_experimental",
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT": "SPAN_ONLY",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "ANONYMIZED_TELEMETRY": "false",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_ENABLE_TELEMETRY": "1",
    "CLAUDE_CODE_ENHANCED_TELEMETRY_BETA": "1",
    "LANGSMITH_TRACING": "true",
    "LANGSMITH_OTEL_ENABLED": "true",
    "LANGSMITH_OTEL_ONLY": "true",
    # LangSmith's client wants one; with OTEL_ONLY it is never sent anywhere.
    "LANGSMITH_API_KEY": "unused",
}


@dataclass(frozen=True)
class Doors:
    """Where an agent reaches the platform, and the key that opens it there."""

    gateway_url: str
    collector_url: str
    key: str
    grant_reward: bool


@dataclass(frozen=True)
class Identity:
    """Whose attempt this is."""

    run_id: str
    rollout_id: str
    attempt: int
    trace_parent: str | None = None

    @property
    def path(self) -> str:
        """`/r/<rollout>/<attempt>`, on gateway and collector alike."""
        return f"/r/{self.rollout_id}/{self.attempt}"


def environment_block(
    identity: Identity,
    doors: Doors,
    task: Mapping[str, object],
    *,
    folder: Path,
    task_file: Path,
    scratch: Path,
    path: str,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """The whole environment of one attempt.

    Args: folder: the working folder, also HOME; scratch: TMPDIR; path: PATH; extra: `agent.environment` of the run,
        which may set anything except the platform's own names (the run document refuses those).
    """
    return {
        "PATH": path,
        "HOME": str(folder),
        "TMPDIR": str(scratch),
        "LANG": "C.UTF-8",
        **_SWITCHES,
        **extra,
        **_model_doors(identity, doors),
        **_telemetry_doors(identity, doors),
        **_task(task, task_file),
        **_ids(identity),
        **_reward_door(identity, doors),
    }


def _model_doors(identity: Identity, doors: Doors) -> dict[str, str]:
    base = doors.gateway_url + identity.path
    headers = f"X-Rollout-Id: {identity.rollout_id}\nX-Attempt: {identity.attempt}"
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",
        "OPENAI_API_KEY": doors.key,
        "OPENAI_CUSTOM_HEADERS": headers,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": doors.key,
        "ANTHROPIC_CUSTOM_HEADERS": headers,
    }


def _telemetry_doors(identity: Identity, doors: Doors) -> dict[str, str]:
    ids = f"rollout.id={identity.rollout_id},rollout.attempt={identity.attempt}"
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": doors.collector_url + identity.path,
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{doors.key}",
        "OTEL_RESOURCE_ATTRIBUTES": ids,
    }


def _task(task: Mapping[str, object], task_file: Path) -> dict[str, str]:
    text = json.dumps(task, ensure_ascii=False)
    block = {"LEYDEN_TASK_FILE": str(task_file)}
    # NUL cannot stand in an environment; JSON escapes it, so the text never holds one.
    return block if len(text.encode()) > MAX_TASK_BYTES else {**block, "LEYDEN_TASK": text}


def _ids(identity: Identity) -> dict[str, str]:
    ids = {
        "LEYDEN_RUN_ID": identity.run_id,
        "LEYDEN_ROLLOUT_ID": identity.rollout_id,
        "LEYDEN_ATTEMPT": str(identity.attempt),
    }
    return ids if identity.trace_parent is None else {**ids, "TRACEPARENT": identity.trace_parent}


def _reward_door(identity: Identity, doors: Doors) -> dict[str, str]:
    return {"LEYDEN_REWARD_URL": f"{doors.collector_url}{identity.path}/reward"} if doors.grant_reward else {}
