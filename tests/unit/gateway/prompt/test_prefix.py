"""A prompt begins with the tokens of the call that it continues, for any sampled tokens and any evictions."""

from __future__ import annotations

import gc
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Collection, Sequence
from random import Random
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.libs.contracts.conversation import Dialect, Tool, ToolCall, Turn, turn_json
from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.records.chains import full_call
from leyden.services.gateway.calls.context import ModelRequest, Sampling
from leyden.services.gateway.prompt.prefix import (
    LONG_CHARACTERS,
    Conversation,
    IndexedPrompt,
    PrefixCache,
    PrefixIndex,
    StoredCall,
    _is_answer_text,
    digest_chain,
)
from leyden.services.gateway.prompt.template import ChatModel
from leyden.services.gateway.prompt.tokenizer import ModelTokenizer
from tests.fakes.chat_model import CHATML, CHATML_FORGETTING, CHATML_WITH_TOOLS, EOS, make_chat_model
from tests.fakes.model_families import FAMILIES
from tests.fakes.templates import DEEPSEEK, LAST_APART, LLAMA, MISTRAL, QWEN3

KEY = AttemptKey("run-a.0.0", 1)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOL = Tool.of({"name": "f"})
# The end of a result depends on the message after it, as in Qwen's template.
LOOKING_AHEAD = (
    "{{ tools }}{% for m in messages %}<|im_start|>{{ m.role }}{{ messages[loop.index0 + 1].role if not loop.last }}"
    "\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A message that stands before an answer begins with a mark, as no other does.
MARKED_BEFORE_ANSWERS = (
    "{% for m in messages %}{% if not loop.last and messages[loop.index0 + 1].role == 'assistant' %}<|im_start|>"
    "{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
COUNTING = "{{ messages | length > 7 }}" + CHATML


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    return ChatModel(make_chat_model(tmp_path_factory.mktemp("model")))


def request(*turns: Turn, tools: Sequence[Tool] = ()) -> ModelRequest:
    return ModelRequest(
        dialect=Dialect.CHAT_COMPLETIONS,
        model="m",
        turns=turns,
        tools=tuple(tools),
        parses_tool_calls=bool(tools),
        parallel_tool_calls=True,
        stream=False,
        include_usage=False,
        choices=1,
        logprobs=False,
        top_logprobs=0,
        sampling=Sampling(),
        template_options={},
        parameters={},
        body_sha256=b"",
    )


class Session:
    """The calls of one attempt, answered and stored, and the index that knows them."""

    def __init__(self, model: ChatModel, *, max_bytes: int = 10**8, key: AttemptKey = KEY) -> None:
        self.model, self.key = model, key
        self.index = PrefixIndex(model, PrefixCache(max_bytes))
        self.stored: list[StoredCall] = []
        self.rows: dict[str, SimpleNamespace] = {}
        self.reads = 0

    async def read(self, known: Collection[str]) -> Sequence[StoredCall]:
        self.reads += 1
        return [call for call in self.stored if call.call_id not in known]

    async def prompt(self, *turns: Turn, tools: Sequence[Tool] = ()) -> IndexedPrompt:
        return await self.index.prompt(self.key, request(*turns, tools=tools), self.read)

    async def ask(
        self, *turns: Turn, says: Turn | str = "ok", sampled: Sequence[int] | None = None, tools: Sequence[Tool] = ()
    ) -> SimpleNamespace:
        """The row of a call that was answered; in full it is the call that was asked."""
        prompt = await self.prompt(*turns, tools=tools)
        said = says if isinstance(says, Turn) else Turn("assistant", says)
        ids = [*self.model.tokenizer.encode(said.content).tolist(), EOS] if sampled is None else list(sampled)
        answer = self.model.split_reasoning(said)
        row = self.add(prompt, answer, ids)
        self.index.remember(self.key, row.id, prompt, answer, ids)
        full = full_call(self.rows, row)
        assert (full.turns, full.tools, full.prompt_ids) == (
            prompt.conversation.turns,
            tuple(tool.document for tool in tools),
            prompt.prompt.ids.tobytes(),
        )
        return row

    def add(self, prompt: IndexedPrompt, answer: Turn, sampled: Sequence[int]) -> SimpleNamespace:
        ids = np.asarray(sampled, dtype=np.int32)
        row = SimpleNamespace(
            id=f"c{len(self.rows)}",
            parent_call_id=prompt.prompt.parent_call_id,
            shared_turns=prompt.prompt.shared_turns,
            shared_tokens=prompt.prompt.shared_tokens,
            turns=list(map(turn_json, prompt.conversation.turns[prompt.prompt.shared_turns :])),
            tools=None if prompt.prompt.parent_call_id else [tool.document for tool in prompt.conversation.tools],
            answer=turn_json(answer),
            prompt_ids=prompt.prompt.ids[prompt.prompt.shared_tokens :].tobytes(),
            sampled_ids=ids.tobytes(),
            tokens=[*prompt.prompt.ids.tolist(), *sampled],
            is_fork=prompt.prompt.is_fork,
        )
        self.rows[row.id] = row
        self.stored.append(StoredCall(row.id, prompt.conversation, answer, prompt.prompt.ids.copy(), ids))
        return row

    def forget(self) -> None:
        self.index = PrefixIndex(self.model, PrefixCache(10**8))


tokens = st.lists(st.integers(0, 259), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=5), st.data())
async def test_every_turn_begins_with_all_tokens_before_it(model, sampled, data):
    session = Session(model)
    turns: list[Turn] = []
    before: list[int] = []
    for number, ids in enumerate(sampled):
        if data.draw(st.booleans()):
            session.forget()
        turns.append(Turn("user", f"question {number}"))
        text = model.tokenizer.decode(ids[:-1] if ids[-1] == EOS else ids)
        row = await session.ask(*turns, says=text, sampled=ids)
        assert row.tokens[: len(before)] == before
        before = row.tokens
        turns.append(Turn("assistant", text))


ANSWERS = [Turn("assistant", text) for text in ("fine", "<think>hm</think>so", "")]
ANSWERS += [Turn("assistant", text, tool_calls=(ToolCall("1", "f", '{"x": 1}'),)) for text in ("", "look")]
EDITS = ["go on", "go on", "go on", "go on", "again", "back", "rewrite", "invent", "other tools"]


class Agent:
    """Sends answers back, and now and then changes its mind about the past."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.turns = [Turn("system", "s"), Turn("user", "a")]
        self.tools: tuple[Tool, ...] = random.choice([(), (TOOL,)])
        self.reminds = random.choice([0.0, 0.5, 1.0])

    def asks(self) -> tuple[Turn, ...]:
        """The conversation, sometimes with a last message that no later request has."""
        if self.random.random() >= self.reminds:
            return tuple(self.turns)
        state = "x" * self.random.choice([0, 0, 2000])
        return (*self.turns, Turn(self.random.choice(["user", "system"]), f"step {len(self.turns)}{state}"))

    def hear(self, answer: Turn, number: int) -> None:
        edit = self.random.choice(EDITS)
        if edit == "back":
            self.turns = self.turns[: self.random.randint(2, len(self.turns))]
        if edit == "rewrite":
            place = self.random.randrange(len(self.turns))
            self.turns[place] = Turn(self.turns[place].role, f"rewritten {number}")
        if edit == "other tools":
            self.tools = () if self.tools else (TOOL,)
        if edit == "again":
            return
        said = Turn("assistant", "never said") if edit == "invent" else answer
        results = [Turn("tool", f"r{k}", tool_call_id="1") for k in range(self.random.randint(0, 2))]
        self.turns += [said, *(results or [Turn("user", f"question {number}")])]


@pytest.mark.parametrize(
    "template",
    [
        CHATML,
        CHATML_WITH_TOOLS,
        CHATML_FORGETTING,
        LOOKING_AHEAD,
        MARKED_BEFORE_ANSWERS,
        COUNTING,
        DEEPSEEK,
        LAST_APART,
        LLAMA,
        MISTRAL,
        QWEN3,
    ],
)
@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
async def test_a_prompt_is_the_same_whatever_the_index_remembers(tmp_path_factory, template, random):
    marks = ["<assistant>", "</outputs>", "</think>"]
    model = ChatModel(make_chat_model(tmp_path_factory.mktemp("m"), template, context_length=2**20, more_marks=marks))
    session, agents = Session(model), [Agent(random), Agent(random)]
    for number in range(14):
        agent = random.choice(agents)
        asked = request(*agent.asks(), tools=agent.tools)
        anew = await PrefixIndex(model, PrefixCache(10**8)).prompt(KEY, asked, session.read)
        answer = random.choice(ANSWERS)
        sampled = [*model.tokenizer.encode(answer.content).tolist(), number % 250, EOS]
        row = await session.ask(*asked.turns, tools=asked.tools, says=answer, sampled=sampled)
        assert (row.tokens[: -len(sampled)], row.is_fork) == (anew.prompt.ids.tolist(), anew.prompt.is_fork)
        agent.hear(answer, number)


async def test_rows_hold_what_their_calls_add(model):
    session, turns = Session(model), [Turn("system", "s"), Turn("user", "question 0")]
    rows = []
    for number in range(40):
        rows.append(await session.ask(*turns))
        turns += [Turn("assistant", "ok"), Turn("user", f"question {number + 1}")]
    assert [row.parent_call_id for row in rows] == [None, *(row.id for row in rows[:-1])]
    assert {len(row.turns) for row in rows[1:]} == {1}


async def test_a_session_whose_last_message_is_never_sent_again_stores_what_is_new(model):
    session, turns = Session(model), [Turn("system", "s")]
    rows = []
    for number in range(10):
        turns.append(Turn("user", f"question {number}"))
        rows.append(await session.ask(*turns, Turn("user", f"state {number}")))
        turns.append(Turn("assistant", "ok"))
    # Each row holds the last answer, the question after it and the state.
    assert [len(row.turns) for row in rows] == [3] * 10
    assert all(row.parent_call_id is not None for row in rows[1:])


async def test_a_call_with_different_tools_has_no_parent(tmp_path):
    session = Session(ChatModel(make_chat_model(tmp_path / "m", CHATML_WITH_TOOLS)))
    turns = [Turn("user", "a")]
    await session.ask(*turns, tools=[TOOL])
    turns += [Turn("assistant", "ok"), Turn("user", "b")]
    assert (await session.ask(*turns)).parent_call_id is None


async def test_a_result_of_one_branch_is_in_no_prompt_of_another(tmp_path):
    """The results of a round are one message to a template that knows no tools."""
    model = ChatModel(make_chat_model(tmp_path / "m", context_length=2**20))
    session = Session(model)
    said = Turn("assistant", "", tool_calls=(ToolCall("1", "f", "{}"),))
    first, more = (Turn("tool", text, tool_call_id="1") for text in ("r0", "r1"))
    asked = [Turn("user", "a"), said, first]
    later = [Turn("assistant", "b"), Turn("user", "c")]
    for turns in ([*asked, *later], [*asked, more], [*asked, *later]):
        row = await session.ask(*turns, tools=[TOOL])
        text = model.render(turns, (TOOL,), {})
        assert row.tokens[:-3] == model.tokenizer.encode(text).tolist()


async def test_the_store_is_read_for_answers_that_are_not_indexed(model):
    session = Session(model)
    asked = [Turn("user", "a")]
    await session.ask(*asked, says="x")
    asked += [Turn("assistant", "x"), Turn("user", "b")]
    await session.ask(*asked, says="y")
    assert session.reads == 0
    # Another gateway answered the next call.
    asked += [Turn("assistant", "y"), Turn("user", "c")]
    other = session.add(await session.prompt(*asked), Turn("assistant", "z"), [7, EOS])
    later = await session.ask(*asked, Turn("assistant", "z"), Turn("user", "d"))
    assert session.reads == 1
    assert later.tokens[: len(other.tokens)] == other.tokens


async def test_a_conversation_without_an_answer_in_it_reads_nothing(model):
    session = Session(model)
    await session.ask(Turn("system", "s"), Turn("user", "a"))
    assert session.reads == 0


@pytest.mark.parametrize(("said", "is_fork"), [("fine", False), ("<think>hm</think>fine", True), ("fi\nne ", False)])
async def test_an_answer_is_continued_if_its_text_is_unchanged_in_any_template(tmp_path, said, is_fork):
    model = ChatModel(make_chat_model(tmp_path / "m", LAST_APART))
    session = Session(model)
    first = await session.ask(Turn("user", "a"), says=said)
    prompt = await session.prompt(Turn("user", "a"), Turn("assistant", said.strip()), Turn("user", "b"))
    assert prompt.prompt.is_fork is is_fork
    assert (prompt.prompt.ids.tolist()[: len(first.tokens)] == first.tokens) is not is_fork
    if not is_fork:
        rest = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        assert model.tokenizer.decode(prompt.prompt.ids.tolist()[len(first.tokens) :]) == rest


async def test_forgotten_attempts_are_read_again(model):
    session = Session(model, max_bytes=1)
    first = await session.ask(Turn("user", "a"), sampled=[5, 6, EOS], says="x")
    # Another attempt takes the memory.
    other = AttemptKey("run-a.0.1", 1)
    prompt = await session.index.prompt(other, request(Turn("user", "a")), nothing)
    session.index.remember(other, "c9", prompt, Turn("assistant", "y"), [1])
    again = await session.ask(Turn("user", "a"), Turn("assistant", "x"), Turn("user", "b"))
    assert (again.tokens[: len(first.tokens)], session.reads, again.is_fork) == (first.tokens, 1, False)


async def test_attempts_that_ended_leave_the_memory(model):
    now = 0.0
    cache = PrefixCache(10**8, idle_seconds=300, clock=lambda: now)
    index = PrefixIndex(model, cache)
    first = AttemptKey("run-a.0.0", 1)
    # One attempt goes on for all the time, beside others that make one call.
    for number in range(50):
        now += 100
        for key in (first, AttemptKey("run-a.1.0", number)):
            prompt = await index.prompt(key, request(Turn("user", f"{number}")), nothing)
            index.remember(key, f"c{number}", prompt, Turn("assistant", "x"), [5, EOS])
    assert len(cache) == 4


async def memory_of(one: Callable[[int], Awaitable[None]], count: int) -> int:
    """Bytes that stay allocated after so many, but for what the first one allocates."""
    await one(0)
    gc.collect()
    tracemalloc.start()
    try:
        for number in range(1, count):
            await one(number)
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


async def nothing(_known: Collection[str]) -> Sequence[StoredCall]:
    return []


async def test_many_attempts_stay_within_the_memory_limit(model):
    index = PrefixIndex(model, PrefixCache(10**6))

    async def one(number: int) -> None:
        key = AttemptKey(f"run-abcdefghij.{number}.0", 1)
        prompt = await index.prompt(key, request(Turn("user", "a")), nothing)
        index.remember(key, f"call-{number:020}", prompt, Turn("assistant", "x"), [5, EOS])

    assert await memory_of(one, 2000) < 1.3 * 10**6


async def test_long_sessions_stay_within_the_memory_limit(tmp_path):
    model = ChatModel(make_chat_model(tmp_path / "m", CHATML_WITH_TOOLS, context_length=2**20))
    index = PrefixIndex(model, PrefixCache(2 * 10**6))

    async def session(number: int) -> None:
        key, turns = AttemptKey(f"run-abcdefghij.{number}.0", 1), [Turn("system", "s")]
        for turn in range(12):
            turns += [Turn("user", f"{turn:02} in {number}" * 20), Turn("user", "go on")]
            prompt = await index.prompt(key, request(*turns), nothing)
            index.remember(key, f"call-{number:010}-{turn:09}", prompt, Turn("assistant", "x" * 200), range(50))
            turns.append(Turn("assistant", "x" * 200))

    await memory_of(session, 2)
    model.tokenizer._segments.clear()
    assert await memory_of(session, 60) - 8 * model.tokenizer._segments.currsize < 2.6 * 10**6


async def test_a_long_text_is_encoded_in_a_thread(model, monkeypatch):
    threads = []

    def encode(_tokenizer, text, *, after=None):
        threads.append((len(text) >= LONG_CHARACTERS, threading.current_thread() is threading.main_thread()))
        return np.arange(9, dtype=np.int32)

    monkeypatch.setattr(ModelTokenizer, "encode", encode)
    await Session(model).prompt(Turn("user", "x" * LONG_CHARACTERS))
    assert threads == [(True, False)]


def test_formatting_that_agents_change_does_not_change_the_digest():
    def last(*turns: Turn) -> bytes:
        return digest_chain(Conversation(turns, (), {}))[-1]

    said = Turn("assistant", " ok", tool_calls=(ToolCall("1", "f", '{"a": 1, "b": 2}'),))
    echoed = Turn("assistant", "ok ", name="me", tool_calls=(ToolCall("2", "f", '{"b":2,"a":1}'),))
    other = Turn("assistant", "ok", tool_calls=(ToolCall("1", "f", '{"a": 1, "b": 3}'),))
    huge = Turn("assistant", "ok", tool_calls=(ToolCall("1", "f", f'{{"a": {10**30}}}'),))
    assert last(said) == last(echoed)
    assert len({last(said), last(other), last(huge), last(Turn("user", "ok"))}) == 4


def test_text_without_the_answers_tool_calls_is_not_its_answer_text() -> None:
    answer = Turn("assistant", "Now.", tool_calls=(ToolCall(id="1", name="look", arguments="{}"),))
    assert _is_answer_text(answer, ' Now.\n<call>{"name": "look"}</call>')
    assert not _is_answer_text(answer, "Now.")
    assert not _is_answer_text(answer, '<call>{"name": "look"}</call>')


@pytest.mark.parametrize(
    ("sent", "is_fork"), [(None, False), ("Hm.", False), (" Hm.\n", False), ("Something else.", True)]
)
async def test_a_prompt_extends_an_answer_whose_reasoning_is_sent_back_or_left_out(tmp_path, sent, is_fork):
    session = Session(ChatModel(FAMILIES["qwen3"].write(tmp_path)))
    question = Turn("user", "a")
    first = await session.ask(question, says="<think>\nHm.\n</think>\n\nfine")
    result = Turn("tool", "r", tool_call_id="1")
    second = await session.ask(question, Turn("assistant", "fine", reasoning=sent), result)
    assert second.is_fork == is_fork
    assert (second.tokens[: len(first.tokens)] == first.tokens) == (not is_fork)


@pytest.mark.parametrize(("ids", "reasoning"), [(("1", "2"), (None, None)), (("x", "x"), ("One.", "Two."))])
async def test_ids_and_reasoning_distinguish_equal_answers(tmp_path, ids, reasoning):
    session = Session(ChatModel(FAMILIES["qwen3"].write(tmp_path)))
    question = Turn("user", "a")

    def answer(number: str, thought: str | None) -> Turn:
        return Turn("assistant", "", tool_calls=(ToolCall(number, "f", "{}"),), reasoning=thought)

    calls = [await session.ask(question, says=answer(*one)) for one in (("1", "One."), ("2", "Two."))]
    for call, number, thought in zip(calls, ids, reasoning, strict=True):
        later = await session.ask(question, answer(number, thought), Turn("tool", "r", tool_call_id=number))
        assert later.parent_call_id == call.id


@pytest.mark.parametrize(("arguments", "renderings"), [('{"x": 1}', 1), ('{"x":1}', 3)])
async def test_a_tool_call_in_the_templates_spelling_is_continued_with_one_rendering(
    tmp_path, monkeypatch, arguments, renderings
):
    session = Session(ChatModel(FAMILIES["qwen3"].write(tmp_path)))
    model, question = session.model, Turn("user", "a")
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    answer = Turn("assistant", "", tool_calls=(ToolCall("1", "f", arguments),))
    sampled = [*model.tokenizer.encode(text).tolist(), min(model.tokenizer.eos_ids)]
    first = await session.ask(question, says=answer, sampled=sampled, tools=[TOOL])
    rendered = Mock(side_effect=model.render)
    monkeypatch.setattr(model, "render", rendered)
    second = await session.ask(question, answer, Turn("tool", "r", tool_call_id="1"), tools=[TOOL])
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert rendered.call_count == renderings


async def test_the_mark_of_the_next_role_that_ended_an_answer_stands_once(tmp_path):
    session = Session(ChatModel(FAMILIES["glm4_5"].write(tmp_path)))
    encode = session.model.tokenizer.encode
    question = Turn("user", "a")
    first = await session.ask(question, says="fine", sampled=encode("fine<|user|>").tolist())
    second = await session.ask(question, Turn("assistant", "fine"), Turn("user", "b"))
    assert second.tokens[: len(first.tokens)] == first.tokens
    assert session.model.tokenizer.decode(second.tokens).count("<|user|>") == 2


@pytest.mark.parametrize("template", [CHATML, LAST_APART])
async def test_a_sampled_control_token_stays_the_token_that_was_sampled(tmp_path, template) -> None:
    model = ChatModel(make_chat_model(tmp_path / "m", template))
    session = Session(model)
    said = "a<|endoftext|>b<|im_start|>c"
    first = await session.ask(Turn("user", "a"), says=said)
    assert model.tokenizer.encode("<|endoftext|>").tolist()[0] in first.tokens
    conversation = [Turn("user", "a"), Turn("assistant", said), Turn("user", "b")]
    prompt = (await session.prompt(*conversation)).prompt
    assert (prompt.is_fork, prompt.ids.tolist()[: len(first.tokens)]) == (False, first.tokens)
    # The same text in an attempt that did not sample it is text.
    other = (await Session(model).prompt(*conversation)).prompt.ids.tolist()
    assert not set(model.tokenizer.encode("<|endoftext|>").tolist()) & set(other)
    assert model.tokenizer.decode(other) == model.tokenizer.decode(prompt.ids.tolist())
