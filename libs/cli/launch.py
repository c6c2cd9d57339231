"""Runs a module in a process that cannot outlive its supervisor: the kernel kills it when the supervising thread dies.

`python -P launch.py SUPERVISOR_PID MODULE ARGUMENTS…`. The garbage collector is off until a service serves: what a
start makes is there to stay, and looking through it again and again takes a fifth of the start.
"""

import ctypes
import gc
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Asks for the signal, checks that it was not too late, and runs the module as `python -m` does."""
    supervisor, module = int(sys.argv[1]), sys.argv[2]
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    # Only Linux has it; elsewhere the next start ends what a killed supervisor left.
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        sys.exit(1)
    gc.disable()
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
