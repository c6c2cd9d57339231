"""Runs a module in a child that the kernel kills when the supervising thread dies.

`python -P launch.py SUPERVISOR_PID MODULE ARGUMENT…`.
"""

import ctypes
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for the signal, exits if the supervisor has died before that, and runs the module as `python -m` does."""
    supervisor, module = int(sys.argv[1]), sys.argv[2]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    # Only Linux has it; elsewhere the next start kills the services of a dead supervisor.
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        sys.exit(1)
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
