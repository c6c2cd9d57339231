"""Runs the runner: `python -m services.runner`."""

from libs.service import run_worker
from libs.service.start import told_in_a_line
from libs.telemetry import configure_logs, configure_tracing
from services.runner.settings import Settings


@told_in_a_line(Settings)
def main() -> None:
    """Reads the settings and executes attempts until SIGTERM."""
    settings = Settings()
    configure_logs("runner", settings.log_level)
    configure_tracing("runner", settings.otlp_endpoint)
    from services.runner.worker import run_runner

    run_worker("runner", settings, lambda stop, checks: run_runner(settings, stop, checks))


if __name__ == "__main__":
    main()
