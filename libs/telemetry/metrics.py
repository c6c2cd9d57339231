"""Prometheus metrics: common buckets and the text exposition. Metrics are named `<service>_<noun>_<unit>`."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Histogram buckets of durations, from a fast answer to an agent's time-out."""


def exposition() -> tuple[bytes, str]:
    """Returns all metrics of the process in Prometheus' text format, and its content type."""
    return generate_latest(REGISTRY), CONTENT_TYPE_LATEST
