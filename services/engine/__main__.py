"""Runs the engine: `python -m services.engine`."""

from __future__ import annotations

import sys

from libs.service import run_http
from libs.telemetry import configure_logs, configure_tracing
from services.engine.settings import Settings


def main() -> None:
    settings = Settings()
    configure_logs("engine", settings.log_level)
    configure_tracing("engine", settings.otlp_endpoint)
    # The event loop answers between the operations of a forward pass; it must not hold the interpreter for long.
    sys.setswitchinterval(0.0005)
    # Imported late: torch takes seconds, and wrong settings should fail before.
    from services.engine.app import create_engine_app

    run_http("engine", create_engine_app(settings), settings)


if __name__ == "__main__":
    main()
