"""HTTP requests that are retried while the platform restarts; all are idempotent, creates by an Idempotency-Key."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx

from leyden.libs.client.errors import Refused, Unreachable, error_of

Parameters = Mapping[str, str | int | float | bool | list[str] | None]
Content = bytes | Callable[[], Iterator[bytes]]
CHUNK_BYTES = 65536


class Transport:
    """A connection pool with a bearer token.

    Args: patience_seconds: how long after its first failure a request is retried while there is no answer, or the
        answer is 503. A try that timed out is repeated, however long it took.
    """

    def __init__(self, base_url: str, token: str | None, *, timeout_seconds: float, patience_seconds: float) -> None:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        # A request that waits for a task holds its connection, and would keep heartbeats of other threads waiting.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._client = httpx.Client(
            base_url=_address(base_url), headers=headers, timeout=timeout_seconds, limits=limits
        )
        self.timeout_seconds = timeout_seconds
        self._patience_seconds = patience_seconds

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def get(self, path: str, parameters: Parameters | None = None) -> bytes:
        """Returns the body of a successful answer."""
        return self._send("GET", path, parameters=parameters)

    @contextmanager
    def stream(
        self,
        path: str,
        parameters: Parameters | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        silence_seconds: float | None = None,
    ) -> Iterator[Iterator[bytes]]:
        """Gives the chunks of a successful answer inside the block; it is not repeated.

        Args: silence_seconds: the longest between two chunks, which then come as they arrive; None: the client's
            timeout, and chunks of one size
        Raises: Unreachable: no answer, or the connection is lost before its end
        """
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        limit = self.timeout_seconds if silence_seconds is None else silence_seconds
        try:
            with self._client.stream("GET", path, params=given, headers=headers, timeout=limit) as response:
                if not response.is_success:
                    response.read()
                    raise error_of(response)
                yield response.iter_raw(CHUNK_BYTES if silence_seconds is None else None)
        except httpx.TransportError as error:
            raise self._unreachable(error) from error

    def delete(self, path: str) -> None:
        """Sends a DELETE request, which is idempotent."""
        self._send("DELETE", path)

    def create(
        self,
        path: str,
        content: Content,
        *,
        parameters: Parameters | None = None,
        content_type: str = "application/json",
        key: str | None = None,
        timeout_seconds: float | None = None,
    ) -> bytes:
        """Posts with an Idempotency-Key, so that retries create one resource."""
        headers = {"content-type": content_type, "idempotency-key": key or secrets.token_hex(16)}
        return self._send(
            "POST", path, parameters=parameters, content=content, headers=headers, timeout_seconds=timeout_seconds
        )

    def post(
        self,
        path: str,
        content: bytes | None = None,
        *,
        timeout_seconds: float | None = None,
        patience_seconds: float | None = None,
    ) -> bytes:
        """Posts to an idempotent endpoint, JSON where there is content. Args: None: as for other requests"""
        headers = None if content is None else {"content-type": "application/json"}
        return self._send(
            "POST",
            path,
            content=content,
            headers=headers,
            timeout_seconds=timeout_seconds,
            patience_seconds=patience_seconds,
        )

    def _send(
        self,
        method: str,
        path: str,
        *,
        parameters: Parameters | None = None,
        content: Content | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        patience_seconds: float | None = None,
    ) -> bytes:
        given = {name: value for name, value in (parameters or {}).items() if value is not None}
        patience = self._patience_seconds if patience_seconds is None else patience_seconds
        deadline, pause = math.inf, 0.1
        while True:
            try:
                body = content() if callable(content) else content
                limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
                response = self._client.request(
                    method, path, params=given, content=body, headers=headers, timeout=limit
                )
            except httpx.TransportError as error:
                failure: Exception = self._unreachable(error)
            else:
                if response.is_success:
                    return response.content
                failure = error_of(response)
            deadline = min(deadline, time.monotonic() + patience)
            if not isinstance(failure, Unreachable) or time.monotonic() + pause > deadline:
                raise failure
            time.sleep(pause)
            pause = min(2.0, pause * 2)

    def _unreachable(self, error: httpx.TransportError) -> Unreachable:
        return Unreachable(
            f"no answer from {self._client.base_url}: {error or type(error).__name__};"
            " start the platform with `leyden up`, or name another with --url or LEYDEN_URL"
        )


def _address(text: str) -> httpx.URL:
    """Raises: Refused: the text is no address of an HTTP server"""
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        url = httpx.URL()
    if url.scheme not in {"http", "https"} or not url.host:
        raise Refused(f"{text!r} is no address of an API: write http://HOST:PORT")
    return url


def file_chunks(path: Path) -> Callable[[], Iterator[bytes]]:
    """Returns a function that reads the file from its start, for each try."""

    def read() -> Iterator[bytes]:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    return read
