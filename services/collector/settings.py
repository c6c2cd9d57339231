"""Settings of the collector, read from `COLLECTOR_…` and the shared `LEYDEN_…`."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import HttpSettings


class Settings(HttpSettings):
    """How much the collector takes, and how it writes."""

    model_config = SettingsConfigDict(env_prefix="COLLECTOR_")

    port: int = Field(default=8003, ge=0, le=65535)
    """HTTP port; OTLP arrives at /r/{rollout}/{attempt}/v1/traces."""
    grpc_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of OTLP over gRPC, 4317 by convention; unset, the collector speaks HTTP alone. Several processes of one
    machine share it."""
    max_body_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Largest request, counted after decompression; beyond it 413. A message of gRPC has 16 MiB at most; beyond it
    RESOURCE_EXHAUSTED."""
    max_bytes_in_flight: int = Field(default=256 * 2**20, ge=1024)
    """Bytes of all requests not yet durable; beyond it 503 with Retry-After, or UNAVAILABLE, and exporters
    send again. A message of gRPC counts as 16 MiB until it has arrived."""
    write_seconds: float = Field(default=10.0, gt=0)
    """How long one transaction may take before its requests are answered with 503."""
    max_batch_rows: int = Field(default=5_000, ge=1)
    """Rows that one transaction takes from waiting requests; a single larger request is still one transaction."""
    max_attempt_spans: int = Field(default=10_000, ge=1)
    """Spans that one attempt may store; further ones are rejected by OTLP's partial success."""
    max_attempt_span_bytes: int = Field(default=64 * 2**20, ge=1024)
    """Bytes of an attempt's spans together."""
    max_attempt_rewards: int = Field(default=1000, ge=1)
    """Rewards that one attempt may store, and its requests with rewards for answers or tool calls that it lacks; beyond
    it 422 with `attempt_limit`."""
    database_pool_size: int = Field(default=2, ge=1)
    """Connections to Postgres; one writes at a time."""
