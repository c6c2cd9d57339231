"""Runs the controller: `python -m leyden.services.controller`."""

from leyden.libs.service.startup import service_main
from leyden.services.controller.settings import Settings


@service_main("controller", Settings)
def main(settings: Settings) -> None:
    """Leads, or waits for the lock, until SIGTERM."""
    from leyden.libs.service import run_worker
    from leyden.services.controller.worker import run_controller

    run_worker("controller", settings, lambda stop, checks: run_controller(settings, stop, checks))


if __name__ == "__main__":
    main()
