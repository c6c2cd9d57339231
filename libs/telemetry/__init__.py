"""JSON logs, Prometheus metrics and W3C trace context of a process. It imports no other package of Leyden.

A service's `__main__` calls `configure_logs` and `configure_tracing` once. Other modules use `logger()`, metrics of
`prometheus_client` at module level, and `inject` or `extract` at a boundary.
"""

from leyden.libs.telemetry.logs import RateLimitedLogger, bind, configure_logs, logger
from leyden.libs.telemetry.metrics import SECONDS_BUCKETS, exposition
from leyden.libs.telemetry.tracing import configure_tracing, extract, inject, parse_traceparent, span

__all__ = [
    "SECONDS_BUCKETS",
    "RateLimitedLogger",
    "bind",
    "configure_logs",
    "configure_tracing",
    "exposition",
    "extract",
    "inject",
    "logger",
    "parse_traceparent",
    "span",
]
