"""Runs the API: `python -m leyden.services.api`."""

from leyden.libs.service.startup import exit_on_config_error
from leyden.services.api.settings import Settings


@exit_on_config_error(Settings)
def main() -> None:
    """Reads settings, then starts telemetry and the server."""
    settings = Settings()
    from leyden.libs.service import run_http
    from leyden.libs.telemetry import configure_logs, configure_tracing
    from leyden.services.api.app import create_app

    configure_logs("api", settings.log_level)
    configure_tracing("api", settings.otlp_endpoint)
    run_http("api", create_app(settings), settings)


if __name__ == "__main__":
    main()
