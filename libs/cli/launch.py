"""Runs a module in a process that cannot outlive its supervisor: the kernel kills it when the supervising thread dies.

`python -P launch.py SUPERVISOR_PID MODULE ARGUMENTS…`. The garbage collector is off until a service serves: what a
start makes is there to stay, and looking through it again and again takes a fifth of the start. What libraries load
only because it is there, and no service uses, is not found: 7 MB of each process.
"""

import ctypes
import gc
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1
UNUSED = ("rich", "psutil")
"""structlog would print in colours by the first, OpenTelemetry tell of the machine by the second."""


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
    for name in UNUSED:
        sys.modules[name] = None  # type: ignore[assignment]  # as Python documents it for a module not to be found
    sys.argv = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
