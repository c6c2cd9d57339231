"""Metrics under SGLang's names, so that SGLang's dashboards and autoscalers work unchanged.

Gauges follow the scheduler after every step; counters and histograms move when a request ends.
"""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from leyden.libs.telemetry import SECONDS_BUCKETS
from leyden.services.engine.scheduler import Scheduler
from leyden.services.engine.sequence import Sequence

_LABELS = ("model_name",)


def _gauge(name: str, text: str) -> Gauge:
    return Gauge(f"sglang:{name}", text, _LABELS)


def _counter(name: str, text: str) -> Counter:
    return Counter(f"sglang:{name}", text, _LABELS)


def _seconds(name: str, text: str) -> Histogram:
    return Histogram(f"sglang:{name}_seconds", text, _LABELS, buckets=SECONDS_BUCKETS)


RUNNING = _gauge("num_running_reqs", "Requests that advance at every step")
QUEUED = _gauge("num_queue_reqs", "Requests that wait for a row")
PAUSED = _gauge("num_paused_reqs", "Requests in flight while generation is paused")
RETRACTED = _gauge("num_retracted_reqs", "Requests sent back to the queue since start")
USED_TOKENS = _gauge("kv_used_tokens", "Tokens with keys and values: cached, and of running requests")
USAGE = _gauge("token_usage", "Tokens of running requests over the limit, 0 to 1")
HIT_RATE = _gauge("cache_hit_rate", "Share of prompt tokens found in the prefix cache since start")
THROUGHPUT = _gauge("gen_throughput", "Tokens generated per second of work since start")
MAX_TOKENS = _gauge("max_total_num_tokens", "Limit of tokens of running requests")

REQUESTS = _counter("num_requests", "Requests that ended")
ABORTED = _counter("num_aborted_requests", "Requests that were aborted")
PROMPT_TOKENS = _counter("prompt_tokens", "Prompt tokens of requests that ended")
GENERATED_TOKENS = _counter("generation_tokens", "Tokens generated for requests that ended")
CACHED_TOKENS = _counter("cached_tokens", "Prompt tokens found in the prefix cache")

FIRST_TOKEN = _seconds("time_to_first_token", "From arrival to the first token")
PER_TOKEN = _seconds("inter_token_latency", "Mean time between tokens of a request")
LATENCY = _seconds("e2e_request_latency", "From arrival to the end")
QUEUE_TIME = _seconds("queue_time", "From arrival to a row")
WEIGHT_LOAD = _seconds("weight_load_duration", "Reading and swapping in new weights")


def observe_step(model_name: str, scheduler: Scheduler, paused: bool) -> None:
    """Sets the gauges from the scheduler's state."""
    totals, used = scheduler.totals, scheduler.row_tokens
    in_rows = len(scheduler.running) + len(scheduler.prefilling)
    seen = totals.cached_tokens + totals.prefill_tokens
    values = {
        RUNNING: in_rows,
        QUEUED: len(scheduler.waiting),
        PAUSED: in_rows + len(scheduler.waiting) if paused else 0,
        RETRACTED: totals.retractions,
        USED_TOKENS: scheduler.cache.used_tokens + used,
        USAGE: used / scheduler.limits.max_total_tokens,
        HIT_RATE: totals.cached_tokens / seen if seen else 0.0,
        THROUGHPUT: totals.decode_tokens / totals.seconds if totals.seconds else 0.0,
        MAX_TOKENS: scheduler.limits.max_total_tokens,
    }
    for gauge, value in values.items():
        gauge.labels(model_name).set(value)


def observe_end(model_name: str, sequence: Sequence) -> None:
    """Counts a request that ended."""
    REQUESTS.labels(model_name).inc()
    PROMPT_TOKENS.labels(model_name).inc(len(sequence.prompt_ids))
    GENERATED_TOKENS.labels(model_name).inc(len(sequence.output_ids))
    CACHED_TOKENS.labels(model_name).inc(sequence.cached_tokens)
    ABORTED.labels(model_name).inc(sequence.finish is not None and sequence.finish.kind == "abort")
    if sequence.finished_at is not None:
        LATENCY.labels(model_name).observe(sequence.finished_at - sequence.received_at)
    if sequence.admitted_at is not None:
        QUEUE_TIME.labels(model_name).observe(sequence.admitted_at - sequence.received_at)
    if sequence.first_token_at is None or sequence.last_token_at is None:
        return
    FIRST_TOKEN.labels(model_name).observe(sequence.first_token_at - sequence.received_at)
    if len(sequence.output_ids) > 1:
        mean = (sequence.last_token_at - sequence.first_token_at) / (len(sequence.output_ids) - 1)
        PER_TOKEN.labels(model_name).observe(mean)
