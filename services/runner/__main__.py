"""Runs the runner: `python -m leyden.services.runner`."""

from leyden.libs.service.startup import service_main
from leyden.services.runner.settings import Settings


@service_main("runner", Settings)
def main(settings: Settings) -> None:
    """Executes attempts until SIGTERM."""
    from leyden.libs.service import run_worker
    from leyden.services.runner.worker import run_runner

    run_worker("runner", settings, lambda stop, checks: run_runner(settings, stop, checks))


if __name__ == "__main__":
    main()
