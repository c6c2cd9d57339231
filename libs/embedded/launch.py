"""Becomes another program that the kernel kills when its parent ends, even by SIGKILL.

`python -I -S launch.py PARENT PROGRAM ARGUMENT…`; `tied` gives the command. Standard library only.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tied(*program: str) -> tuple[str, ...]:
    """The command that starts the program so that it dies with the thread of this process that starts it."""
    # -I and -S are for the launcher alone: no module beside it shadows another, and it starts without `site`.
    return (sys.executable, "-I", "-S", os.path.realpath(__file__), str(os.getpid()), *program)


def die_with_parent(parent: int) -> None:
    """Asks the kernel to kill this process when its parent ends; exits if the parent of this pid already has."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    # Only Linux has it; elsewhere the next start kills the services of a dead supervisor.
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main() -> None:
    """Becomes the program, which dies with the parent."""
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  # the arguments are the parent's own


if __name__ == "__main__":
    main()
