"""A server of S3 on the loopback interface, and what its clients read from the environment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from moto.server import ThreadedMotoServer

SECRET = "secret-of-the-store"
BUCKET = "weights"
STORE = f"s3://{BUCKET}/team"


@contextmanager
def served_bucket() -> Iterator[dict[str, str]]:
    """Serves an empty bucket; yields the variables of its clients, with LEYDEN_WEIGHT_STORE."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        endpoint = f"http://{host}:{port}"
        # The server is a part of this process: earlier tests have left what they wrote.
        httpx.post(f"{endpoint}/moto-api/reset").raise_for_status()
        httpx.put(f"{endpoint}/{BUCKET}").raise_for_status()
        yield {
            "LEYDEN_WEIGHT_STORE": STORE,
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            # A server that is away is known after one try.
            "AWS_MAX_ATTEMPTS": "1",
        }
    finally:
        server.stop()
