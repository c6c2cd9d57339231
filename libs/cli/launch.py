"""Becomes a service that cannot outlive its supervisor: the kernel kills it when the supervising thread dies.

`python -I -S launch.py SUPERVISOR_PID PROGRAM ARGUMENTS…`, standard library alone, some fifteen milliseconds.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for the signal, checks that it was not too late, and becomes the program."""
    supervisor, command = int(sys.argv[1]), sys.argv[2:]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    # Only Linux has it; elsewhere the next start ends what a killed supervisor left.
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  # becoming the service is the purpose


if __name__ == "__main__":
    main()
