"""Settings that contradict the platform are refused at the gateway's start."""

import pytest
from pydantic import ValidationError

from leyden.services.gateway.settings import Settings


def test_a_server_with_the_name_of_the_platforms_own_provider_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_DATABASE_URL", "postgresql://localhost/leyden")
    monkeypatch.setenv("GATEWAY_PROVIDERS", '{"chat": {"url": "http://localhost:1/v1"}}')
    assert list(Settings().providers) == ["chat"]
    monkeypatch.setenv("GATEWAY_PROVIDERS", '{"conversation": {"url": "http://localhost:1/v1"}}')
    with pytest.raises(ValidationError, match=r"is the platform itself.*another name"):
        Settings()
