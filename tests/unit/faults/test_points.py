from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from leyden.libs.faults import FaultInjector
from tests.contract.controller import test_canaries as canaries
from tests.contract.controller import test_kills as controller_kills
from tests.contract.controller import test_rerolls as rerolls
from tests.contract.controller import test_transfers as transfers
from tests.contract.controller import test_webhook as webhook
from tests.contract.engine import test_kills as engine_kills
from tests.contract.gateway import test_embeddings as embeddings
from tests.contract.gateway import test_process as gateway_kills
from tests.contract.grader import test_containers as container_kills
from tests.contract.grader import test_killed_regrades as regrade_kills
from tests.contract.trainer import test_kills as trainer_kills
from tests.contract.trainer import test_publishing, test_ranks
from tests.contract.weights import test_cache as caches
from tests.e2e import test_external_agents, test_points, test_rewards

PASSING = "from leyden.libs.faults import fault_point; fault_point('there'); print('alive')"


def _pass(injector: FaultInjector | None) -> subprocess.CompletedProcess[str]:
    environment = injector.environment if injector else {}
    root = Path(__file__).resolve().parents[3]
    return subprocess.run(
        [sys.executable, "-c", PASSING], env=environment, cwd=root, capture_output=True, text=True, timeout=60
    )


def test_an_armed_point_kills_only_the_first_process_that_reaches_it(tmp_path: Path) -> None:
    injector = FaultInjector(tmp_path / "faults")
    injector.arm("there")
    assert _pass(injector).returncode == -signal.SIGKILL
    assert injector.fired("there", 0.0)
    assert _pass(injector).stdout == "alive\n"


def test_a_point_does_nothing_without_the_folder_in_the_environment(tmp_path: Path) -> None:
    FaultInjector(tmp_path / "faults").arm("there")
    assert _pass(None).stdout == "alive\n"


def test_arming_a_point_twice_is_refused(tmp_path: Path) -> None:
    injector = FaultInjector(tmp_path / "faults")
    injector.arm("there")
    with pytest.raises(FileExistsError):
        injector.arm("there")
    assert not injector.fired("there", 0.0)


def test_every_point_in_the_code_is_described_and_has_a_test_that_kills_there() -> None:
    root = Path(__file__).resolve().parents[3]
    code = "\n".join(path.read_text() for part in ("libs", "services") for path in sorted((root / part).rglob("*.py")))
    points = set(re.findall(r'(?:\bfault_point\(|\bmoment=)"([a-z]+\.[a-z_]+)"', code))
    described = re.findall(r"^\| `([a-z]+\.[a-z_]+)` \|", (root / "docs/adr/0010-fault-points.md").read_text(), re.M)
    killed = {f"{service}.{moment}" for service, moments in test_points.POINTS.items() for moment in moments}
    killed |= {*trainer_kills.POINTS, *trainer_kills.OF_CONTINUED_RUNS, *controller_kills.POINTS, *engine_kills.POINTS}
    killed |= {*test_points.API_POINTS, *test_ranks.POINTS, *transfers.POINTS, *test_rewards.POINTS, *webhook.POINTS}
    killed |= {*test_external_agents.POINTS, *container_kills.POINTS, *gateway_kills.POINTS, *canaries.POINTS}
    killed |= {*embeddings.POINTS, *regrade_kills.POINTS, *rerolls.POINTS}
    killed |= {*test_publishing.POINTS, *caches.POINTS}
    assert sorted(described) == sorted(points)
    assert set(described) == killed
