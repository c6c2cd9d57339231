"""`python -m services.gateway`: the agents' door to the model."""

from __future__ import annotations

from libs.service import run_http
from libs.service.start import told_in_a_line
from libs.telemetry import configure_logs, configure_tracing
from services.gateway.settings import Settings


@told_in_a_line(Settings)
def main() -> None:
    """Serves until SIGTERM or SIGINT."""
    settings = Settings()
    configure_logs("gateway", settings.log_level)
    configure_tracing("gateway", settings.otlp_endpoint)
    # Tokenizer, template engine and HTTP client: nothing of it is needed to say that a setting is wrong.
    from services.gateway.app import create_app

    run_http("gateway", create_app(settings), settings)


if __name__ == "__main__":
    main()
