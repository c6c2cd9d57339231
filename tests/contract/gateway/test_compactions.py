"""`POST /v1/responses/compact` with OpenAI's client: the model's own summary, recorded, and read by later requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai.types.responses import CompactedResponse

from leyden.services.gateway.dialects.responses.compaction import ASK
from leyden.services.gateway.dialects.responses.items import SUMMARY, SUMMARY_TURN
from tests.contract.gateway.test_turns import ids
from tests.fakes.chat_model import CHATML_WITH_TOOLS
from tests.fakes.gateway import scene

CALL = {"type": "function_call", "call_id": "w1", "name": "weather", "arguments": "{}"}
HISTORY: Any = [
    {"role": "user", "content": "Weather in Paris?"},
    CALL,
    {"type": "function_call_output", "call_id": "w1", "output": "rain"},
    {"role": "assistant", "content": "It rains."},
    {"role": "user", "content": "And in Rome?"},
]


def summarised(compacted: CompactedResponse) -> tuple[list[str], str]:
    """The texts of the user's messages, and the content of the compaction after them."""
    *messages, last = compacted.output
    assert last.type == "compaction"
    documents = sent_back(messages)
    assert {(one["type"], one["role"]) for one in documents} <= {("message", "user")}
    return [part["text"] for one in documents for part in one["content"]], last.encrypted_content


def sent_back(output: Sequence[Any]) -> list[Any]:
    """The items as an agent sends them back; the client has no type for a user's message among an output."""
    return [item.to_dict(warnings=False) for item in output]


async def test_a_compaction_is_a_recorded_call_and_takes_the_place_of_the_conversation(tmp_path, database):
    async with (
        scene(tmp_path, database, says="Paris: rain.", template=CHATML_WITH_TOOLS) as stage,
        stage.client() as client,
    ):
        compacted = await client.responses.compact(model="m", input=HISTORY, instructions="Be kind.")
        assert compacted.object == "response.compaction"
        assert summarised(compacted) == (["Weather in Paris?", "And in Rome?"], f"{SUMMARY}Paris: rain.")
        context = sent_back(compacted.output)
        again = await client.responses.compact(model="m", input=[*context, {"role": "user", "content": "Why?"}])
        await client.responses.create(model="m", input=[*context, {"role": "user", "content": "Why?"}])
        first, second, third = await stage.calls()
        prompts = [stage.model.tokenizer.decode(ids(call.prompt_ids)) for call in (first, second, third)]
    assert prompts[0].endswith(f"<|im_start|>user\n{ASK}<|im_end|>\n<|im_start|>assistant\n")
    assert "Be kind." in prompts[0] and "rain" in prompts[0]
    # The earlier summary is a message to the model, and no message of the user's.
    assert f"<|im_start|>user\n{SUMMARY_TURN}Paris: rain.<|im_end|>" in prompts[1]
    assert summarised(again)[0] == ["Weather in Paris?", "And in Rome?", "Why?"]
    assert f"{SUMMARY_TURN}Paris: rain." in prompts[2] and ASK not in prompts[2]
    assert [(call.status, call.trainable, call.dialect) for call in (first, second, third)] == [
        ("completed", True, "responses")
    ] * 3
    assert [call.request.get("compaction") for call in (first, second, third)] == [True, True, None]
    assert third.request.get("hosted_items") is None
    assert compacted.usage.input_tokens == first.prompt_tokens


async def test_a_stored_conversation_is_summed_up_and_a_retry_gets_the_same_body(tmp_path, database):
    async with scene(tmp_path, database, says="It rains.") as stage, stage.client() as client:
        stored = await client.responses.create(model="m", input="Weather in Paris?")
        asked: Any = {"model": "m", "previous_response_id": stored.id, "input": "And in Rome?"}
        compacted = await client.responses.compact(**asked)
        retry = await client.responses.compact(**asked, extra_headers={"x-stainless-retry-count": "1"})
        # The same body at the other address is a request of its own.
        await client.responses.create(**asked)
        calls = await stage.calls()
        with pytest.raises(openai.NotFoundError, match="No response with the id 'cmp_"):
            await client.responses.create(model="m", input="?", previous_response_id=compacted.id)
    assert summarised(compacted)[0] == ["Weather in Paris?", "And in Rome?"]
    assert retry.to_dict(warnings=False) == compacted.to_dict(warnings=False)
    assert len(calls) == 3


async def test_a_compaction_of_another_server_is_left_out_with_a_mark(tmp_path, database):
    async with scene(tmp_path, database, says="Fine.") as stage, stage.client() as client:
        item: Any = {"type": "compaction", "encrypted_content": "gAAAAAB"}
        await client.responses.create(model="m", input=[item, {"role": "user", "content": "hi"}])
        [call] = await stage.calls()
    assert [turn["content"] for turn in call.turns] == ["hi"]
    assert call.request["hosted_items"] == ["compaction"]
