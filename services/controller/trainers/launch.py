"""Becomes another program that dies with its parent: `python -I -S launch.py PARENT PROGRAM ARGUMENT…`.

Standard library only. The kernel kills the program when its parent ends (PR_SET_PDEATHSIG), even by SIGKILL, so that a
controller never leaves a trainer behind.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent, then becomes the program."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # The parent may have died before the line above; then no signal will come.
    if os.getppid() == int(sys.argv[1]):
        os.execvp(sys.argv[2], sys.argv[2:])  # noqa: S606  # the arguments are the controller's own


if __name__ == "__main__":
    main()
