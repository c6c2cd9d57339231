"""A stream has all text of a call in order, with comments while no tokens arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leyden.libs.store.records.deliveries import NewDelivery
from leyden.services.gateway.calls.context import Completion, Prompt, SampledTokens
from leyden.services.gateway.calls.retries import InFlightCall
from leyden.services.gateway.calls.streaming import follow
from leyden.services.gateway.dialects.chat_completions import ChatCompletionChunks, ChatCompletions
from leyden.services.gateway.errors import GatewayError, Unavailable
from leyden.services.gateway.prompt.answer import finish_answer
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.records.deliveries import Delivery
from tests.fakes.chat_model import EOS, make_chat_model

LONG = 60.0
BODY = b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "?"}]}'
KEEPALIVE = ChatCompletionChunks.keepalive


async def sent() -> None:
    """The client is still connected."""


class Growing:
    """A call whose tokens come when the test says so."""

    def __init__(self, model: ChatModel) -> None:
        self.model = model
        self.request = ChatCompletions().parse(BODY, max_choices=1)
        self.sampled = SampledTokens("c1", 0, None)
        self.end: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        prompt_ids = model.tokenizer.encode("<|im_start|>assistant\n")
        self.prompt = Prompt(prompt_ids, parent_call_id=None, shared_turns=0, shared_tokens=0, is_fork=False)
        context = SimpleNamespace(request=self.request, prompt=self.prompt, request_id="c1", sequence=0)
        delivery = Delivery(NewDelivery("run", "c1", "run.0.0", 1, "", 0, b""), 0.0)
        self.call = InFlightCall(cast(Any, context), [self.sampled], cast(Any, None), delivery)
        self.call.task = asyncio.create_task(self._answer())

    async def _answer(self) -> Completion:
        try:
            return await self.end
        finally:
            asyncio.get_running_loop().call_soon(self.call.progressed)

    def say(self, text: str) -> None:
        self.sampled.ids += self.model.tokenizer.encode(text).tolist()
        self.sampled.logprobs += [0.0] * (len(self.sampled.ids) - len(self.sampled.logprobs))
        self.call.progressed()

    async def tick(self, seconds: float) -> None:
        """Says something again and again."""
        while True:
            self.say(".")
            await asyncio.sleep(seconds)

    def finish(self) -> None:
        self.sampled.ids.append(EOS)
        self.sampled.finish = "stop"
        answer = finish_answer(self.model, self.request, self.prompt, self.sampled)
        self.end.set_result(Completion("c1", "m", 0, None, (answer,), 1, len(self.sampled.ids), 0))

    def events(self, seconds: float = LONG) -> AsyncIterator[bytes]:
        writer = ChatCompletions().stream(self.request, "c1", 0, 1)
        return follow(writer, self.model, self.call, sent, keepalive_after_seconds=seconds, keepalive_seconds=seconds)


@pytest.fixture
async def growing(tmp_path) -> AsyncIterator[Growing]:
    one = Growing(ChatModel(make_chat_model(tmp_path / "m")))
    yield one
    assert one.call.task is not None
    one.call.task.cancel()
    await asyncio.wait({one.call.task})


async def test_text_is_streamed_as_it_is_sampled_and_the_end_after_the_record(growing):
    events = growing.events()
    growing.say("Hel")
    assert b'"role":"assistant","content":"Hel"' in await anext(events)
    growing.say("lo")
    assert b'"delta":{"content":"lo"}' in await anext(events)
    growing.finish()
    rest = b"".join([event async for event in events])
    assert b'"finish_reason":"stop"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_tokens_for_a_slow_client_are_sent_together(growing):
    events = growing.events()
    growing.say("a")
    assert b'"content":"a"' in await anext(events)
    growing.say("b")
    growing.say("c")
    assert b'"content":"bc"' in await anext(events)


async def test_a_pause_is_filled_before_the_first_text_and_after_it(growing):
    events = growing.events(0.02)
    assert await anext(events) == KEEPALIVE
    growing.say("a")
    got = [await anext(events)]
    while got[-1] == KEEPALIVE:
        got.append(await anext(events))
    assert b'"content":"a"' in got[-1]
    assert await anext(events) == KEEPALIVE


async def test_tokens_that_stay_hidden_put_no_comment_off(growing):
    growing.request = ChatCompletions().parse(BODY[:-1] + b', "stop": ["\\n\\nObservation"]}', max_choices=1)
    growing.call.context.request = growing.request
    growing.say("\n\nObservation")
    ticks = asyncio.create_task(growing.tick(0.01))
    async with asyncio.timeout(LONG):
        assert await anext(growing.events(0.1)) == KEEPALIVE
    ticks.cancel()


@pytest.mark.parametrize("has_text", [False, True])
async def test_an_error_keeps_its_status_until_the_first_event_and_is_an_event_after_it(growing, has_text):
    events = growing.events()
    if has_text:
        growing.say("a")
        await anext(events)
    growing.end.set_exception(Unavailable("No engine.", code="engine_unavailable"))
    if has_text:
        assert b'{"error":{"message":"No engine."' in await anext(events)
        # The connection breaks, since some clients ignore the event.
        with pytest.raises(GatewayError, match="No engine"):
            await anext(events)
    else:
        with pytest.raises(GatewayError, match="No engine"):
            await anext(events)


async def test_a_disconnected_client_cancels_the_call(growing):
    events = growing.events()
    growing.say("a")
    await anext(events)
    await cast(Any, events).aclose()
    assert growing.call.task is not None
    await asyncio.wait({growing.call.task}, timeout=LONG)
    assert growing.call.task.cancelled()
