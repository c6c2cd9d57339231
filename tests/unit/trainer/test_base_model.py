from __future__ import annotations

from pathlib import Path

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.store.engines import Pool
from leyden.services.trainer.settings import Settings
from leyden.services.trainer.worker import _base_model, require_served
from tests.fakes.chat_model import CHATML_WITH_TOOLS, make_chat_model
from tests.support.builders import run_document


def test_the_model_is_that_of_the_run_else_its_first_else_of_its_pool_else_of_the_settings() -> None:
    nameless = RunConfig.model_validate(run_document())
    named = RunConfig.model_validate(run_document(model="/models/run"))
    settings = Settings(run_id="run-a", model_path=Path("/models/settings"))
    pool = Pool("small", "/models/small")
    assert _base_model(named, Pool("default"), settings, None) == Path("/models/run")
    assert _base_model(nameless, pool, settings, "/models/first") == Path("/models/first")
    assert _base_model(nameless, pool, settings, None) == Path("/models/small")
    assert _base_model(nameless, Pool("default"), settings, None) == Path("/models/settings")
    with pytest.raises(ValueError, match="names no model"):
        _base_model(nameless, None, Settings(run_id="run-a"), None)


def test_a_model_that_the_engines_of_the_pool_cannot_serve_is_refused(tmp_path: Path) -> None:
    base, tuned = make_chat_model(tmp_path / "base"), make_chat_model(tmp_path / "tuned", CHATML_WITH_TOOLS)
    other = make_chat_model(tmp_path / "other", context_length=64)
    for pool, default in ((Pool("default"), base), (Pool("small", str(base)), None)):
        require_served(tuned, pool, default)
        with pytest.raises(ValueError, match="max_position_embeddings 64, theirs 4096"):
            require_served(other, pool, default)
    with pytest.raises(ValueError, match="keep the weights of their own model"):
        require_served(tuned, Pool("shared", str(base), adapters=2), None)
    require_served(other, Pool("default"), None)
    with pytest.raises(ValueError, match="gone is gone: put the folder back"):
        require_served(tmp_path / "gone", Pool("default"), base)
