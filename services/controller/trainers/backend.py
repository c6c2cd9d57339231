"""The interface of the places where trainers run: processes of this machine, or Jobs of a Kubernetes cluster."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from leyden.services.controller.trainers.models import TrainerModels

LESS_MEMORY = (
    "lower training.micro_batch_tokens, write optimizer.moments 8bit, train adapters with training.lora, or unset"
    " optimizer.offload"
)
"""Settings of a run by which its trainer needs less memory of the host."""
WORKER_SIGNAL = re.compile(r"Signal (\d+) \(SIG\w+\) received by PID")
"""Words of torchrun for a killed worker; it exits with 1 itself."""
WITHOUT_MEMORY = re.compile(r"\b(OutOfMemoryError|HostOutOfMemory)\b")
"""The errors of a trainer that met the bound of a device's or the host's memory itself."""
FINAL = re.compile(r"\b(PoliciesDisagree|UnsupportedModel): ")
"""A trainer's verdicts that every further start would repeat: from the run's rows, or from its model."""
PASSING = re.compile(
    r"\b(OSError|gaierror|BrokenPipeError|Dist\w*Error|\w*Connection\w*|\w*Timeout\w*"
    r"|RankLost|RankFailed|StoreAway|LockLost)\b|\b(Checkpoint|Teacher)Damaged: .* is missing"
)
"""Errors that may be of a moment: of a network, a disk or another process. A volume may be mounted late."""


class TrainerAttempt(NamedTuple):
    """One start of a run's trainer; a run's attempts count from 1."""

    run_id: str
    number: int

    @property
    def name(self) -> str:
        """The same for the same attempt, so that creating it twice finds the first one."""
        return f"trainer-{self.run_id}-{self.number}"


class TrainerState(StrEnum):
    """WAITING: created, not started yet, as while no node has room. DONE: nothing was left to do. ENDED: by itself, so
    the run is to blame. OUT_OF_MEMORY: as seen, not guessed. KILLED: by a signal, an eviction or a lost node, which
    says little about the run. FINAL: another start would end in the same way."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    ENDED = "ended"
    OUT_OF_MEMORY = "out_of_memory"
    KILLED = "killed"
    FINAL = "final"

    @property
    def is_over(self) -> bool:
        return self not in {TrainerState.WAITING, TrainerState.RUNNING}


class TrainerStatus(NamedTuple):
    """An attempt's state, the reason for it in words for users, and the last lines of its output once it is over."""

    state: TrainerState
    reason: str
    output: str = ""


def last_line(output: str) -> str:
    """Returns the last line that holds a letter or a digit, at most 1,000 characters of it; empty where there is none.

    `torchrun` ends its output with the cause and a ruler.
    """
    lines = (line.strip() for line in reversed(output.splitlines()))
    return next((line[:1000] for line in lines if any(map(str.isalnum, line))), "")


def killed_by(code: int, output: str) -> int | None:
    """Returns the signal that ended a trainer or, by torchrun's words, one of its workers; None where none did."""
    found = WORKER_SIGNAL.search(last_line(output))
    return -code if code < 0 else int(found[1]) if found else None


def end_of(code: int, output: str, more_memory: str, *, memory_kills: int | None = None) -> TrainerStatus:
    """The status of a trainer that is over.

    Args: code: of its exit, or -n for signal n; output: its last lines; more_memory: how a user gives it more memory;
        memory_kills: processes beside and of it that the kernel killed for want of memory, None where nobody counted
    """
    line, number = last_line(output), killed_by(code, output)
    if code == 0:
        return TrainerStatus(TrainerState.DONE, "exit code 0", output)
    how = f"exit code {code}" if code > 0 else f"killed by signal {-code}"
    if number == signal.SIGKILL and memory_kills != 0:
        state = TrainerState.OUT_OF_MEMORY if memory_kills else TrainerState.KILLED
        how += f", {'' if memory_kills else 'probably '}out of memory: {more_memory}, or {LESS_MEMORY}"
    elif number is not None:
        state = TrainerState.KILLED
    elif FINAL.search(line):
        state = TrainerState.FINAL
    else:
        state = TrainerState.OUT_OF_MEMORY if WITHOUT_MEMORY.search(line) else TrainerState.ENDED
    return TrainerStatus(state, f"{how}: {line or 'no output'}", output)


class TrainerRefused(Exception):
    """The backend cannot start this trainer, and trying again will not help; the message says why."""


class BackendAway(Exception):
    """The backend refused a question about trainers, as a cluster that restarts: ask again. The message says why."""


class TrainerBackend(Protocol):
    """Starts, reports on and stops attempts; every method may be repeated. The run's lock admits one trainer.

    Raises: BackendAway: every method but `close`
    """

    async def last_attempt(self, run_id: str) -> int:
        """Returns the number of the run's newest attempt that the backend knows, over or not; 0 for none."""

    async def live_attempts(self) -> Sequence[TrainerAttempt]:
        """Returns the attempts that are not over, of all runs."""

    async def start(self, attempt: TrainerAttempt, models: TrainerModels) -> None:
        """Starts an attempt, or adopts the one that has its name.

        Args:   models: those that the trainer reads; it begins once they are there
        Raises: TrainerRefused
        """

    async def status(self, attempt: TrainerAttempt) -> TrainerStatus: ...

    async def stop(self, attempt: TrainerAttempt) -> None:
        """Asks every process of the trainer to end, and returns once all have.

        The processes agree on the step after which they end; the backend kills those that take too long.
        """

    async def close(self) -> None:
        """Ends whatever dies with the controller. A trainer that outlives it stays, for the next leader to adopt."""
