"""Starts the collector: `python -m services.collector`."""

from libs.service.start import told_in_a_line
from libs.telemetry import configure_logs, configure_tracing
from services.collector.settings import Settings


@told_in_a_line(Settings)
def main() -> None:
    settings = Settings()
    configure_logs("collector", settings.log_level)
    configure_tracing("collector", settings.otlp_endpoint)

    from libs.service import run_http
    from services.collector.app import create_collector

    run_http("collector", create_collector(settings), settings)


if __name__ == "__main__":
    main()
