"""JSON logs, Prometheus metrics and W3C trace context of a process. Imports nothing of ours.

`logs.configure_logs` and `tracing.configure_tracing` are called once, in a service's `__main__`; everything else takes
`logs.logger()`, `prometheus_client` metrics at module level, and `tracing.inject` or `tracing.extract` at a boundary.
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
