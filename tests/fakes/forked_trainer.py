"""Trainers forked from a process that has imported all that a trainer imports, which is most of its start."""

import multiprocessing
import os
import runpy
import sys
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "accelerate",
        "transformers.models.llama.modeling_llama",
        "leyden.services.trainer.follower",
        "leyden.services.trainer.worker",
    ]
)


def forked_trainer(run_id: str, environment: dict[str, str]) -> BaseProcess:
    """A process of its own, not started yet, with these variables and no others."""
    return _forks.Process(target=_main, args=(run_id, environment))


def run_forked(work: Callable[..., None], *arguments: Any, processes: int) -> None:
    """Calls `work` with its rank and these arguments in so many processes.

    Raises: torch.multiprocessing.ProcessRaisedException: one failed; the others were ended
    """
    from torch.multiprocessing import start_processes

    start_processes(work, arguments, nprocs=processes, start_method="forkserver")


def _main(run_id: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["leyden.services.trainer", "--run-id", run_id]
    runpy.run_module("leyden.services.trainer", run_name="__main__", alter_sys=True)
