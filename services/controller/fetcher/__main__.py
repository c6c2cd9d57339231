"""Runs the fetcher: `python -m leyden.services.controller.fetcher`."""

from leyden.libs.service.startup import service_main
from leyden.services.controller.fetcher.settings import Settings


@service_main("fetcher", Settings)
def main(settings: Settings) -> None:
    """Serves until SIGTERM."""
    from leyden.libs.service import run_http
    from leyden.services.controller.fetcher.app import create_fetcher_app

    run_http("fetcher", create_fetcher_app(settings), settings)


if __name__ == "__main__":
    main()
