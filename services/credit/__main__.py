"""Starts a credit worker: `python -m services.credit`."""

from libs.service.start import told_in_a_line
from libs.telemetry import configure_logs, configure_tracing
from services.credit.settings import Settings


@told_in_a_line(Settings)
def main() -> None:
    settings = Settings()
    configure_logs("credit", settings.log_level)
    configure_tracing("credit", settings.otlp_endpoint)

    from libs.service import run_worker
    from services.credit.worker import work

    run_worker("credit", settings, lambda stop, checks: work(settings, stop, checks))


if __name__ == "__main__":
    main()
