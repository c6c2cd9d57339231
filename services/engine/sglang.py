"""Runs SGLang's own server as the engine of `leyden up`: `python -m leyden.services.engine.sglang`.

SGLang lives in an environment of its own, because it pins other versions than the platform. This process gives it the
model, the address, the keys and the flags that the platform needs, reports when it answers, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from leyden.libs.embedded.launch import tied
from leyden.libs.service import ServiceSettings, run_worker
from leyden.libs.service.health import Checks
from leyden.libs.service.secrets import read_secret
from leyden.libs.service.startup import exit_on_config_error
from leyden.libs.telemetry import configure_logs, logger

FLAGS = ("--incremental-streaming-output", "--enable-metrics")
HEALTH_WITHOUT_TOKENS = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
"""SGLang's `/health` samples a token by default, and therefore fails while a weight update pauses the engine."""

MAX_LINE_BYTES = 2**24

log = logger()


class Settings(ServiceSettings):
    """Settings that `leyden up` passes on, prefix `ENGINE_`."""

    model_config = SettingsConfigDict(env_prefix="ENGINE_", protected_namespaces=())

    python: Path
    """Python of an environment that has SGLang."""
    args: list[str] = Field(default_factory=list)
    """Further arguments of `sglang.launch_server`, which win over the platform's."""
    model_path: Path
    """Hugging Face folder of the base model."""
    port: int = Field(ge=1, le=65535)
    """Port of SGLang's HTTP server on 127.0.0.1."""
    api_key: SecretStr | None = None
    api_key_file: Path | None = None
    admin_api_key: SecretStr | None = None
    admin_api_key_file: Path | None = None


class SglangEnded(RuntimeError):
    """SGLang's server ended by itself; its own output says why."""


@contextlib.contextmanager
def config_file(settings: Settings, keys: dict[str, str]) -> Iterator[Path]:
    """SGLang's configuration with the keys: every process of the machine can read arguments, but not this file."""
    values = {"model-path": str(settings.model_path)} | keys
    with tempfile.NamedTemporaryFile("w", prefix="leyden-engine-", suffix=".yaml") as file:
        # JSON is YAML.
        json.dump(values, file)
        file.flush()
        yield Path(file.name)


def _keys(settings: Settings) -> dict[str, str]:
    keys = {
        "api-key": read_secret(settings.api_key, settings.api_key_file),
        "admin-api-key": read_secret(settings.admin_api_key, settings.admin_api_key_file),
    }
    return {name: key for name, key in keys.items() if key}


def command(settings: Settings, config: Path) -> Sequence[str]:
    """SGLang's command; the kernel ends it when this process dies."""
    address = ("--host", "127.0.0.1", "--port", str(settings.port))
    server = (str(settings.python), "-P", "-m", "sglang.launch_server")
    return tied(*server, "--config", str(config), *address, *FLAGS, *settings.args)


async def serve(settings: Settings, stop: asyncio.Event, checks: Checks) -> None:
    """Runs SGLang until the event is set.

    Raises: SglangEnded
    """
    keys = _keys(settings)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.port}", trust_env=False) as http:

        async def answers() -> None:
            (await http.get("/health")).raise_for_status()

        # Before anything is awaited: a process without checks is ready.
        checks.add("sglang", answers)
        with config_file(settings, keys) as config:
            status = await _run(command(settings, config), list(keys.values()), stop)
    if not stop.is_set():
        raise SglangEnded(f"sglang.launch_server ended with status {status}: its last lines are above")


async def _run(words: Sequence[str], keys: Sequence[str], stop: asyncio.Event) -> int | None:
    """Runs a command in a session of its own until it ends or the event is set; returns its exit status.

    Args: keys: left out of its output, since SGLang prints its arguments with them
    """
    process = await asyncio.create_subprocess_exec(
        *words,
        env={**os.environ, **HEALTH_WITHOUT_TOKENS},
        start_new_session=True,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        limit=MAX_LINE_BYTES,
    )
    assert process.stdout is not None
    copying = asyncio.create_task(_copy_without(keys, process.stdout))
    log.info("sglang started", pid=process.pid, python=words[0])
    ended, stopped = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({ended, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            process.terminate()
            await ended
    finally:
        stopped.cancel()
        # Its scheduler and detokenizer are of the same session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await copying
    return process.returncode


async def _copy_without(keys: Sequence[str], output: asyncio.StreamReader) -> None:
    async for line in output:
        for key in keys:
            line = line.replace(key.encode(), b"***")
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()


@exit_on_config_error(Settings)
def main() -> None:
    settings = Settings()
    configure_logs("engine", settings.log_level)

    async def loop(stop: asyncio.Event, checks: Checks) -> None:
        await serve(settings, stop, checks)

    run_worker("engine", settings, loop)


if __name__ == "__main__":
    main()
