"""The variables that services inherit from `leyden up`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leyden.libs.cli.settings import EXAMPLES, inherited_environment


@pytest.mark.parametrize(("folder", "roots"), [("/usr", ["/usr", str(EXAMPLES)]), ("/", [str(EXAMPLES)])])
def test_agents_may_be_in_the_callers_folder(folder: str, roots: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNNER_AGENT_ROOTS", raising=False)
    monkeypatch.setattr(Path, "cwd", lambda: Path(folder))
    assert json.loads(inherited_environment()["RUNNER_AGENT_ROOTS"]) == roots


def test_the_caller_may_name_other_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_AGENT_ROOTS", '["/srv"]')
    assert inherited_environment()["RUNNER_AGENT_ROOTS"] == '["/srv"]'
