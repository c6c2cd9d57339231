"""The end of a program, attributed to the program, to one of its limits, or to the platform."""

from __future__ import annotations

import signal
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from leyden.libs.sandbox.artifacts import KeptFiles
from leyden.libs.sandbox.place import Names
from leyden.libs.sandbox.supervisors import ProgramError

if TYPE_CHECKING:
    from leyden.libs.sandbox.supervisor import Report

SHELL_SIGKILL = 128 + signal.SIGKILL  # a shell whose last command got one


@dataclass(frozen=True)
class Ended:
    """The end of a program that ran.

    Args: exit_code: negative for a signal; stdout, stderr: the last `output_bytes` of each; timed_out: it was stopped
        after `timeout_seconds`; limit_exceeded: says which limit it exceeded; platform_failure: the reason why the
        platform or its machine, and not the program, caused this end; reward_line: the last line of all of stdout with
        a reward; result: the content of its result file, None where it left none, with one byte more than
        `MAX_RESULT_BYTES` where it is longer; kept: files of its working folder
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    seconds: float
    timed_out: bool = False
    limit_exceeded: str | None = None
    platform_failure: str | None = None
    reward_line: bytes = b""
    result: bytes | None = None
    kept: KeptFiles = field(default_factory=KeptFiles)


def ended_of(
    report: Report,
    names: Names,
    *,
    contained: bool,
    lacked_room: bool = False,
    result: bytes | None = None,
    kept: KeptFiles | None = None,
) -> Ended:
    """The end of a program, with the cause where that is not the program.

    Args: contained: no other program can signal this one; lacked_room: others had filled the disk of its workspace
    Raises: ProgramError: it never started
    """
    if report["start_error"] is not None:
        raise ProgramError(f"the {names.program} could not be started: {report['start_error']}")
    return Ended(
        exit_code=report["exit_code"],
        stdout=report["stdout"],
        stderr=report["stderr"],
        reward_line=report["reward_line"],
        seconds=report["seconds"],
        timed_out=report["timed_out"],
        limit_exceeded=_limit_exceeded(report, names),
        platform_failure=_platform_failure(report, names, contained=contained, lacked_room=lacked_room),
        result=result,
        kept=kept or KeptFiles(),
    )


def _limit_exceeded(report: Report, names: Names) -> str | None:
    if report["memory_bytes"] is not None:
        size = f"{report['memory_bytes'] >> 20} MiB"
        return f"the {names.program} used more memory than allowed ({names.memory}): {size}"
    return f"the {names.program} went on after its limit of CPU time" if report["cpu_exceeded"] else None


def _platform_failure(report: Report, names: Names, *, contained: bool, lacked_room: bool) -> str | None:
    """Attributes a failure on a full disk, and a SIGKILL that the supervisor did not send.

    The kernel sent it while memory was short: ours. A program that no other can signal, while memory was not short,
    sent it itself: its own, since an agent could otherwise throw away tries that go badly. The sender is unknown: ours.
    """
    if report["timed_out"] or _limit_exceeded(report, names) is not None:
        return None
    if report["exit_code"] != 0 and lacked_room:
        folder = f"{names.prefix}_WORK_FOLDER"
        return f"the {names.program} failed while the disk of {folder} was full: give it more room"
    if report["exit_code"] in {-signal.SIGKILL, SHELL_SIGKILL} and report["lacked_memory"]:
        return "ended by a SIGKILL while the kernel ended processes for want of memory"
    if report["exit_code"] == -signal.SIGKILL and (report["lacked_memory"] is None or not contained):
        return "ended by a SIGKILL that the platform did not send: is memory short?"
    return None
