"""Exports of stored rollouts through the real API: chains of calls, pages, filters, and files of the command."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from atif import Trajectory
from typer.testing import CliRunner, Result

from leyden.libs.cli.__main__ import app
from leyden.libs.cli.errors import Exit
from leyden.libs.client import Client, Refused
from leyden.libs.client.client import CALL_PAGE
from leyden.libs.contracts.ids import evaluation_id
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.fakes.served_api import TOKEN
from tests.support import builders

LONG = CALL_PAGE + 5
"""Calls of the long conversation: more than a page has."""
TOOLS = [{"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}]
ROLES = {
    "roles": [{"name": "writer", "agent_name": "writer", "policy": "second"}, {"name": "checker"}],
    "policies": {"second": {"pool": "second"}},
}


async def add_rollouts(dsn: str) -> str:
    """A group whose best rollout counts long and whose worst says one word, one without a reward, one of an evaluation,
    and one that has not ended."""
    database = Database(dsn)
    try:
        run = await builders.add_run(database, config=builders.run_document(**ROLES))
        _, [best, worst, unrated, _] = await builders.add_group(database, run, size=4)
        evaluation = await add_evaluation(database, run)
        _, [evaluated] = await builders.add_group(database, run, size=1, evaluation_id=evaluation)
        await add_count(database, best)
        for rollout in (worst, unrated, evaluated):
            await builders.add_call(database, rollout, turns=[said(0)], answer=answered("No."), role="writer")
        await builders.add_call(database, worst, answer=answered("Fine."), role="checker")
        for rollout, reward in ((best, 1.0), (worst, 0.0), (unrated, None), (evaluated, 0.5)):
            await builders.finish_rollout(database, rollout, reward=reward)
        return run.id
    finally:
        await database.close()


async def add_evaluation(database: Database, run: tables.Run) -> str:
    evaluation = evaluation_id(run.id, 1)
    columns = {"dataset_id": run.dataset_id, "policy_version": 0, "rollouts_per_task": 1, "max_tasks": None}
    async with database.session() as session:
        session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=1, **columns))
    return evaluation


def said(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"question {number}"}


def answered(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


async def add_count(database: Database, rollout: tables.Rollout) -> None:
    """Calls of which each continues the one before it."""
    parent: tables.ModelCall | None = None
    for number in range(LONG):
        shared = {} if parent is None else {"parent_call_id": parent.id, "shared_turns": 2 * number}
        tools = {"tools": TOOLS} if parent is None else {}
        columns = {"turns": [said(number)], "answer": answered(f"answer {number}"), "role": "writer"}
        parent = await builders.add_call(database, rollout, **columns, **shared, **tools)


@pytest.fixture
def run_id(postgres_dsn: str) -> str:
    return asyncio.run(add_rollouts(postgres_dsn))


def leyden(api_url: str, home: Path, *words: str) -> Result:
    return CliRunner().invoke(app, ["--home", str(home), "--url", api_url, "--token", TOKEN, *words])


def test_a_long_conversation_is_one_row_over_pages_of_calls(api_url: str, run_id: str) -> None:
    with Client(api_url, TOKEN) as client:
        [row] = client.export(run_id, "openai", reward_min=1.0)
        [document] = client.export(run_id, "atif", reward_min=1.0)
    expected = [text for number in range(LONG) for text in (f"question {number}", f"answer {number}")]
    assert [message["content"] for message in row["messages"]] == expected
    assert row["tools"] == TOOLS
    assert sum("metrics" in step for step in document["steps"]) == LONG
    assert len(Trajectory.model_validate(document).steps) == 2 * LONG


def test_filters_are_those_of_lists(api_url: str, run_id: str) -> None:
    with Client(api_url, TOKEN) as client:
        rewards = {
            name: [row["reward"] for row in client.export(run_id, "trl", **options)]
            for name, options in {
                "all": {"evaluation": "all"},
                "training": {},
                "best": {"max_per_task": 1},
                "rated": {"reward_max": 0.9},
                "checker": {"role": "checker"},
                "policy": {"policy": "second"},
            }.items()
        }
        with pytest.raises(Refused, match="choose one of `roles`"):
            client.export(run_id, "trl", policy="third")
    assert rewards == {
        "all": [1.0, 0.0, 0.0, None, 0.5],
        "training": [1.0, 0.0, 0.0, None],
        "best": [1.0],
        "rated": [0.0, 0.0],
        "checker": [0.0],
        "policy": [1.0, 0.0, None],
    }


def test_the_command_writes_a_file_and_tells_what_it_left_out(api_url: str, run_id: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("old")
    of_all = ("--as", "pairs", "--evaluation", "all")
    result = leyden(api_url, tmp_path, "rollout", "export", run_id, *of_all, "--to", str(file))
    assert result.exit_code == Exit.DONE, result.output
    [row] = map(json.loads, file.read_text().splitlines())
    assert (row["prompt"], row["rejected"]) == ([said(0)], [answered("No.")])
    assert (len(row["chosen"]), row["chosen_reward"], row["rejected_reward"]) == (2 * LONG - 1, 1.0, 0.0)
    assert "left out: 1 rollouts without a reward" in result.stderr
    assert "left out: 1 groups without two rollouts whose rewards differ" in result.stderr
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["pairs.jsonl"]


def test_a_failed_export_leaves_the_file_as_it_was(api_url: str, run_id: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("old")
    result = leyden(
        api_url, tmp_path, "rollout", "export", run_id, "--as", "trl", "--policy", "third", "--to", str(file)
    )
    assert result.exit_code == Exit.REFUSED
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir() if path.is_file()] == [("rows.jsonl", "old")]


def test_rows_are_printed_alone_and_nothing_is_told_with_a_remedy(api_url: str, run_id: str, tmp_path: Path) -> None:
    result = leyden(api_url, tmp_path, "rollout", "export", run_id, "--as", "trl", "--reward-min", "1", "--to", "-")
    assert [json.loads(line)["reward"] for line in result.stdout.splitlines()] == [1.0]
    result = leyden(api_url, tmp_path, "rollout", "export", run_id, "--as", "trl", "--reward-min", "2", "--to", "-")
    assert (result.exit_code, result.stdout) == (Exit.DONE, "")
    assert "`leyden rollout list` shows all" in result.stderr


def test_parquet_is_written_into_a_file_and_not_printed(api_url: str, run_id: str, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pip install 'leyden[parquet]'")
    file = tmp_path / "rows.parquet"
    arguments = ("rollout", "export", run_id, "--as", "parquet", "--to")
    result = leyden(api_url, tmp_path, *arguments, str(file))
    assert result.exit_code == Exit.DONE, result.output
    rows = parquet.read_table(file).to_pylist()
    assert [[one["content"] for one in row["messages"]] for row in rows[:LONG]] == [
        [said(n)["content"]] for n in range(LONG)
    ]
    assert [row["continues"] for row in rows[1:LONG]] == [row["call_id"] for row in rows[: LONG - 1]]
    assert f"{len(rows)} rows" in result.stderr
    assert leyden(api_url, tmp_path, *arguments, "-").exit_code == Exit.USAGE


def test_a_place_without_a_folder_is_refused(api_url: str, run_id: str, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none" / "rows.jsonl"):
        result = leyden(api_url, tmp_path, "rollout", "export", run_id, "--as", "trl", "--to", str(place))
        assert result.exit_code == Exit.USAGE
        assert "make the folder, or name a file" in " ".join(result.stderr.split())
