"""Runs the runner: `python -m leyden.services.runner`."""

from leyden.libs.service import run_worker
from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.telemetry import configure_logs, configure_tracing
from leyden.services.runner.settings import Settings


@exit_on_config_error(Settings)
def main() -> None:
    """Reads the settings and executes attempts until SIGTERM."""
    settings = Settings()
    configure_logs("runner", settings.log_level)
    configure_tracing("runner", settings.otlp_endpoint)
    from leyden.services.runner.worker import run_runner

    run_worker("runner", settings, lambda stop, checks: run_runner(settings, stop, checks))


if __name__ == "__main__":
    main()
