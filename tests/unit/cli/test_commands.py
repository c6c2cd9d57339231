"""Commands teach by `--help`, and their errors name the remedy in a status that means something."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from typer.testing import CliRunner, Result

from docs.shapes import PUBLISHED
from leyden.libs.cli.__main__ import app
from leyden.libs.cli.commands.demo import AGENT, AgentName, DemoOptions, run_document, run_name
from leyden.libs.cli.errors import Exit
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.judgements import size_bytes

COMMANDS = (
    [], ["up"], ["down"], ["status"], ["doctor"], ["demo"], ["train"], ["logs"], ["recipes"],
    ["dataset"], ["dataset", "upload"], ["dataset", "list"], ["dataset", "show"],
    ["run"], ["run", "create"], ["run", "list"], ["run", "show"], ["run", "watch"], ["run", "pause"], ["run", "resume"],
    ["run", "cancel"], ["run", "evaluate"],
    ["run", "check"], ["run", "report"], ["run", "prune"], ["run", "agents"], ["run", "track"],
    ["agent", "try"], ["rollout", "list"], ["rollout", "show"], ["policy", "list"],
    ["reward", "test"],
    ["policy", "export"],
)  # fmt: skip


def leyden(home: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["--home", str(home), *words])


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_explains_itself(tmp_path: Path, words: list[str]) -> None:
    result = leyden(tmp_path, *words, "--help")
    assert result.exit_code == 0
    assert "Usage:" in result.output


@pytest.mark.parametrize("words", [["status"], ["run", "list"], ["dataset", "list"], ["rollout", "show", "r"]])
def test_without_a_platform_the_way_to_start_one_is_named(tmp_path: Path, words: list[str]) -> None:
    result = leyden(tmp_path, *words)
    assert result.exit_code == Exit.UNREACHABLE
    assert "leyden up" in result.output + result.stderr


@pytest.mark.parametrize("to", ["tensorboard", "tensorboard:", "trackio:", "wandb:", "mlflow:folder", "comet:team"])
def test_an_unknown_tracker_is_refused_with_one_that_is_known(tmp_path: Path, to: str) -> None:
    result = leyden(tmp_path, "run", "track", "r", "--to", to)
    assert result.exit_code == Exit.USAGE
    known = "tensorboard:FOLDER, trackio:PROJECT, wandb:PROJECT or mlflow:http://HOST:PORT"
    assert known in " ".join(result.stderr.split())


def test_a_missing_package_of_a_tracker_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboardX"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "leyden.libs.trackers.tensorboard", raising=False)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    result = leyden(tmp_path, "run", "track", "r", "--to", f"tensorboard:{tmp_path}")
    assert result.exit_code == Exit.ERROR
    assert "pip install 'leyden[tensorboard]'" in result.stderr


def test_stopping_nothing_is_no_error(tmp_path: Path) -> None:
    result = leyden(tmp_path, "down", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == {"stopped": False}


def test_logs_of_an_unknown_service_list_the_services(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway.log").write_text("one\ntwo\n")
    assert leyden(tmp_path, "logs", "gateway", "-n", "1").stdout == "two\n"
    result = leyden(tmp_path, "logs", "nothing")
    assert result.exit_code == Exit.NOT_FOUND
    assert "gateway" in result.output + result.stderr


@pytest.mark.parametrize("credit", ["identical", "equal_split", "discounted"])
@pytest.mark.parametrize("air", [True, False])
def test_every_choice_of_the_demo_is_a_valid_run_with_a_name_of_its_own(credit: str, air: bool) -> None:
    options = DemoOptions(credit=credit, air=air)  # type: ignore[arg-type]  # the literals, as typer gives them
    document = run_document(options)
    assert RunConfig.model_validate_json(document.model_dump_json()) == document
    assert run_name(options) != run_name(DemoOptions(credit=credit, air=not air))  # type: ignore[arg-type]


def test_logs_of_all_trainers_name_their_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    for run in ("run-a", "run-b"):
        (tmp_path / "logs" / f"trainer-{run}.log").write_text(f"step of {run}\n")
    assert leyden(tmp_path, "logs", "trainer").stdout == (
        "[trainer-run-a] step of run-a\n[trainer-run-b] step of run-b\n"
    )
    assert leyden(tmp_path, "logs").stdout.split() == ["trainer-run-a", "trainer-run-b"]


@pytest.mark.parametrize("agent", get_args(AgentName))
def test_the_demo_starts_the_program_of_the_named_agent(agent: AgentName):
    document, plain = run_document(DemoOptions(agent=agent)), run_document(DemoOptions())
    program = document.agent.command[-1]
    assert (AGENT / program).is_file()
    assert (AGENT / f"requirements{'' if agent == 'plain' else f'-{agent}'}.txt").is_file()
    assert (document == plain) == (agent == "plain")
    same = document.agent.model_copy(update={"command": plain.agent.command})
    assert document.model_copy(update={"agent": same, "name": plain.name}) == plain


def check(folder: Path, document: dict[str, object], *words: str) -> tuple[int, dict[str, Any]]:
    (folder / "run.json").write_text(json.dumps({"name": "a", "dataset": "b", "recipe": "grpo-8b", **document}))
    (folder / "config.json").write_text(json.dumps(PUBLISHED["Qwen3-8B"][0]))
    result = leyden(folder, "run", "check", str(folder / "run.json"), "--model", str(folder), "--json", *words)
    return result.exit_code, json.loads(result.stdout)


def test_a_run_is_checked_without_a_platform(tmp_path: Path) -> None:
    agent = {"agent": {"command": ["/bin/agent"]}}
    status, found = check(tmp_path, agent, "--gpu-memory", "80GB")
    assert (status, found["can_run"]) == (Exit.REFUSED, False)
    assert [(one["path"], one["severity"]) for one in found["findings"]] == [("training", "cannot")]
    assert {"place": "gpu", "name": "gradients", "size_bytes": 4 * 8_190_735_360, "certain": True} in found["memory"]
    status, found = check(tmp_path, agent, "--gpus", "8", "--gpu-memory", "80GB", "--host-memory", "256GiB")
    assert (status, found["findings"]) == (Exit.DONE, [])


def test_a_check_counts_a_teacher_that_it_sees_and_names_one_that_it_does_not(tmp_path: Path) -> None:
    agent = {"agent": {"command": ["/bin/agent"]}}
    teacher = {"algorithm": {"type": "reinforce", "distillation": {"model": str(tmp_path)}}}
    seen = {"place": "gpu", "name": "teacher", "size_bytes": 4 * 8_190_735_360, "certain": True}
    assert seen in check(tmp_path, {**agent, **teacher})[1]["memory"]
    teacher = {"algorithm": {"type": "reinforce", "distillation": {"run": "run-1", "version": 3}}}
    unseen = {"place": "gpu", "name": "teacher", "size_bytes": 0, "certain": False}
    assert unseen in check(tmp_path, {**agent, **teacher})[1]["memory"]
    shown = leyden(tmp_path, "run", "check", str(tmp_path / "run.json"), "--model", str(tmp_path)).stdout
    assert "not counted" in next(line for line in shown.splitlines() if "teacher" in line)


def test_a_check_says_how_an_engine_shares_the_trainers_gpu(tmp_path: Path) -> None:
    agent, shared = {"agent": {"command": ["/bin/agent"]}, "recipe": "lora-1gpu"}, ["--gpu-memory", "80GB", "--shared"]
    argument = "--max-total-tokens 32768"
    assert check(tmp_path, agent, *shared)[1]["engine_arguments"] == argument
    words = ["run", "check", str(tmp_path / "run.json"), "--model", str(tmp_path)]
    line = f'start SGLang beside the trainer with --engine-args "{argument}"'
    assert line in leyden(tmp_path, *words, *shared).stdout
    assert "--engine-args" not in leyden(tmp_path, *words).stdout
    for alone in ([], ["--shared", "--gpus", "0"]):
        assert check(tmp_path, agent, *alone)[1]["engine_arguments"] is None


def test_a_check_names_each_refused_field(tmp_path: Path) -> None:
    status, found = check(tmp_path, {"agent": {"comand": ["x"]}, "training": {"steps": "3"}})
    assert (status, found["memory"]) == (Exit.REFUSED, [])
    assert [one["path"] for one in found["findings"]] == ["agent.command", "agent.comand", "training.steps"]


def test_sizes_are_those_of_gpus_and_of_kubernetes() -> None:
    assert [size_bytes(size) for size in ("80GB", "80G", "1.5 GiB", "128Gi", "512")] == [
        *(80 * 10**9, 80 * 10**9, 3 * 2**29, 2**37, 512)
    ]
