from __future__ import annotations

from pathlib import Path

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.store.engines import Pool
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.worker import _base_model
from tests.builders import run_document


def test_the_model_is_that_of_the_run_else_of_its_pool_else_of_the_settings() -> None:
    nameless = RunConfig.model_validate(run_document())
    named = RunConfig.model_validate(run_document(model="/models/run"))
    settings = Settings(run_id="run-a", model_path=Path("/models/settings"))
    pool = Pool("small", "/models/small")
    assert _base_model(named, Pool("default"), settings) == Path("/models/run")
    assert _base_model(nameless, pool, settings) == Path("/models/small")
    assert _base_model(nameless, Pool("default"), settings) == Path("/models/settings")
    with pytest.raises(ValueError, match="names no model"):
        _base_model(nameless, None, Settings(run_id="run-a"))
