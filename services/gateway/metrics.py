"""Prometheus metrics of the gateway."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.telemetry import SECONDS_BUCKETS

CALLS = Counter("gateway_calls_total", "Model calls by how they ended.", ["status"])
CALL_SECONDS = Histogram(
    "gateway_call_seconds", "Time from a request's arrival to its durable record.", buckets=SECONDS_BUCKETS
)
FIRST_TOKEN_SECONDS = Histogram(
    "gateway_first_token_seconds", "Time from a request's arrival to its first token.", buckets=SECONDS_BUCKETS
)
TOKENS = Counter("gateway_tokens_total", "Tokens of recorded calls: prompt, cached (of the prompt), sampled.", ["kind"])
HELD = Gauge("gateway_held_calls", "Choices that wait for an engine serving their run.")
IN_FLIGHT = Gauge("gateway_calls_in_flight", "Requests between arrival and record.")
ENGINE_RETRIES = Counter("gateway_engine_retries_total", "Engine requests that were lost and sent again.", ["cause"])
OTHER_PROMPTS = Counter(
    "gateway_other_prompts_total", "Calls that failed because the engine reports another number of prompt tokens."
)
ROUTINGS_LOST = Counter(
    "gateway_routings_lost_total", "Answers whose experts were not stored, because they are more than 32 MiB."
)
PROMPTS = Counter(
    "gateway_prompts_total",
    "Prompts by how they continue: extend, fork (they rewrite an answer, or cannot continue its tokens), fresh.",
    ["continuation"],
)
REPLAYS = Counter("gateway_replays_total", "Retries of an SDK answered without sampling again.", ["source"])
UNTRAINABLE = Counter("gateway_untrainable_calls_total", "Completed calls whose parameters a trainer cannot reproduce.")
CONTEXT_OVERFLOWS = Counter(
    "gateway_context_overflows_total", "Requests refused because their messages exceed the model's context."
)
REFUSED = Counter("gateway_refused_rows_total", "Requests beyond what one attempt may store.", ["kind"])
RECORD_SECONDS = Histogram(
    "gateway_record_seconds", "Time that an answer waited for its durable record.", buckets=SECONDS_BUCKETS
)
RECORD_ROWS = Histogram("gateway_record_rows", "Calls per transaction.", buckets=[2**power for power in range(10)])
