"""Secrets in files that only their owner and group can read.

SecretError  the process cannot use the file; the message names the remedy and never the secret
"""

from __future__ import annotations

import stat
from pathlib import Path

from pydantic import SecretStr

from leyden.libs.service.errors import Misconfigured

_TOO_OPEN = stat.S_IWGRP | stat.S_IRWXO


class SecretError(Misconfigured, ValueError):
    """A file with a secret is missing, empty, or open to other users."""


def read_secret(value: SecretStr | None, path: Path | None) -> str | None:
    """The secret of a setting, or else of its file; None without either.

    Raises: SecretError
    """
    if value is not None or path is None:
        return None if value is None else value.get_secret_value()
    refuse_open(path)
    try:
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretError(f"cannot read the secret in {path}: {error}") from error
    if not secret:
        raise SecretError(f"{path} is empty: write the secret into it")
    return secret


def refuse_open(path: Path) -> None:
    """Checks that only owner and group can read a file, and only the owner can change it.

    Raises: SecretError
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise SecretError(f"cannot read the secret in {path}: {error.strerror}; write the file") from error
    if mode & _TOO_OPEN:
        raise SecretError(
            f"{path} is open to other users (mode {mode:04o}): run `chmod 600 {path}`, or, for a secret that Kubernetes"
            " mounts, set defaultMode: 0440"
        )
