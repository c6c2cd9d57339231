"""Runs the controller: `python -m services.controller`."""

from libs.service import run_worker
from libs.service.start import told_in_a_line
from libs.telemetry import configure_logs, configure_tracing
from services.controller.settings import Settings


@told_in_a_line(Settings)
def main() -> None:
    """Reads the settings and leads until SIGTERM."""
    settings = Settings()
    configure_logs("controller", settings.log_level)
    configure_tracing("controller", settings.otlp_endpoint)
    from services.controller.worker import run_controller

    run_worker("controller", settings, lambda stop, checks: run_controller(settings, stop, checks))


if __name__ == "__main__":
    main()
