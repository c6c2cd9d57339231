"""Runs the trainer of one run: `python -m leyden.services.trainer --run-id run-k3m9x2abcd`."""

import argparse

from leyden.libs.service import run_worker
from leyden.libs.service.server import run_until_signal
from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.telemetry import bind, configure_logs, configure_tracing
from leyden.services.trainer.model.cpu.memory import retain_freed_memory
from leyden.services.trainer.settings import Settings


@exit_on_config_error(Settings)
def main() -> None:
    """Reads the settings and trains until the run's last step or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m leyden.services.trainer", description=__doc__)
    parser.add_argument("--run-id", help="the run to train; otherwise TRAINER_RUN_ID")
    run_id = parser.parse_args().run_id
    settings = Settings(run_id=run_id) if run_id else Settings()
    train = _train
    if settings.world_size > 1:
        from torch.distributed.elastic.multiprocessing.errors import record

        # `torchrun` ends its output with the exception that this writes down.
        train = record(_train)
    train(settings)


def _train(settings: Settings) -> None:
    # Importing torch takes seconds: a wrong setting is refused before.
    from leyden.services.trainer.follower import run_follower
    from leyden.services.trainer.ranks.collectives import join_ranks
    from leyden.services.trainer.state.assembly import runs_on_cpu
    from leyden.services.trainer.worker import run_trainer

    on_cpu = runs_on_cpu(settings.device)
    if on_cpu:
        retain_freed_memory()
    configure_logs("trainer", settings.log_level)
    configure_tracing("trainer", settings.otlp_endpoint)
    with bind(run_id=settings.run_id):
        ranks = join_ranks(
            settings.world_size, on_cpu=on_cpu, timeout_seconds=settings.rank_timeout_seconds, copies=settings.copies
        )
        if ranks.rank == 0:
            run_worker("trainer", settings, lambda stop, checks: run_trainer(settings, stop, checks, ranks))
        else:
            run_until_signal(lambda stop: run_follower(settings, ranks, stop))


if __name__ == "__main__":
    main()
