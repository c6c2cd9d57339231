"""Every prompt is the same, token for token, as the gateway made it when the sessions were recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import cache

import pytest

from leyden.libs.store.database import Database
from tests.contract.gateway.recorded_models import FAMILIES
from tests.contract.gateway.recorded_sessions import (
    SESSIONS,
    RecordedSession,
    Stage,
    as_recorded,
    read_recording,
    staged,
)
from tests.support.long import long_only

FEW = ("gpt_oss", "qwen3", "smollm")
"""Families of `make test`: channels, a template that drops reasoning, and a plain one."""
AROUND = 8
"""Tokens before and after the first difference that a failure shows."""

recording = cache(read_recording)


@pytest.fixture(scope="module")
async def stages(postgres_server, tmp_path_factory) -> AsyncIterator[Callable]:
    """The stage of a family; its gateway serves the sessions one after the other."""
    dsn = postgres_server.create()
    database, opened = Database(dsn), dict[str, Stage]()
    async with AsyncExitStack() as stack:
        stack.callback(postgres_server.drop, dsn)
        stack.push_async_callback(database.close)

        async def stage_of(family: str) -> Stage:
            if family not in opened:
                folder = tmp_path_factory.mktemp(family)
                opened[family] = await stack.enter_async_context(staged(folder, database, FAMILIES[family]))
            return opened[family]

        yield stage_of


@pytest.mark.parametrize("session", SESSIONS)
@pytest.mark.parametrize("family", [one if one in FEW else pytest.param(one, marks=long_only) for one in FAMILIES])
async def test_a_session_has_the_recorded_tokens(stages, family, session):
    stage = await stages(family)
    played = as_recorded(*await stage.play(SESSIONS[session]))
    difference = first_difference(recording()[family][session], played, stage.speller.tokenizer.decode)
    assert difference is None, f"{family}, {session}: {difference}"


def test_all_that_is_recorded_is_played():
    recorded = {family: list(sessions) for family, sessions in recording().items()}
    assert recorded == {family: list(SESSIONS) for family in FAMILIES}


def test_a_difference_names_the_call_and_shows_the_text_around_it():
    def session(sampled: list[int]) -> RecordedSession:
        return as_recorded([200], [([1, 2], [3]), ([1, 2, 3, 4], sampled)])

    def decode(ids: list[int], **_: object) -> str:
        return "".join(map(str, ids))

    assert first_difference(session([7, 8, 9]), session([7, 8, 9]), decode) is None
    shown = first_difference(session([7, 8, 9]), session([7, 5]), decode)
    assert shown == (
        "call 1: sampled differs at position 1 of 3 (recorded) and 2 (played)\n"
        "  recorded: '7' | '89' [8, 9]\n  played:   '7' | '5' [5]"
    )


def first_difference(recorded: RecordedSession, played: RecordedSession, decode: Callable) -> str | None:
    """Where two sessions differ first; None where they do not."""
    for number, (before, now) in enumerate(zip(recorded["calls"], played["calls"], strict=False)):
        for name, ids, others in (
            ("prompt", before["prompt"], now["prompt"]),
            ("sampled", before["sampled"], now["sampled"]),
        ):
            if ids != others:
                return f"call {number}: {name} {_difference(ids, others, decode)}"
        if before["parent"] != now["parent"]:
            return f"call {number}: continues call {now['parent']} instead of {before['parent']}"
    for name in ("statuses", "calls"):
        if len(recorded[name]) != len(played[name]):
            return f"{len(recorded[name])} {name} were recorded, {len(played[name])} played"
    if recorded["statuses"] != played["statuses"]:
        return f"statuses were {recorded['statuses']}, now {played['statuses']}"
    return None


def _difference(recorded: list[int], played: list[int], decode: Callable) -> str:
    pairs = zip(recorded, played, strict=False)
    place = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(recorded), len(played)))

    def shown(ids: list[int]) -> str:
        before, after = ids[max(0, place - AROUND) : place], ids[place : place + AROUND]
        texts = [decode(part, skip_special_tokens=False) for part in (before, after)]
        return f"{texts[0]!r} | {texts[1]!r} {after}"

    return (
        f"differs at position {place} of {len(recorded)} (recorded) and {len(played)} (played)\n"
        f"  recorded: {shown(recorded)}\n  played:   {shown(played)}"
    )
