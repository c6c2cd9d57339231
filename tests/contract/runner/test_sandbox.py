"""Real agents that break out, break things, or steal, under a real runner: as root that gives each agent a user of its
own, as root whose agents stay root, and as an ordinary user. They reach nothing, and nothing of them stays behind.
"""

from __future__ import annotations

import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest

from leyden.libs.capability import write_keys
from leyden.libs.sandbox import sandbox
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.contract.runner.test_attempts import Bench, stopped
from tests.fakes.ordinary import as_ordinary_user, as_root_whose_interpreter_is_open
from tests.support import builders

AGENTS = Path(__file__).parents[2] / "agents"
BOUND = 48
MISDEEDS: dict[str, tuple[str, float | None]] = {
    "hang": ("timeout", None),
    "ignore_sigterm": ("timeout", None),
    "stop_itself": ("timeout", None),
    "ignore_the_cpu_limit": ("agent_error", None),
    "fork_away": ("succeeded", 1.0),
    "fork_bomb": ("succeeded", 1.0),
    "flood": ("succeeded", 1.0),
    "fill_the_disk": ("agent_error", None),
    "leave_many_files": ("succeeded", 1.0),
    "leave_a_deep_tree": ("succeeded", 1.0),
    "leave_what_is_read_only": ("succeeded", 1.0),
    "leave_strange_files": ("succeeded", 1.0),
    "leave_links": ("succeeded", 1.0),
    "kill_its_parents": ("succeeded", 1.0),
    "close_its_output": ("succeeded", None),
    "leave_without_a_reward": ("succeeded", None),
    "crash": ("agent_error", None),
    "kill_itself": ("agent_error", None),
    "print_a_broken_reward": ("agent_error", None),
    "print_a_reward_that_is_not_finite": ("agent_error", None),
    "print_a_huge_reward": ("agent_error", None),
    "print_a_deep_reward": ("agent_error", None),
    "print_deep_facts": ("succeeded", 1.0),
    "print_several_rewards": ("succeeded", 0.75),
    "print_bytes_that_are_no_text": ("succeeded", 1.0),
}
LIMITS: dict[str, dict[str, float]] = {
    **{name: {"timeout_seconds": 1.0} for name in ("hang", "ignore_sigterm", "stop_itself")},
    "ignore_the_cpu_limit": {"cpu_seconds": 1},
}
LONG = 120.0


class SandboxBench(Bench):
    """A bench whose secrets lie in a folder of the platform.

    Args: agents: `own`, each with a user of its own; `root`, all of them root; `ordinary`, under an ordinary user.
    """

    def __init__(self, database: Database, redis_url: str, folder: Path, *, agents: str) -> None:
        super().__init__(database, redis_url, folder)
        self.agents = agents
        self.platform, self.canary = folder / "platform", folder / "canary"
        for made in (self.platform, self.canary):
            made.mkdir()
            (made / "file").write_text("a secret word")
        self.keys = self.platform / "keys.json"
        write_keys(self.keys)
        if agents == "ordinary":
            self.launcher = as_ordinary_user(folder)
        if agents == "own":
            self.launcher = as_root_whose_interpreter_is_open(folder)

    @property
    def signals_are_confined(self) -> bool:
        """Whether an agent cannot signal other processes of its user: Linux 6.12 can confine signals."""
        return self.agents == "own" or sandbox.landlock_abi() >= sandbox.SIGNAL_LANDLOCK

    async def begin(self) -> Any:
        return await self.start(
            RUNNER_AGENT_USER={"own": "own", "root": "same", "ordinary": "auto"}[self.agents],
            RUNNER_WORK_FOLDER=str(self.platform / "attempts"),
            RUNNER_HIDDEN_PATHS=json.dumps([str(self.platform)]),
            RUNNER_MAX_PROCESSES=str(BOUND),
            RUNNER_MAX_FILE_BYTES=str(2**23),
            RUNNER_LEASE_SECONDS="60",
            RUNNER_CONCURRENCY="8",
        )

    async def send(self, *words: str, environment: dict[str, str], **limits: Any) -> tables.Rollout:
        """A rollout of one of the agents in `tests/agents`."""
        return await self.send_command(["{python}", "-S", "-E", *words], environment, **limits)

    async def send_command(
        self, command: list[str], environment: dict[str, str] | None = None, **limits: Any
    ) -> tables.Rollout:
        agent = {"command": command, "environment": environment or {}}
        config = builders.run_document(agent=agent, runner={"timeout_seconds": 60, **limits})
        run = await builders.add_run(self.database, config=config)
        _, [rollout] = await builders.add_group(self.database, run, size=1)
        await self.queue.enqueue([rollout.id])
        return rollout

    async def ended(self, rollout: tables.Rollout) -> tables.Outcome:
        outcome: tables.Outcome = await self.until(lambda: self._get(tables.Outcome, (rollout.id, 1)), LONG)
        return outcome


@pytest.fixture(params=["own", "root", "ordinary"] if os.geteuid() == 0 else ["ordinary"])
async def bench(
    request: pytest.FixtureRequest, database: Database, redis_url: str, tmp_path: Path
) -> AsyncIterator[SandboxBench]:
    made = SandboxBench(database, redis_url, tmp_path, agents=request.param)
    yield made
    await made.close()


def _facts_of(folder: Path) -> dict[str, tuple[int, int, str]]:
    """Mode, owner and text of each file, and of the folder."""
    files = [path for path in folder.iterdir() if path.is_file()]
    return {".": (*_mode_and_owner(folder), "")} | {
        path.name: (*_mode_and_owner(path), path.read_text()) for path in files
    }


def _mode_and_owner(path: Path) -> tuple[int, int]:
    status = path.lstat()
    return stat.S_IMODE(status.st_mode), status.st_uid


async def test_misbehaving_agents_get_their_outcome_and_harm_neither_runner_nor_other_attempts(
    bench: SandboxBench,
) -> None:
    before = _facts_of(bench.canary)
    environment = {"CANARY": str(bench.canary), "BOUND": str(BOUND if bench.agents == "own" else 0)}
    # Without confined signals, this one would end the runner.
    misdeeds = {name for name in MISDEEDS if not name.startswith("kill_") or bench.signals_are_confined}
    runner = await bench.begin()
    async with stopped(runner):
        neighbour = await bench.send("-c", "import time; time.sleep(5); print('{\"reward\": 0.5}')", environment={})
        script = str(AGENTS / "misbehaving.py")
        sent = {
            name: await bench.send(script, name, environment=environment, **LIMITS.get(name, {}))
            for name in sorted(misdeeds)
        }
        ended = {name: await bench.ended(rollout) for name, rollout in sent.items()}
        found = {name: (outcome.kind, outcome.reward) for name, outcome in ended.items()}
        assert found == {name: MISDEEDS[name] for name in misdeeds}, {
            name: (outcome.detail, outcome.stderr_tail[-500:])
            for name, outcome in ended.items()
            if found[name] != MISDEEDS[name]
        }
        quiet = await bench.ended(neighbour)
        assert (quiet.kind, quiet.reward) == ("succeeded", 0.5)
        await bench.until(lambda: _childless(psutil.Process(runner.pid)))
        assert [path.name for path in (bench.platform / "attempts").glob("runner-*/*")] == [".lock"]
        # Peaks over everything, a flood of 1 GiB among it.
        assert ended["flood"].facts["supervisor_peak_kib"] < 64 * 1024
        peak = next(line for line in Path(f"/proc/{runner.pid}/status").read_text().splitlines() if "VmHWM" in line)
        assert int(peak.split()[1]) < 300 * 1024
    assert _facts_of(bench.canary) == before
    assert list((bench.platform / "attempts").glob("runner-*")) == []


async def _childless(process: psutil.Process) -> bool:
    return process.children(recursive=True) == []


async def test_a_thief_gets_nothing(bench: SandboxBench, redis_url: str) -> None:
    before = _facts_of(bench.platform)
    waiting = (
        "import os, time\nopen('secret', 'w').write('a secret word')\n"
        "while not os.path.exists('go'): time.sleep(0.1)\nprint('{\"reward\": 0.5}')"
    )
    runner = await bench.begin()
    abstract = f"leyden-test-{os.getpid()}-{bench.folder.name}"
    async with stopped(runner):
        victim = await bench.send("-c", waiting, environment={"WORD": "a secret word"})
        [secret] = await bench.until(lambda: _found(bench.platform, "secret"))
        pids = [process.pid for process in psutil.Process(runner.pid).children(recursive=True)]
        prey = {
            "folders": [str(bench.platform), str(secret.parent), str(secret.parents[2])],
            "pids": [runner.pid, *pids, os.getpid()],
            "word": "a secret word",
            "postgres": urlsplit(bench.database.dsn).port,
            "redis": urlsplit(redis_url).port,
            "abstract": abstract,
            "signals": bench.signals_are_confined,
            "own": bench.agents == "own",
            "code": sandbox.__file__,
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind("\0" + abstract)
            listener.listen()
            thief = await bench.send(str(AGENTS / "thief.py"), environment={"PREY": json.dumps(prey)})
            outcome = await bench.ended(thief)
        assert (outcome.kind, outcome.facts) == ("succeeded", {"reward": 0.0, "got": []}), outcome.stderr_tail
        (secret.parent / "go").touch()
        assert (await bench.ended(victim)).reward == 0.5
    assert _facts_of(bench.platform) == before


async def _found(folder: Path, name: str) -> list[Path]:
    return list((folder / "attempts").glob(f"*/*/work/{name}"))


async def test_an_agent_below_a_folder_that_its_user_cannot_pass_is_an_error_of_ours_with_the_remedy(
    bench: SandboxBench,
) -> None:
    home = bench.folder / "home"
    (home / "agent").mkdir(parents=True)
    (home / "agent" / "main.py").write_text("import beside; print('{\"reward\": %s}' % beside.REWARD)")
    (home / "agent" / "beside.py").write_text("REWARD = 0.75")
    home.chmod(0o700)
    if bench.agents == "ordinary":
        as_ordinary_user(home)
    async with stopped(await bench.begin()):
        rollout = await bench.send_command(["{python}", "-S", f"{home}/agent/main.py"])
        outcome = await bench.ended(rollout)
    if bench.agents == "own":
        assert (outcome.kind, outcome.reward) == ("infra_error", None)
        assert f"{home} is closed to the user that the agent becomes: let other users pass" in (outcome.detail or "")
    else:
        assert (outcome.kind, outcome.reward) == ("succeeded", 0.75), (outcome.detail, outcome.stderr_tail)


async def test_an_agents_directory_inside_the_platform_is_refused(bench: SandboxBench) -> None:
    async with stopped(await bench.begin()):
        agent = {"command": ["{python}", "-c", ""], "directory": str(bench.platform)}
        run = await builders.add_run(bench.database, config=builders.run_document(agent=agent))
        _, [rollout] = await builders.add_group(bench.database, run, size=1)
        await bench.queue.enqueue([rollout.id])
        outcome = await bench.ended(rollout)
        assert outcome.kind == "infra_error"
        assert "belongs to the platform" in (outcome.detail or "")


async def test_a_runner_that_cannot_start_agents_reports_it_at_startup(
    bench: SandboxBench, capfd: pytest.CaptureFixture[str]
) -> None:
    process = await bench.start(RUNNER_PYTHON=str(bench.folder / "no-such-python"))
    assert await process.wait() == 1
    assert "agents cannot start RUNNER_PYTHON" in capfd.readouterr().err
