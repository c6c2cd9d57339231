"""Runs the API: `python -m leyden.services.api`."""

from leyden.libs.service.startup import service_main
from leyden.services.api.settings import Settings


@service_main("api", Settings)
def main(settings: Settings) -> None:
    """Serves the REST API until SIGTERM."""
    from leyden.libs.service import run_http
    from leyden.services.api.app import create_app

    run_http("api", create_app(settings), settings)


if __name__ == "__main__":
    main()
