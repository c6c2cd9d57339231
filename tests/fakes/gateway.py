"""The real gateway on a free port, with a key for any attempt and the official OpenAI client in front of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from libs.capability import KeyRing, sign, write_keys
from libs.contracts.capability import Capability, Scope
from libs.service import serving
from services.gateway.app import create_app
from services.gateway.settings import Settings


@dataclass
class GatewayUnderTest:
    """Address and key ring of a running gateway."""

    url: str
    ring: KeyRing
    run_id: str = "run-test"

    def key(self, rollout_id: str, attempt: int = 1, *, lasts_seconds: int = 600, scope: Scope = Scope.MODEL) -> str:
        """What the runner would give this attempt's agent."""
        return sign(
            self.ring,
            Capability(
                run_id=self.run_id,
                rollout_id=rollout_id,
                attempt=attempt,
                scopes=frozenset({scope}),
                expires_at=int(time.time()) + lasts_seconds,
            ),
        )

    def base_url(self, rollout_id: str, attempt: int = 1) -> str:
        """The agent's OPENAI_BASE_URL."""
        return f"{self.url}/r/{rollout_id}/{attempt}/v1"

    def client(self, rollout_id: str, attempt: int = 1, **options: Any) -> AsyncOpenAI:
        """An agent's client; it does not retry unless told to."""
        return AsyncOpenAI(
            base_url=self.base_url(rollout_id, attempt),
            api_key=self.key(rollout_id, attempt),
            **{"max_retries": 0, **options},
        )


@asynccontextmanager
async def running_gateway(
    folder: Path, *, model_path: Path, database_url: str, run_id: str, **settings: Any
) -> AsyncIterator[GatewayUnderTest]:
    """A gateway with its key ring in a folder; further arguments are its settings."""
    keys = folder / "keys.json"
    if not keys.exists():
        write_keys(keys, {"test": "s" * 40})
    values = {"hold_seconds": 10.0, "record_hold_seconds": 5.0, "engine_poll_seconds": 0.02, **settings}
    app = create_app(
        Settings(model_path=model_path, database_url=database_url, capability_keys_file=keys, **values)
    )
    async with serving(app, shutdown_seconds=2) as port:
        yield GatewayUnderTest(f"http://127.0.0.1:{port}", KeyRing(keys), run_id)
