"""Runs a grader: `python -m leyden.services.grader`."""

from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.telemetry import configure_logs, configure_tracing
from leyden.services.grader.settings import Settings


@exit_on_config_error(Settings)
def main() -> None:
    settings = Settings()
    configure_logs("grader", settings.log_level)
    configure_tracing("grader", settings.otlp_endpoint)

    from leyden.libs.service import run_worker
    from leyden.services.grader.worker import work

    run_worker("grader", settings, lambda stop, checks: work(settings, stop, checks))


if __name__ == "__main__":
    main()
