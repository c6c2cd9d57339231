import pytest
from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import HttpSettings


class Settings(HttpSettings):
    model_config = SettingsConfigDict(env_prefix="GATEWAY_")

    hold_seconds: float = 3.0


def test_own_fields_carry_the_prefix_and_shared_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_PORT", "8123")
    monkeypatch.setenv("GATEWAY_HOLD_SECONDS", "5")
    monkeypatch.setenv("LEYDEN_REDIS_URL", "redis://other/1")
    monkeypatch.setenv("LEYDEN_OTLP_ENDPOINT", "")
    monkeypatch.setenv("DATABASE_URL", "postgresql://not-ours")
    settings = Settings()
    assert (settings.port, settings.hold_seconds, settings.redis_url) == (8123, 5.0, "redis://other/1")
    assert "not-ours" not in settings.database_url
    assert settings.otlp_endpoint is None


def test_settings_in_code_use_field_names() -> None:
    assert Settings(database_url="postgresql://u:secret@h/x").database_url == "postgresql://u:secret@h/x"


def test_settings_are_frozen_and_hide_urls() -> None:
    settings = Settings(database_url="postgresql://u:secret@h/x")
    assert "secret" not in repr(settings)
    with pytest.raises(ValidationError):
        settings.port = 1


def test_a_wrong_value_fails_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEYDEN_LOG_LEVEL", "loud")
    with pytest.raises(ValidationError, match="LEYDEN_LOG_LEVEL"):
        Settings()
