"""Errors of every process.

Misconfigured     a setting, or a file that one names, cannot be used
└─ CannotListen   the address of a port, which is an OSError as well
"""

from __future__ import annotations


class Misconfigured(Exception):
    """The operator is to correct something before this process can start; the message names it and the remedy."""


class CannotListen(Misconfigured, OSError):
    """The address is taken, or none of this machine; or a descriptor is no socket."""
