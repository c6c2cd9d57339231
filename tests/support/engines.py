"""CPU engines as processes of their own, for platforms with several pools."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from tests.support.shared import free_port


@contextmanager
def engine_process(model: Path, log: Path, variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """The CPU engine as a process; yields its address. It asks for no key."""
    port = free_port()
    own = {"ENGINE_MODEL_PATH": str(model), "ENGINE_PORT": str(port), "ENGINE_INCREMENTAL_STREAMING_OUTPUT": "true"}
    command = [sys.executable, "-m", "leyden.services.engine"]
    with (
        log.open("ab") as output,
        subprocess.Popen(command, env={**os.environ, **own, **variables}, stdout=output) as process,
    ):
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
