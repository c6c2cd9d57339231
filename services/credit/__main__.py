"""Runs a credit worker: `python -m leyden.services.credit`."""

from leyden.libs.service.startup import service_main
from leyden.services.credit.settings import Settings


@service_main("credit", Settings)
def main(settings: Settings) -> None:
    """Credits groups until SIGTERM."""
    from leyden.libs.service import run_worker
    from leyden.services.credit.worker import work

    run_worker("credit", settings, lambda stop, checks: work(settings, stop, checks))


if __name__ == "__main__":
    main()
