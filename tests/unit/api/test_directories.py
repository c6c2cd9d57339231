from __future__ import annotations

from pathlib import Path

import pytest

from leyden.libs.contracts.config import RunConfig
from leyden.libs.service import Problem
from leyden.services.api.models import check_directory, check_model
from leyden.services.api.settings import Settings
from tests.support import builders

ONE_MACHINE = Settings(database_url="postgresql://nowhere/x", one_machine=True)


def run_in(directory: Path) -> RunConfig:
    return RunConfig.model_validate(builders.run_document(agent={"command": ["./a"], "directory": str(directory)}))


@pytest.mark.parametrize("place", ["missing", "missing/agent", "file/agent"])
def test_a_missing_folder_is_refused_on_one_machine(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Problem, match=f"no folder {tmp_path}/{place}: write the folder that holds the agent's files"):
        check_directory(run_in(tmp_path / place), ONE_MACHINE)
    elsewhere = ONE_MACHINE.model_copy(update={"one_machine": False})
    warned = check_directory(run_in(tmp_path / place), elsewhere)
    assert [one.severity for one in warned] == ([] if place == "missing/agent" else ["warns"])


def test_a_missing_model_is_refused_on_one_machine_alone(tmp_path: Path) -> None:
    missing = str(tmp_path / "model")
    with pytest.raises(Problem, match="holds no config"):
        check_model(missing, one_machine=True)
    [warned] = check_model(missing, "algorithm.critic.model")
    assert (warned.path, warned.severity) == ("algorithm.critic.model", "warns")
    assert check_model("/models") == check_model(f"{missing}/deeper", one_machine=True) == []
    with pytest.raises(Problem, match="holds no config"):
        check_model(str(tmp_path))


def test_a_folder_that_the_api_cannot_look_at_is_not_missing(tmp_path: Path) -> None:
    # The error is another than that of a missing file, as it is for a folder that the API may not enter.
    hidden = tmp_path / "hidden"
    hidden.symlink_to(hidden)
    assert check_directory(run_in(hidden), ONE_MACHINE) == []
    loop = tmp_path / "loop"
    loop.mkdir()
    (loop / "config.json").symlink_to(loop / "config.json")
    check_model(str(loop))
