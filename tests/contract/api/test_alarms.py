"""The list of the alarms of all runs: its order, filters and pages, by API, client and command."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from leyden.libs.cli.__main__ import app
from leyden.libs.client import Client, NotFound, Refused
from leyden.libs.contracts.alarms import ALARM_RULES
from leyden.libs.contracts.api.alarms import ListedAlarm
from leyden.libs.store import tables
from leyden.libs.store.alarms.stored import runs_by_alarm
from leyden.libs.store.database import Database
from tests.fakes.served_api import TOKEN
from tests.support import builders
from tests.support.alarms import add_alarm

NOW = datetime.now(tz=UTC)


@pytest.fixture
def leyden(api_url: str) -> Iterator[Client]:
    with Client(api_url, TOKEN, patience_seconds=0.0) as client:
        yield client


async def stored(database: Database) -> tuple[tables.Run, tables.Run]:
    """A run that works, with a policy, and one that has ended; each has an alarm of each state that it can have."""
    works, over = [
        await builders.add_run(database, config=builders.run_document(name=name)) for name in ("works", "over")
    ]
    policy = await builders.add_run(
        database, dataset_id=works.dataset_id, id="run-policy", lead_run_id=works.id, policy="checker"
    )
    await add_alarm(database, works.id, "tool_fails", number=1, subject="sql", minutes_ago=50, ended_at=NOW)
    await add_alarm(database, works.id, "tool_fails", number=2, subject="sql", minutes_ago=10)
    await add_alarm(database, policy.id, "kl_high", minutes_ago=20)
    await add_alarm(database, over.id, "no_reward", number=1, minutes_ago=5)
    await add_alarm(database, over.id, "stalled", number=2, minutes_ago=7, ended_at=NOW)
    await builders.end_run(database, over)
    return works, over


def brief(found: list[ListedAlarm]) -> list[tuple[str, str | None, str, str]]:
    return [(one.run_name, one.policy, one.name, one.state) for one in found]


async def test_alarms_of_all_runs_are_listed_active_ones_first(leyden: Client, database: Database) -> None:
    works, over = await stored(database)
    found = await asyncio.to_thread(lambda: list(leyden.alarms()))
    assert brief(found) == [
        ("works", None, "tool_fails", "active"),
        ("works", "checker", "kl_high", "active"),
        ("over", None, "no_reward", "lasted"),
        ("over", None, "stalled", "ended"),
        ("works", None, "tool_fails", "ended"),
    ]
    first, of_policy, lasted, *_ = found
    assert (first.run_id, first.subject, first.ended_at, first.evidence) == (works.id, "sql", None, {"share": 0.75})
    assert (first.reason, first.remedy) == ("tool_fails holds", ALARM_RULES["tool_fails"].remedy)
    assert (of_policy.run_id, lasted.run_id, lasted.ended_at) == (works.id, over.id, None)
    assert lasted.run_finished_at is not None
    # The gauge counts the runs of the active ones.
    async with database.read() as session:
        assert set(await runs_by_alarm(session)) == {("tool_fails", "warning"), ("kl_high", "warning")}


async def test_alarms_are_filtered_by_run_rule_and_state(leyden: Client, database: Database) -> None:
    works, over = await stored(database)

    async def names(run: str | None = None, name: str | None = None, state: str | None = None) -> list[str]:
        found = await asyncio.to_thread(lambda: list(leyden.alarms(run, name=name, state=state)))
        return [one.name for one in found]

    assert await names(works.id) == await names("works") == ["tool_fails", "kl_high", "tool_fails"]
    assert await names(over.id, state="ended") == ["stalled"]
    assert await names(state="lasted") == ["no_reward"]
    assert await names(name="tool_fails", state="active") == ["tool_fails"]
    assert await names(name="grades_wait") == []
    with pytest.raises(NotFound, match="no run has the id or name 'nobody': list runs"):
        await names("nobody")
    with pytest.raises(Refused, match=r"'tool_fail': write one of .*tool_fails"):
        await names(name="tool_fail")
    with pytest.raises(Refused, match="state"):
        await names(state="over")


async def test_pages_of_alarms_follow_each_other_and_the_first_one_counts_by_rule(
    api_http: httpx.AsyncClient, database: Database
) -> None:
    works, _ = await stored(database)
    pages, cursor = list[dict[str, object]](), None
    while len(pages) < 9:
        asked = {"limit": "2", **({"cursor": cursor} if cursor else {})}
        pages.append((await api_http.get("/v1/alarms", params=asked)).json())
        if (cursor := pages[-1]["next_cursor"]) is None:
            break
    whole = (await api_http.get("/v1/alarms")).json()
    assert [one for page in pages for one in page["items"]] == whole["items"]  # type: ignore[attr-defined]
    counts = {"kl_high": 1, "no_reward": 1, "stalled": 1, "tool_fails": 2}
    assert [page["names"] for page in pages] == [counts, None, None]
    active = (await api_http.get("/v1/alarms", params={"state": "active", "name": "kl_high", "limit": "1"})).json()
    assert active["names"] == {"kl_high": 1, "tool_fails": 1}
    other = await api_http.get("/v1/alarms", params={"state": "active", "cursor": str(pages[0]["next_cursor"])})
    assert (other.status_code, other.json()["cause"]) == (400, "cursor")
    of_policy = await api_http.get(f"/v1/runs/{works.id}/alarms", params={"policy": "checker"})
    assert [one["name"] for one in of_policy.json()["items"]] == ["kl_high"]
    of_own = await api_http.get(f"/v1/runs/{works.id}/alarms", params={"state": "ended"})
    assert [one["number"] for one in of_own.json()["items"]] == [1]


async def test_the_command_writes_a_line_for_each_alarm_with_its_run_and_its_end(
    api_url: str, database: Database, tmp_path: Path
) -> None:
    works, over = await stored(database)
    root = ["--home", str(tmp_path / "home"), "--url", api_url, "--token", TOKEN, "alarms"]

    async def lines(*words: str) -> list[str]:
        result = await asyncio.to_thread(CliRunner().invoke, app, [*root, *words])
        assert result.exit_code == 0, result.output
        return result.output.splitlines()

    first, of_policy, lasted, ended, _ = await lines()
    assert first.startswith(f"works ({works.id}): alarm tool_fails, warning since 20")
    assert first.endswith(f": tool_fails holds: {ALARM_RULES['tool_fails'].remedy}") and "until" not in first
    assert of_policy.startswith(f"works ({works.id}, policy checker): alarm kl_high")
    assert lasted.startswith(f"over ({over.id}): alarm no_reward") and " until the run's end at 20" in lasted
    assert ended.startswith(f"over ({over.id}): alarm stalled, critical since 20") and " until 20" in ended
    assert await lines("--run", "over", "--state", "ended", "--name", "stalled") == [ended]
    assert await lines("--name", "grades_wait") == ["No such alarm."]
