"""Runs a grader: `python -m leyden.services.grader`."""

from leyden.libs.service.startup import service_main
from leyden.services.grader.settings import Settings


@service_main("grader", Settings)
def main(settings: Settings) -> None:
    """Grades attempts until SIGTERM."""
    from leyden.libs.service import run_worker
    from leyden.services.grader.worker import work

    run_worker("grader", settings, lambda stop, checks: work(settings, stop, checks))


if __name__ == "__main__":
    main()
