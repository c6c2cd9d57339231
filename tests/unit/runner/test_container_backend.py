"""The container backend with a program in place of podman: its calls, its secrets, its errors and their remedies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from leyden.libs.containers.client import ContainerClient
from leyden.libs.contracts.agent_rules import AgentRules
from leyden.libs.contracts.config import ContainerRunner
from leyden.libs.sandbox.ended import Ended
from leyden.libs.sandbox.workspace import Workspaces
from leyden.libs.store.alarms.attempts import judge_attempts
from leyden.services.runner.backends.base import AttemptSpec, BackendError, out_of_memory
from leyden.services.runner.backends.container.backend import ContainerBackend
from leyden.services.runner.settings import Settings

# Notes each call and what it was given, and answers as `answers/CALL` says: an exit status and a text.
PROGRAM = """#!/bin/sh
here=$(dirname "$0")
printf '%s\\n' "$*" >>"$here/calls"
env >"$here/environment-$1"
for word; do case $word in --env-file=*) cp "${word#--env-file=}" "$here/variables";; esac; done
status=0
for last; do :; done
if grep -qx "$1 $last" "$here/refuses" 2>/dev/null; then echo "no such container" >&2; exit 125; fi
if [ -f "$here/answers/$1" ]; then { read -r status; cat; } <"$here/answers/$1" >"$here/said"; cat "$here/said" >&2; fi
case $1 in
    start) echo '{"reward": 0.5}';;
    inspect) cat "$here/owner-$last" 2>/dev/null || printf '%s' "$(cat "$here/state")";;
    ps) cat "$here/containers";;
    image) cat "$here/volumes" 2>/dev/null || echo null;;
esac
exit "$status"
"""
CALLS = {"calls": 1, "overflows": 0, "unfinished": 0, "training": 1, "untrainable": 0, "untrainable_reason": None}
ENDED = {"StartedAt": "2026-01-01T00:00:00Z", "Running": False, "OOMKilled": False}


class FakePodman:
    """The program, its answers, and what it was told."""

    def __init__(self, folder: Path, name: str = "podman") -> None:
        (folder / "answers").mkdir(parents=True)
        self.folder, self.path = folder, folder / name
        self.path.write_text(PROGRAM)
        self.path.chmod(0o755)
        self.ends(**ENDED)

    def answers(self, call: str, status: int, words: str = "") -> None:
        (self.folder / "answers" / call).write_text(f"{status}\n{words}\n")

    def ends(self, **state: Any) -> None:
        (self.folder / "state").write_text(json.dumps({**ENDED, **state}))

    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def podman(tmp_path: Path) -> FakePodman:
    return FakePodman(tmp_path / "bin")


@pytest.fixture
async def backend(tmp_path: Path, podman: FakePodman) -> AsyncIterator[ContainerBackend]:
    settings = Settings(
        agent_user="same", work_folder=tmp_path / "attempts", container_program=str(podman.path), start_seconds=30
    )
    made = ContainerBackend(settings, "runner-1")
    yield made
    await made.close()
    assert list((tmp_path / "attempts").glob("runner-*")) == []


def spec(*command: str, **changes: Any) -> AttemptSpec:
    values: dict[str, Any] = {
        "name": "r.0.0.1",
        "command": list(command) or ["{python}", "/app/agent.py", "--x"],
        "environment": {"OWN": "1", "OPENAI_CUSTOM_HEADERS": "a: 1\nb: 2", "LEYDEN_TASK_FILE": "forged"},
        "secrets": {"KEY": "signed"},
        "task": {"question": "Café?"},
        "directory": None,
        "limits": ContainerRunner(image="localhost/agent:1", memory_bytes=2**26, cpu_seconds=9),
        "labels": {"run": "r", "rollout": "r.0.0", "attempt": "1"},
    }
    return AttemptSpec(**{**values, **changes})


async def run(backend: ContainerBackend, **changes: Any) -> Ended:
    return await backend.run(spec(**changes))


async def test_a_container_gets_its_bounds_and_its_variables_and_no_secret_on_a_command_line(
    backend: ContainerBackend, podman: FakePodman, tmp_path: Path
) -> None:
    ended = await run(backend)
    assert (ended.exit_code, ended.reward_line) == (0, b'{"reward": 0.5}')
    image, create, start, remove = podman.calls()
    assert image.startswith("image inspect")
    assert (start, remove) == ("start --attach leyden-r.0.0.1", "rm --force --volumes leyden-r.0.0.1")
    words = create.split()
    assert words[-3:] == ["localhost/agent:1", "/app/agent.py", "--x"]
    place = tmp_path / "attempts" / "attempt"
    bounds = {
        *("--entrypoint=python", "--pull=never", "--read-only", "--cap-drop=all", "--network=host"),
        *("--security-opt=no-new-privileges", "--memory=67108864", "--memory-swap=67108864", "--pids-limit=512"),
        *("--ulimit=cpu=9:14", "--ulimit=core=0:0", "--env=OPENAI_CUSTOM_HEADERS", f"--workdir={place}/work"),
        *("--label=leyden.dev/run=r", "--label=leyden.dev/rollout=r.0.0", "--label=leyden.dev/attempt=1"),
        *("--label=leyden.dev/owner=runner-1-containers", f"--label=leyden.dev/work-folder={tmp_path}/attempts"),
    }
    assert bounds <= set(words)
    assert not any("signed" in call for call in podman.calls())
    variables = dict(line.split("=", 1) for line in podman.read("variables").splitlines())
    assert (variables["OWN"], variables["KEY"]) == ("1", "signed")
    assert variables["LEYDEN_TASK_FILE"] == f"{place}/task.json"
    assert "OPENAI_CUSTOM_HEADERS=a: 1\nb: 2\n" in podman.read("environment-create")
    assert "OPENAI_CUSTOM_HEADERS" not in podman.read("environment-start")


async def test_the_program_gets_no_variable_of_the_platform(
    backend: ContainerBackend, podman: FakePodman, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEYDEN_DATABASE_URL", "postgres://secret")
    monkeypatch.setenv("DOCKER_HOST", "unix:///own.sock")
    await run(backend)
    for call in ("create", "start", "rm"):
        found = podman.read(f"environment-{call}")
        assert "LEYDEN_DATABASE" not in found
        assert "DOCKER_HOST=unix:///own.sock" in found


async def test_no_agent_gets_a_volume_of_its_image(
    backend: ContainerBackend, podman: FakePodman, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run(backend)
    assert "--image-volume=ignore" in podman.calls()[1].split()
    docker = FakePodman(tmp_path / "docker", "docker")
    monkeypatch.setattr(backend, "_client", ContainerClient(str(docker.path)))
    (docker.folder / "volumes").write_text('{"/tmp": {}}')
    await run(backend)
    assert not [call for call in docker.calls() if "--image-volume" in call]
    (docker.folder / "volumes").write_text('{"/tmp": {}, "/data": {}}')
    with pytest.raises(BackendError, match=r"declares volumes \(/data\).*build it without VOLUME"):
        await run(backend)


@pytest.mark.parametrize("variables", [{"LD_PRELOAD": "a\nb"}, {"OWN": "x" * 60_001}, {"A B": "1"}])
async def test_a_variable_that_no_container_takes_is_refused(
    backend: ContainerBackend, podman: FakePodman, variables: dict[str, str]
) -> None:
    with pytest.raises(BackendError, match=r"agent\.environment"):
        await run(backend, environment=variables)
    assert not [call for call in podman.calls() if call.startswith("create")]


@pytest.mark.parametrize(
    ("code", "killed", "lacked", "blamed"),
    [(137, True, True, True), (1, True, True, True), (137, False, True, True), (137, False, False, False)],
)
async def test_nobody_says_whose_memory_was_over_so_that_it_is_not_the_agents_failure(
    backend: ContainerBackend,
    podman: FakePodman,
    monkeypatch: pytest.MonkeyPatch,
    *,
    code: int,
    killed: bool,
    lacked: bool,
    blamed: bool,
) -> None:
    """Args: killed: podman says so; lacked: the kernel ended processes of the machine; blamed: memory is the reason"""
    supervised = backend._supervisors.run

    async def short_of_memory(*words: Any) -> Any:
        return {**await supervised(*words), "lacked_memory": lacked}

    monkeypatch.setattr(backend._supervisors, "run", short_of_memory)
    podman.answers("start", code)
    podman.ends(OOMKilled=killed)
    ended = await run(backend)
    assert (ended.limit_exceeded, ended.exit_code) == (None, code)
    assert ended.platform_failure == (out_of_memory("runner.memory_bytes") if blamed else None)


async def test_the_runs_alarm_tells_the_remedy_for_want_of_memory(
    backend: ContainerBackend, podman: FakePodman
) -> None:
    podman.answers("start", 137)
    podman.ends(OOMKilled=True)
    reason = (await run(backend)).platform_failure or ""
    outcome = {"kind": "infra_error", "detail": reason, "stderr": "", "reason": None}
    [alarm] = [one for one in judge_attempts([outcome | CALLS] * 4) if one.name == "platform_fails"]
    assert alarm.reason.endswith("Raise the limit, or let fewer agents run at once on a machine")


async def test_an_agent_that_outlived_the_end_of_its_child_counts_as_it_says(
    backend: ContainerBackend, podman: FakePodman
) -> None:
    podman.ends(OOMKilled=True)
    ended = await run(backend)
    assert (ended.exit_code, ended.platform_failure) == (0, None)


async def test_another_exit_code_is_the_agents(backend: ContainerBackend, podman: FakePodman) -> None:
    podman.answers("start", 3, "broken")
    ended = await run(backend)
    assert (ended.exit_code, ended.stderr, ended.platform_failure) == (3, b"broken\n", None)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"StartedAt": "0001-01-01T00:00:00Z"}, "the agent could not be started: no such file"),
        ({"Running": True}, "the client of the agent's container ended before it: no such file"),
    ],
)
async def test_an_agent_that_never_ran_or_runs_on_is_the_platforms_failure(
    backend: ContainerBackend, podman: FakePodman, state: dict[str, Any], message: str
) -> None:
    podman.answers("start", 127, "no such file")
    podman.ends(**state)
    with pytest.raises(BackendError, match=message):
        await run(backend)
    assert podman.calls()[-1] == "rm --force --volumes leyden-r.0.0.1"


@pytest.mark.parametrize("variable", ["API_AGENT_RULES", "RUNNER_AGENT_RULES"])
async def test_an_image_that_the_operator_has_not_allowed_is_neither_pulled_nor_run(
    tmp_path: Path, podman: FakePodman, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, '{"images": ["registry.example/*"]}')
    settings = Settings(agent_user="same", work_folder=tmp_path / "attempts", container_program=str(podman.path))
    assert settings.agent_rules == AgentRules(images=("registry.example/*",))
    backend = ContainerBackend(settings, "runner-1")
    with pytest.raises(BackendError, match=r"localhost/agent:1 is not among the images .*registry\.example"):
        await run(backend)
    assert not (podman.folder / "calls").exists()
    await run(backend, limits=ContainerRunner(image="registry.example/agent:1"))
    await backend.close()


async def test_an_image_that_the_machine_lacks_is_pulled(backend: ContainerBackend, podman: FakePodman) -> None:
    podman.answers("image", 1, "image not known")
    await run(backend)
    assert podman.calls()[1] == "pull --quiet localhost/agent:1"
    podman.answers("pull", 125, "connection refused")
    with pytest.raises(BackendError, match=r"no registry gave it \(.*connection refused\): build it or load it there"):
        await run(backend)


async def test_a_daemon_that_does_not_run_is_named(backend: ContainerBackend, podman: FakePodman) -> None:
    podman.answers("image", 1, "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?")
    with pytest.raises(BackendError, match="start docker's daemon"):
        await run(backend)


async def test_containers_of_dead_runners_go_though_others_vanish_or_stay(
    backend: ContainerBackend, podman: FakePodman, tmp_path: Path
) -> None:
    """A runner that starts at the same time removes some of them; one of a living runner stays."""
    living = Workspaces(tmp_path / "attempts", "runner-2-containers", "RUNNER_WORK_FOLDER")
    (podman.folder / "containers").write_text("gone\nstuck\nused\nabandoned\n")
    for name, owner in {"stuck": "runner-0-containers", "used": "runner-2-containers", "abandoned": "dead"}.items():
        (podman.folder / f"owner-{name}").write_text(f"{owner}\n")
    (podman.folder / "refuses").write_text("inspect gone\nrm stuck\n")
    await backend.remove_abandoned()
    living.close()
    removed = [call.rsplit(" ", 1)[1] for call in podman.calls() if call.startswith("rm ")]
    assert removed == ["stuck", "abandoned"]


async def test_a_machine_without_a_program_says_what_to_install(tmp_path: Path) -> None:
    settings = Settings(work_folder=tmp_path / "attempts", container_program="no-such-program")
    backend = ContainerBackend(settings, "runner-1")
    await backend.remove_abandoned()
    with pytest.raises(BackendError, match="apt-get install podman"):
        await backend.run(spec())
