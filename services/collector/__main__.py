"""Runs the collector: `python -m leyden.services.collector`."""

from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.telemetry import configure_logs, configure_tracing
from leyden.services.collector.settings import Settings


@exit_on_config_error(Settings)
def main() -> None:
    settings = Settings()
    configure_logs("collector", settings.log_level)
    configure_tracing("collector", settings.otlp_endpoint)

    from leyden.libs.service import run_http
    from leyden.services.collector.app import create_collector

    run_http("collector", create_collector(settings), settings)


if __name__ == "__main__":
    main()
