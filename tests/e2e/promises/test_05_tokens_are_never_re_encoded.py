"""Tokens are never re-encoded between sampling and the loss: the loss sees the tokens that the engine sampled.

An agent on the official SDK holds conversations whose answers no tokenizer would give back: characters cut in the
middle, words in other pieces than an encoder's, marks of the template inside the content. The engine's own log of what
it sampled is compared with the record, the sample, and the rows that the trainer computes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from sqlalchemy import select

from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.services.credit.worker import credit_pending
from leyden.services.trainer.rows.batch import Sample, decode_sample, trained_tokens
from leyden.services.trainer.rows.tree import plan_forest
from tests.fakes.chat_model import CHATML, CHATML_WITH_TOOLS, EOS, HE
from tests.fakes.gateway import Scene, scene
from tests.fakes.scripted_engine import logprob_of
from tests.support import builders

SPECIALS = (257, 258)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def odd_answers(model: Any, seed: int) -> list[list[int]]:
    """Five answers of an engine: the last two random, any byte after any other."""
    dice = random.Random(seed)

    def encode(text: str) -> list[int]:
        ids: list[int] = model.tokenizer.encode(text).tolist()
        return ids

    letters = [encode(letter)[0] for letter in "he"]
    euro = encode("€")
    return [
        # `he` as two tokens and as one, half of a character, a mark of the template in the middle.
        [*letters, HE, *euro[:2], SPECIALS[1], *encode("user"), EOS],
        # Nothing but the end of the turn.
        [EOS],
        # Cut off by the length: no end of turn; white space around, which agents strip.
        [*encode("  "), *letters, *euro, *encode(" \n"), *euro[:1]],
        *[[dice.choice([*range(257), *SPECIALS]) for _ in range(dice.randrange(1, 40))] + [EOS] for _ in range(2)],
    ]


class Engine:
    """Says the answers in turn and keeps the log: what it was asked after, and what it sampled."""

    def __init__(self, answers: Sequence[list[int]]) -> None:
        self.answers = list(answers)
        self.log: list[tuple[list[int], list[int]]] = []

    def __call__(self, body: dict[str, Any]) -> list[int]:
        sampled = self.answers[len(self.log)]
        self.log.append((list(body["input_ids"]), sampled))
        return sampled


async def converse(client: AsyncOpenAI, turns: Sequence[int], messages: list[Any], lengths: Sequence[int]) -> None:
    """An agent's loop: every answer goes into the next question, whole ones and streams alternately."""
    for turn in turns:
        messages.append({"role": "user", "content": f"turn {turn}: he said €"})
        asked = {"model": "any", "messages": messages, "temperature": 1.0, "max_tokens": lengths[turn], "tools": [TOOL]}
        if turn % 2:
            async with await client.chat.completions.create(stream=True, **asked) as stream:
                text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
            messages.append({"role": "assistant", "content": text})
        else:
            answer = await client.chat.completions.create(**asked)
            messages.append(answer.choices[0].message.model_dump(exclude_none=True))


async def trained(found: Scene, group: tables.Group, rollout: tables.Rollout, other: tables.Rollout) -> list[Sample]:
    """The trainer's samples of the rollout, after its group was credited."""
    database = found.database
    await builders.settle_rollout(database, rollout)
    await builders.add_call(database, other, [1, 2], [3, 4], policy_version=0, temperature=1.0)
    await builders.finish_rollout(database, other, reward=0.0)
    async with database.session() as session:
        (await session.get_one(tables.Group, group.id)).state = "complete"
    assert await credit_pending(database, 8) == [group.id]
    async with database.read() as session:
        query = select(tables.Sample).where(tables.Sample.rollout_id == rollout.id).order_by(tables.Sample.branch)
        return [decode_sample(row) for row in await session.scalars(query)]


def rows_of_the_loss(samples: Sequence[Sample]) -> list[list[int]]:
    """The token ids of each row as they go through the model: prefixes, then the nodes of a pack."""
    forest = plan_forest([sample.token_ids for sample in samples], 100)
    rows: dict[int, list[int]] = {}
    for pack in forest.packs:
        for row, nodes in zip(pack.rows, pack.nodes, strict=True):
            prefixes = [token for number in pack.path for token in forest.prefixes[number].token_ids_M.tolist()]
            rows[row] = [*prefixes, *pack.token_ids_M[nodes].tolist()]
    return [rows[index] for index in range(len(samples))]


@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TOOLS], ids=["plain", "with tools"])
@pytest.mark.parametrize("seed", range(4))
async def test_what_the_engine_sampled_is_what_the_loss_sees(
    database: Database, tmp_path: Path, template: str, seed: int
) -> None:
    engine = Engine([])
    async with scene(tmp_path, database, says=engine, template=template) as found, found.another_gateway() as other:
        engine.answers = odd_answers(found.model, seed)
        lengths = [len(answer) for answer in engine.answers]
        async with database.read() as session:
            run = await session.get_one(tables.Run, found.run_id)
        group, [rollout, sibling] = await builders.add_group(database, run, 1)
        await builders.add_attempt(database, rollout)
        messages: list[Any] = []
        async with found.gateway.client(rollout.id) as client:
            await converse(client, range(3), messages, lengths)
        # Another gateway has never seen the conversation: it goes on from the store.
        async with other.client(rollout.id) as client:
            await converse(client, range(3, 5), messages, lengths)

        asked, said = [log[0] for log in engine.log], [log[1] for log in engine.log]
        calls = [call for call in await found.calls() if call.rollout_id == rollout.id]
        assert [np.frombuffer(call.prompt_ids, "<i4").tolist() for call in calls] == asked
        assert [np.frombuffer(call.sampled_ids, "<i4").tolist() for call in calls] == said
        for index in range(1, len(asked)):
            before = asked[index - 1] + said[index - 1]
            assert asked[index][: len(before)] == before

        [sample] = await trained(found, group, rollout, sibling)
        assert sample.token_ids.tolist() == asked[-1] + said[-1]
        tokens = trained_tokens([sample])
        assert tokens.token_ids_K.tolist() == [token for answer in said for token in answer]
        places = [len(prompt) + place for prompt, answer in engine.log for place in range(len(answer))]
        assert tokens.positions_K.tolist() == places
        assert tokens.generator_logprobs_K.tolist() == [logprob_of(i) for answer in said for i in range(len(answer))]
        assert rows_of_the_loss([sample]) == [asked[-1] + said[-1]]
