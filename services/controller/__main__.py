"""Runs the controller: `python -m leyden.services.controller`."""

from leyden.libs.service import run_worker
from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.telemetry import configure_logs, configure_tracing
from leyden.services.controller.settings import Settings


@exit_on_config_error(Settings)
def main() -> None:
    """Reads the settings and leads until SIGTERM."""
    settings = Settings()
    configure_logs("controller", settings.log_level)
    configure_tracing("controller", settings.otlp_endpoint)
    from leyden.services.controller.worker import run_controller

    run_worker("controller", settings, lambda stop, checks: run_controller(settings, stop, checks))


if __name__ == "__main__":
    main()
