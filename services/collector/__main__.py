"""Runs the collector: `python -m leyden.services.collector`."""

from leyden.libs.service.startup import service_main
from leyden.services.collector.settings import Settings


@service_main("collector", Settings)
def main(settings: Settings) -> None:
    """Receives telemetry until SIGTERM."""
    from leyden.libs.service import run_http
    from leyden.services.collector.app import create_collector

    run_http("collector", create_collector(settings), settings)


if __name__ == "__main__":
    main()
