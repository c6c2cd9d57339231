"""Runs the gateway: `python -m leyden.services.gateway`."""

from leyden.libs.service.startup import service_main
from leyden.services.gateway.settings import Settings


@service_main("gateway", Settings)
def main(settings: Settings) -> None:
    """Serves until SIGTERM or SIGINT."""
    from leyden.libs.service import run_http
    from leyden.services.gateway.app import create_app

    run_http("gateway", create_app(settings), settings)


if __name__ == "__main__":
    main()
