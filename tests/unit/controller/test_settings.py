"""Pools of engines in the controller's settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from leyden.services.controller.settings import Settings


def pools(**found: object) -> Settings:
    return Settings.model_validate({"pools": found})


def test_without_pools_the_other_settings_make_the_pool_default() -> None:
    [(name, pool)] = Settings(engine_urls=["http://a:1", "http://b:1", "http://a:1"]).engine_pools().items()
    assert (name, pool.model_path, pool.engine_urls) == ("default", None, {"http://a:1", "http://b:1"})
    by_service = Settings(engine_service="engines", namespace="leyden").engine_pools()
    assert by_service["default"].engine_service == "engines"
    assert Settings(engine_urls=[]).engine_pools()["default"].engine_urls == frozenset()


def test_pools_come_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"model_path": "/models/small", "engine_urls": ["http://a:1"], "context_length": 4096}
    monkeypatch.setenv("CONTROLLER_POOLS", json.dumps({"small": small}))
    [(name, pool)] = Settings().engine_pools().items()
    assert (name, str(pool.model_path), pool.engine_urls, pool.context_length) == (
        *("small", "/models/small"),
        *({"http://a:1"}, 4096),
    )


@pytest.mark.parametrize(
    "settings",
    [
        {"engine_urls": ["http://user:secret@a:1"]},
        {"pools": {"small": {"model_path": "/m", "engine_urls": ["http://user:secret@a:1"]}}},
    ],
)
def test_the_address_of_an_engine_has_no_password(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="without user and password"):
        Settings(**settings)


def test_pools_that_cannot_work_are_refused_with_the_remedy() -> None:
    urls = {"engine_urls": ["http://a:1"]}
    with pytest.raises(ValueError, match="pool small needs model_path"):
        pools(small=urls)
    with pytest.raises(ValueError, match="either engine_urls or engine_service"):
        pools(default={})
    with pytest.raises(ValueError, match="either engine_urls or engine_service"):
        pools(default={**urls, "engine_service": "engines"})
    with pytest.raises(ValueError, match="an engine belongs to one pool"):
        pools(default=urls, small={**urls, "model_path": "/models/small"})
    with pytest.raises(ValueError, match="an engine belongs to one pool"):
        pools(default=urls, small={"engine_urls": ["http://a:1/"], "model_path": "/models/small"})
    services = {"engine_service": "engines"}
    with pytest.raises(ValueError, match="an engine belongs to one pool"):
        pools(default=services, small={**services, "model_path": "/models/small"})
    with pytest.raises(ValueError, match="pool default has context_length, which needs model_path"):
        pools(default={**urls, "context_length": 4096})
    with pytest.raises(ValueError, match="needs CONTROLLER_NAMESPACE"):
        pools(default=services)
    with pytest.raises(ValueError, match="should match pattern"):
        pools(**{"Not A Name": urls})
    with pytest.raises(ValueError, match="at least 1 item"):
        pools()
