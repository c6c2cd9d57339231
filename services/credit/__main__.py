"""Runs a credit worker: `python -m leyden.services.credit`."""

from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.telemetry import configure_logs, configure_tracing
from leyden.services.credit.settings import Settings


@exit_on_config_error(Settings)
def main() -> None:
    settings = Settings()
    configure_logs("credit", settings.log_level)
    configure_tracing("credit", settings.otlp_endpoint)

    from leyden.libs.service import run_worker
    from leyden.services.credit.worker import work

    run_worker("credit", settings, lambda stop, checks: work(settings, stop, checks))


if __name__ == "__main__":
    main()
