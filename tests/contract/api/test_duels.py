"""Duels of evaluations: stored pairs and their win rates."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from tests.support import builders

JUDGE = {"name": "better", "grader": {"type": "relative_model", "provider": "judge", "model": "m", "rubric": "Why?"}}
REWARD = {"components": [JUDGE]}


async def evaluated(database: Database) -> tuple[tables.Run, dict[str, list[str]]]:
    """A run with the evaluations of versions 0 and 2, of two tasks with a rollout each, by evaluation."""
    run = await builders.add_run(database)
    rollouts = dict[str, list[str]]()
    for number, version in ((1, 0), (2, 2)):
        evaluation = f"{run.id}.e{number}"
        columns: dict[str, Any] = {"dataset_id": run.dataset_id, "rollouts_per_task": 1}
        async with database.session() as session:
            session.add(tables.Evaluation(id=evaluation, run_id=run.id, number=number, **columns))
        rollouts[evaluation] = []
        for task in range(2):
            made: dict[str, Any] = {"size": 1, "evaluation_id": evaluation, "admitted_version": version}
            _, [rollout] = await builders.add_group(database, run, task, task_number=task, **made)
            await builders.finish_rollout(database, rollout)
            rollouts[evaluation].append(rollout.id)
    return run, rollouts


def request_of(rollouts: dict[str, list[str]], *values: float | None) -> dict[str, Any]:
    old, new = rollouts
    pairs = [
        {"rollout": mine, "against": rival, "values": {"better": value}}
        for mine, rival, value in zip(rollouts[new], rollouts[old], values, strict=True)
    ]
    return {"evaluation": new, "against": old, "reward": REWARD, "pairs": pairs}


async def test_a_stored_duel_has_its_win_rate(api_http: httpx.AsyncClient, database: Database) -> None:
    run, rollouts = await evaluated(database)
    path = f"/v1/runs/{run.id}/duels"
    body, key = request_of(rollouts, 1.0, 0.5), {"idempotency-key": "one"}
    for _ in range(2):
        answer = await api_http.post(path, json=body, headers=key)
        assert answer.status_code == 201, answer.text
    made = answer.json()
    assert (made["version"], made["against_version"], made["against_run_id"]) == (2, 0, run.id)
    [rate] = made["rates"]
    assert {name: rate[name] for name in ("wins", "ties", "losses", "lost")} == {
        "wins": 1,
        "ties": 1,
        "losses": 0,
        "lost": 0,
    }
    assert (rate["rate"]["mean"], rate["rate"]["high"]) == (0.75, 1.0)
    nothing = await api_http.post(path, json=request_of(rollouts, None, None))
    [unknown] = nothing.json()["rates"]
    assert (unknown["rate"], unknown["lost"]) == (None, 2)
    assert (await api_http.get(path)).json()["items"] == [nothing.json(), made]
    page = (await api_http.get(path, params={"limit": 1})).json()
    assert (await api_http.get(path, params={"cursor": page["next_cursor"]})).json()["items"] == [made]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"rollout": "nowhere"}, "pairs.1.rollout: it is none of evaluation"),
    ({"against": "nowhere"}, "pairs.1.against: it is none of evaluation"),
    ({"against": "first"}, "pairs.1: the rollouts have different tasks"),
    ({"values": {"other": 1}}, "pairs.1.values: write one of each component of `reward`: better"),
    ({"values": {"better": 2}}, "pairs.1.values.better"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED, ids=[words for _, words in REFUSED])
async def test_a_pair_that_is_none_is_refused(
    api_http: httpx.AsyncClient, database: Database, changes: dict[str, Any], words: str
) -> None:
    run, rollouts = await evaluated(database)
    body = request_of(rollouts, 1.0, 0.5)
    body["pairs"][1] |= changes | ({"against": body["pairs"][0]["against"]} if "first" in changes.values() else {})
    answer = await api_http.post(f"/v1/runs/{run.id}/duels", json=body)
    assert answer.status_code == 422
    assert words in answer.json()["detail"]
    assert (await api_http.get(f"/v1/runs/{run.id}/duels")).json()["items"] == []


async def test_a_pair_counts_once(api_http: httpx.AsyncClient, database: Database) -> None:
    run, rollouts = await evaluated(database)
    body = request_of(rollouts, 1.0, 0.5)
    body["pairs"].append(body["pairs"][0])
    answer = await api_http.post(f"/v1/runs/{run.id}/duels", json=body)
    assert answer.status_code == 422
    assert "pairs.2: it is there already, and would count twice" in answer.json()["detail"]


async def test_only_judges_that_compare_have_duels(api_http: httpx.AsyncClient, database: Database) -> None:
    run, rollouts = await evaluated(database)
    body = request_of(rollouts, 1.0, 0.5)
    body["reward"] = {"components": [{"name": "better", "grader": {"type": "length", "at_most": 8}}]}
    answer = await api_http.post(f"/v1/runs/{run.id}/duels", json=body)
    assert (answer.status_code, answer.json()["detail"]) == (
        422,
        "reward.components.0.grader: a duel has components with relative_model alone",
    )
