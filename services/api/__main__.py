"""`python -m services.api`: serves until SIGTERM."""

from libs.service.start import told_in_a_line
from services.api.settings import Settings


@told_in_a_line(Settings)
def main() -> None:
    """Reads settings, then starts telemetry and the server."""
    settings = Settings()
    from libs.service import run_http
    from libs.telemetry import configure_logs, configure_tracing
    from services.api.app import create_app

    configure_logs("api", settings.log_level)
    configure_tracing("api", settings.otlp_endpoint)
    run_http("api", create_app(settings), settings)


if __name__ == "__main__":
    main()
