"""`leyden up --engine sglang`: the supervisor runs SGLang's server, here one that only says how it was started."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

from leyden.libs.cli.local.platform import Options, Platform
from leyden.libs.cli.local.services import ENGINE_ADMIN_KEY, ENGINE_KEY, Sglang
from leyden.libs.embedded.servers import EmbeddedPostgres, EmbeddedRedis

LAUNCH_SERVER = """
import json, os, pathlib, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

arguments = sys.argv[1:]
config = pathlib.Path(arguments[arguments.index("--config") + 1])
facts = {"arguments": arguments, "config": json.loads(config.read_text()), "mode": config.stat().st_mode & 0o777}
facts["health"] = os.environ["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"]

print("server_args=" + json.dumps(facts["config"]), file=sys.stderr, flush=True)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(facts).encode())

# Loading a model takes time.
time.sleep(2)
HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


def environment_with_sglang(folder: Path) -> Path:
    """A Python that has a package `sglang`."""
    (folder / "sglang").mkdir(parents=True)
    (folder / "sglang" / "__init__.py").write_text("")
    (folder / "sglang" / "launch_server.py").write_text(LAUNCH_SERVER)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def test_sglang_gets_model_address_keys_and_flags_and_ends_with_the_platform(tmp_path: Path) -> None:
    home, model = tmp_path / "home", tmp_path / "model"
    sglang = Sglang(environment_with_sglang(tmp_path / "environment"), ("--tp-size", "2"))
    options = Options(free_ports=True, services=("engine",), model_path=model, sglang=sglang)
    platform = Platform(home, options)
    platform.start()
    try:
        platform.ready(120)
        url = platform.facts.url("engine")
        facts = httpx.get(url, trust_env=False).json()
        assert facts["arguments"][-2:] == ["--tp-size", "2"]
        assert {"--incremental-streaming-output", "--enable-metrics"} <= set(facts["arguments"])
        files = {"api-key": ENGINE_KEY, "admin-api-key": ENGINE_ADMIN_KEY}
        keys = {name: (home / file).read_text().strip() for name, file in files.items()}
        assert facts["config"] == {"model-path": str(model)} | keys
        assert not [key for key in keys.values() if key in json.dumps(facts["arguments"])]
        assert (facts["mode"], facts["health"]) == (0o600, "0")
        log = (home / "logs" / "engine.log").read_text()
        assert "server_args=" in log
        assert not [key for key in keys.values() if key in log]
    finally:
        platform.stop()
        EmbeddedRedis(home / "redis").stop()
        EmbeddedPostgres(home / "postgres").stop()
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)
