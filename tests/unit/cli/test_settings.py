"""The variables that services inherit from `leyden up`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leyden.libs.cli.errors import CommandError
from leyden.libs.cli.local.agent_folders import check_apart, code_folders
from leyden.libs.cli.local.services import PORTS, Facts, environment, inherited_by
from leyden.libs.cli.settings import EXAMPLES, grader_roots, inherited_environment, provider_names


def test_agents_may_be_in_named_folders_and_in_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUNNER_AGENT_ROOTS", raising=False)
    monkeypatch.chdir("/usr")
    assert json.loads(inherited_environment()["RUNNER_AGENT_ROOTS"]) == [str(EXAMPLES)]
    named = inherited_environment([Path("/srv/agents")])["RUNNER_AGENT_ROOTS"]
    assert json.loads(named) == ["/srv/agents", str(EXAMPLES)]


def test_the_callers_variable_names_folders_beside_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_AGENT_ROOTS", '["/srv"]')
    assert json.loads(inherited_environment([Path("/opt")])["RUNNER_AGENT_ROOTS"]) == ["/srv", "/opt", str(EXAMPLES)]


def test_a_home_is_no_folder_of_agents(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, agents = tmp_path / "me", tmp_path / "me" / "agents"
    agents.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    assert code_folders([agents, agents / ".." / "agents"], "--agents") == (agents, agents)
    for folder in (home, tmp_path, Path("/")):
        with pytest.raises(CommandError, match="of a user: name the agents' own folder in it"):
            code_folders([folder], "--agents")
    (tmp_path / "link").symlink_to(home)
    for folder, cause in ((tmp_path / "link", "is the home"), (tmp_path / "none", "there is no such folder")):
        with pytest.raises(CommandError, match=cause):
            code_folders([folder], "--agents")


def test_graders_lie_in_folders_that_agents_cannot_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GRADER_CODE_ROOTS", '["/srv/graders"]')
    given = {"GRADER_CODE_ROOTS": '["/srv/own"]'}
    assert grader_roots([tmp_path], given) == (Path("/srv/own"), tmp_path)
    roots = grader_roots([tmp_path, Path("/srv/graders")])
    assert roots == (Path("/srv/graders"), tmp_path)
    facts = Facts(
        Path("/home"),
        dict.fromkeys(PORTS, 1),
        {},
        "postgresql://h",
        "redis://h",
        tmp_path,
        graders=roots,
    )
    assert json.loads(environment("runner", facts)["RUNNER_HIDDEN_PATHS"]) == ["/home", "/srv/graders", str(tmp_path)]
    of_grader = environment("grader", facts)
    assert json.loads(of_grader["GRADER_CODE_ROOTS"]) == ["/srv/graders", str(tmp_path)]
    assert json.loads(of_grader["GRADER_HIDDEN_PATHS"]) == ["/home"]


def test_agents_do_not_lie_below_graders(tmp_path: Path) -> None:
    check_apart([tmp_path], [tmp_path / "graders"])
    for agents in (tmp_path, tmp_path / "agents"):
        with pytest.raises(CommandError, match="agents may not read what graders know"):
            check_apart([agents], [tmp_path])


@pytest.mark.parametrize(
    "name", ["LEYDEN_DATABASE_URL", "LEYDEN_DATABASE_PASSWORD", "LEYDEN_REDIS_URL", "LEYDEN_TOKEN"]
)
def test_the_engine_has_no_key_to_the_store(name: str, tmp_path: Path) -> None:
    assert inherited_by("engine", {name: "secret", "ENGINE_THREADS": "2"}) == {"ENGINE_THREADS": "2"}
    assert inherited_by("gateway", {name: "secret"}) == {name: "secret"}
    facts = Facts(tmp_path, {"engine": 1}, {}, "postgresql://u:secret@h/n", "redis://:secret@h", tmp_path)
    assert "secret@" not in str(environment("engine", facts)) and "CAPABILITY" not in str(environment("engine", facts))


def test_providers_are_those_that_the_service_itself_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_PROVIDERS", '{"ours": {}}')
    assert provider_names("GRADER_PROVIDERS") == ("ours",)
    assert provider_names("GRADER_PROVIDERS", {"GRADER_PROVIDERS": '{"judge": {}}'}) == ("judge",)
    monkeypatch.delenv("GRADER_PROVIDERS")
    assert provider_names("GRADER_PROVIDERS") == ()
