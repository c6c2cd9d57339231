"""LiteLLM's proxy before the same stub engine, which answers it as OpenAI's API does: text alone, nothing recorded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.bench.served import START_SECONDS, Server, end
from tests.frameworks import environments

ENVIRONMENT = "litellm"
SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOG": "ERROR",
    # On loopback, for the time of the benchmark.
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
}


def version() -> str:
    """The version of the proxy."""
    return environments.version(ENVIRONMENT, "litellm")


@contextmanager
def proxy(folder: Path, engine_url: str) -> Iterator[Server]:
    """The proxy with one worker inside the block; its environment is that of `make test-agents`."""
    environments.build(ENVIRONMENT)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    model = {"model": "openai/policy", "api_base": f"{engine_url}/v1", "api_key": "none"}
    # JSON is YAML.
    (folder / "litellm.yaml").write_text(
        json.dumps({"model_list": [{"model_name": "policy", "litellm_params": model}]})
    )
    command = (environments.CACHE / ENVIRONMENT / "bin" / "litellm", "--config", folder / "litellm.yaml")
    log = folder / "litellm.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1", "--telemetry", "False"],
            env={**os.environ, **SETTINGS},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(f"{url}/health/liveliness", process, log)
        yield Server(process, url, log)
    finally:
        end(process)


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    # It imports for ten seconds on an idle core.
    give_up_at = time.monotonic() + 3 * START_SECONDS
    while process.poll() is None and time.monotonic() < give_up_at:
        try:
            with urlopen(url):
                return
        except URLError:
            time.sleep(0.2)
    raise RuntimeError(f"LiteLLM's proxy did not start: {log.read_text()[-2000:]}")
