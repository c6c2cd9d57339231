"""Runs the gateway: `python -m leyden.services.gateway`."""

from __future__ import annotations

from leyden.libs.service import run_http
from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.telemetry import configure_logs, configure_tracing
from leyden.services.gateway.settings import Settings


@exit_on_config_error(Settings)
def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    settings = Settings()
    configure_logs("gateway", settings.log_level)
    configure_tracing("gateway", settings.otlp_endpoint)
    # Why: a wrong setting is reported before the slow imports of tokenizer, template engine and HTTP client.
    from leyden.services.gateway.app import create_app

    run_http("gateway", create_app(settings), settings)


if __name__ == "__main__":
    main()
