"""What a late turn of a session costs the gateway: turn 100 beside turn 1, each with the same new bytes.

Sessions go on turn by turn as an SDK does it: the whole history in every body, answers echoed. The gateway's CPU time
is read around each turn of all sessions. Afterwards every call must be in Postgres, each prompt must begin with prompt
and sampled tokens of the call before it, and a gateway that remembers nothing must come to the same tokens. Further
sessions end each request with a message that no later one has: no call continues another's tokens, and these are the
same.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.contracts.conversation import turn_json
from leyden.libs.contracts.ids import run_of
from leyden.libs.store.calls import completed_calls
from leyden.libs.store.database import Database
from leyden.libs.store.embedded import EmbeddedPostgres, EmbeddedRedis
from leyden.libs.store.migrate import migrate
from leyden.services.engine.convert import convert
from leyden.services.gateway.prompt.template import ChatModel
from tests import builders
from tests.bench.counting import WORDS, answer
from tests.bench.rows import Goal, Growth, Row
from tests.bench.served import Server, served

TURNS, SESSIONS, AT_ONCE, WARM_UP = 100, 12, 4, 3
SIZES = (1, 4, 16, 64, 100)
KINDS = ((200, False), (2000, False), (1000, True))
"""Bytes of a message, and whether each request ends with a message that no later one has."""


@dataclass(slots=True)
class Session:
    """One rollout's conversation so far."""

    rollout_id: str
    headers: dict[str, str]
    is_reminded: bool = False
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)


def rows(repeats: int) -> list[Row]:
    """CPU of the gateway for turn 100 over turn 1, for each kind of session."""
    with tempfile.TemporaryDirectory(prefix="bench-session-") as folder:
        postgres, redis = EmbeddedPostgres(Path(folder) / "postgres"), EmbeddedRedis(Path(folder) / "redis")
        with contextlib.ExitStack() as stack:
            dsn = postgres.start()
            stack.callback(postgres.stop)
            redis_url = redis.start()
            stack.callback(redis.stop)
            migrate(dsn)
            return asyncio.run(_measure(Path(folder), dsn, redis_url, repeats))


async def _measure(folder: Path, dsn: str, redis_url: str, repeats: int) -> list[Row]:
    model = _model(folder / "model")
    write_keys(folder / "keys.json", {"bench": "s" * 40})
    database = Database(dsn)
    run = await builders.add_run(database)
    found: dict[tuple[int, bool], list[list[float]]] = {kind: [] for kind in KINDS}
    talk = {"COUNTING_MODEL": str(folder / "model"), "COUNTING_WEIGHT_VERSION": f"{run.id}:0"}
    with served(folder, "tests.bench.counting", talk) as engine:
        environment = {
            "GATEWAY_MODEL_PATH": str(folder / "model"),
            "GATEWAY_ENGINE_URLS": json.dumps([engine.url]),
            "LEYDEN_DATABASE_URL": dsn,
            "LEYDEN_REDIS_URL": redis_url,
            "LEYDEN_CAPABILITY_KEYS_FILE": str(folder / "keys.json"),
        }
        with (
            served(folder, "leyden.services.gateway", environment) as gateway,
            served(folder, "leyden.services.gateway", environment) as forgetful,
        ):
            async with aiohttp.ClientSession() as http:
                for repeat in range(-1, repeats):
                    for number, (size, is_reminded) in enumerate(KINDS):
                        group = (repeat + 1) * len(KINDS) + number
                        sessions = await _sessions(database, run, group, folder, is_reminded)
                        for session in sessions:
                            # The first look at an attempt reads the store: no part of a turn.
                            async with http.get(
                                _address(gateway, session, "models"), headers=session.headers
                            ) as response:
                                assert response.status == 200
                        turns = WARM_UP if repeat < 0 else TURNS
                        costs = [await _turn(http, gateway, sessions, size, turn) for turn in range(turns)]
                        if repeat >= 0:
                            found[size, is_reminded].append(costs)
                            await _check(database, sessions, http, forgetful, model)
    await database.close()
    return [_row(*kind, found[kind]) for kind in KINDS]


def _row(size: int, is_reminded: bool, repeats: list[list[float]]) -> Row:
    medians = [statistics.median(repeat[turn - 1] for repeat in repeats) for turn in SIZES]
    return Row(
        part="session",
        name=f"turn {TURNS} of a session, messages of {size} bytes" + ", the last never kept" * is_reminded,
        unit="ms gateway CPU",
        repeats=[repeat[-1] for repeat in repeats],
        baseline_name="turn 1",
        baseline=[repeat[0] for repeat in repeats],
        goal=Goal(at_most=1.5, of="ratio"),
        growth=Growth("turns before", "ms CPU a turn", SIZES, medians),
        note=f"{SESSIONS} sessions, {AT_ONCE} calls at once; every record counted, "
        + "every prompt begins with all tokens before it, " * (not is_reminded)
        + "and a gateway without memory comes to the same tokens.",
    )


def _model(folder: Path) -> ChatModel:
    """SmolLM2's tokenizer and template with room for any session; no weights are needed."""
    folder.mkdir()
    source = convert()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(source / name, folder)
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 2**20}
    (folder / "config.json").write_text(json.dumps(config))
    return ChatModel(folder)


async def _sessions(database: Database, run: Any, group: int, folder: Path, is_reminded: bool = False) -> list[Session]:
    _, rollouts = await builders.add_group(database, run, group, size=SESSIONS)
    ring = KeyRing(folder / "keys.json")
    sessions = []
    for rollout in rollouts:
        await builders.add_attempt(database, rollout)
        capability = Capability(
            run_id=run.id,
            rollout_id=rollout.id,
            attempt=1,
            scopes=frozenset({Scope.MODEL}),
            expires_at=int(time.time()) + 3600,
        )
        headers = {"authorization": f"Bearer {sign(ring, capability)}", "content-type": "application/json"}
        sessions.append(Session(rollout.id, headers, is_reminded))
    return sessions


async def _turn(
    http: aiohttp.ClientSession, gateway: Server, sessions: Sequence[Session], size: int, turn: int
) -> float:
    """One turn of every session; milliseconds of the gateway's CPU for each."""
    for session in sessions:
        start = f"{session.rollout_id} asks in turn {turn}: "
        session.messages.append({"role": "user", "content": (start + WORDS * (size // len(WORDS) + 1))[:size]})
    bodies = [_body(session) for session in sessions]
    before = _cpu_seconds(gateway)
    left = iter(list(zip(sessions, bodies, strict=True)))

    async def client() -> None:
        for session, body in left:
            completion = await _ask(http, gateway, session, body)
            session.answers.append(completion["id"].removeprefix("chatcmpl-"))
            session.messages.append({"role": "assistant", "content": completion["choices"][0]["message"]["content"]})

    await asyncio.gather(*(client() for _ in range(AT_ONCE)))
    return (_cpu_seconds(gateway) - before) * 1000 / len(sessions)


def _asked(session: Session, end: int) -> list[dict[str, str]]:
    """The messages of the request with the first `end` that are kept."""
    reminder = {"role": "user", "content": f"Step {end // 2 + 1} of {TURNS}."}
    return session.messages[:end] + ([reminder] if session.is_reminded else [])


def _body(session: Session) -> bytes:
    # As OpenAI's client spells it.
    document = {"messages": _asked(session, len(session.messages)), "model": "policy", "temperature": 0.8}
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _address(gateway: Server, session: Session, path: str) -> str:
    return f"{gateway.url}/r/{session.rollout_id}/1/v1/{path}"


async def _ask(http: aiohttp.ClientSession, gateway: Server, session: Session, body: bytes) -> dict[str, Any]:
    async with http.post(
        _address(gateway, session, "chat/completions"), data=body, headers=session.headers
    ) as response:
        text = await response.read()
        assert response.status == 200, text
    found: dict[str, Any] = orjson.loads(text)
    return found


async def _check(
    database: Database, sessions: Sequence[Session], http: aiohttp.ClientSession, forgetful: Server, model: ChatModel
) -> None:
    """Raises: AssertionError: a call is not recorded, or its prompt is not what it must be"""
    for session in sessions:
        stored = await _stored(database, session)
        assert [row["id"] for row in stored] == session.answers
        for before, after in pairwise([] if session.is_reminded else stored):
            start = np.concatenate([before["prompt"], before["sampled"]])
            assert np.array_equal(after["prompt"][: len(start)], start)
        for row, said in zip(stored, session.messages[1::2], strict=True):
            assert row["sampled"].tolist() == answer(model, len(row["prompt"]))
            assert row["answer"] == said["content"]
        assert [row["messages"] for row in stored] == [_asked(session, end) for end in range(1, 2 * len(stored), 2)]
    await _check_memoryless(database, sessions[0], http, forgetful)


async def _check_memoryless(
    database: Database, session: Session, http: aiohttp.ClientSession, forgetful: Server
) -> None:
    asked = Session(session.rollout_id, session.headers, session.is_reminded, session.messages[:-1])
    again = await _ask(http, forgetful, asked, _body(asked))
    rows = {row["id"]: row for row in await _stored(database, session)}
    assert np.array_equal(rows[again["id"].removeprefix("chatcmpl-")]["prompt"], rows[session.answers[-1]]["prompt"])


async def _stored(database: Database, session: Session) -> list[dict[str, Any]]:
    async with database.read() as reading:
        found = await completed_calls(reading, run_of(session.rollout_id), session.rollout_id, 1, except_ids=())
    return [
        {
            "id": row.id,
            "messages": [turn_json(turn) for turn in full.turns],
            "prompt": np.frombuffer(full.prompt_ids, "<i4"),
            "sampled": np.frombuffer(row.sampled_ids, "<i4"),
            "answer": (row.answer or {})["content"],
        }
        for row, full in found
    ]


def _cpu_seconds(server: Server) -> float:
    """CPU time of all threads; finer than the ticks of /proc/PID/stat."""
    tasks = Path(f"/proc/{server.process.pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
