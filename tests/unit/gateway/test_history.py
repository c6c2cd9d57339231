"""Which tokens a prompt begins with, whatever was sampled and whatever has been forgotten."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import tracemalloc
from collections.abc import Awaitable, Callable, Collection, Sequence
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.libs.contracts.conversation import turn_json
from leyden.libs.store.chains import full_call
from leyden.services.gateway import firsts, render
from leyden.services.gateway import history as history_module
from leyden.services.gateway.digests import digest_chain
from leyden.services.gateway.errors import ContextOverflow
from leyden.services.gateway.history import LONG_CHARACTERS, History, StoredAnswer
from leyden.services.gateway.prompt import MOST_READ, Prompt
from leyden.services.gateway.render import ChatModel
from leyden.services.gateway.request import ChatRequest, Sampling, ToolCall, Turn, parse_answer, parse_request
from leyden.services.gateway.sent import Sent
from leyden.services.gateway.tokens import TokenIds
from leyden.services.gateway.written import Conversation, _is_kept
from tests.fakes.chat_model import CHATML, CHATML_FORGETTING, CHATML_WITH_TOOLS, EOS, make_chat_model
from tests.fakes.templates import DEEPSEEK, LAST_APART, LLAMA, MISTRAL, QWEN3

KEY = ("run-a.0.0", 1)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
LISTS: dict[str, Any] = {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": json.dumps([[]] * 100)}}]}
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
# Cannot be written message by message.
COUNTING = "{{ messages | length > 7 }}" + CHATML


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ChatModel:
    return ChatModel(make_chat_model(tmp_path_factory.mktemp("model")))


def request(*turns: Turn) -> ChatRequest:
    return ChatRequest(
        model="m",
        turns=turns,
        tools=(),
        calls_tools=False,
        parallel_tool_calls=True,
        stream=False,
        include_usage=False,
        choices=1,
        logprobs=False,
        top_logprobs=0,
        sampling=Sampling(),
        template_options={},
        recorded={},
        sent=Sent(b"", b"null"),
        body_sha256=b"",
    )


class Store:
    """The completed calls of one attempt, and how often they were read."""

    def __init__(self) -> None:
        self.answers: list[StoredAnswer] = []
        self.reads = 0

    async def read(self, known: Collection[str]) -> Sequence[StoredAnswer]:
        self.reads += 1
        return [answer for answer in self.answers if answer.call_id not in known]


async def answer(history: History, store: Store, sampled: list[int], text: str, *turns: Turn) -> list[int]:
    """A call that was answered with these tokens; gives prompt and sampled tokens."""
    prompt = await history.prompt(KEY, request(*turns), store.read)
    reply = Turn("assistant", text)
    name = f"c{len(store.answers)}"
    ids = np.asarray(sampled, dtype=np.int32)
    store.answers.append(StoredAnswer(name, Conversation(turns, (), {}), reply, prompt.ids, ids))
    history.remember(KEY, name, prompt, reply, ids)
    return [*prompt.ids.tolist(), *sampled]


tokens = st.lists(st.integers(0, 259), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.lists(tokens, min_size=1, max_size=5), st.data())
async def test_every_turn_begins_with_all_tokens_before_it(model, sampled, data):
    history, store = History(model, max_bytes=10**6), Store()
    turns: list[Turn] = []
    before: list[int] = []
    for number, ids in enumerate(sampled):
        if data.draw(st.booleans()):
            history = History(model, max_bytes=10**6)
        turns.append(Turn("user", f"question {number}"))
        shown = ids[:-1] if ids[-1] == EOS else ids
        text = model.decode(shown)
        now = await answer(history, store, ids, text, *turns)
        assert now[: len(before)] == before
        before = now
        turns.append(Turn("assistant", text))


ANSWERS = ["fine", "<think>hm</think>so", "", CALL, f"look\n{CALL}"]
TOOL: Any = {"type": "function", "function": {"name": "f"}}
EDITS = ["go on", "go on", "go on", "go on", "again", "back", "rewrite", "invent", "other tools"]


class Agent:
    """An agent on a client: it echoes what it was answered, and now and then changes its mind."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
        self.tools: list[Any] = random.choice([[], [TOOL]])
        self.reminds = random.choice([0.0, 0.5, 1.0])

    def body(self) -> bytes:
        spelled = self.random.choice([(",", ":"), (",", ":"), (", ", ": ")])
        document = {"messages": [*self.messages, *self.reminders()], "model": "m", "tools": self.tools or None}
        return json.dumps(document, separators=spelled).encode()

    def reminders(self) -> list[dict[str, Any]]:
        """A last message that is in no later request."""
        if self.random.random() >= self.reminds:
            return []
        state = "x" * self.random.choice([0, 0, 2000])
        return [{"role": self.random.choice(["user", "system"]), "content": f"step {len(self.messages)}{state}"}]

    def take(self, answer: dict[str, Any], number: int) -> None:
        """What it does with an answer."""
        edit = self.random.choice(EDITS)
        if edit == "back":
            self.messages = self.messages[: self.random.randint(2, len(self.messages))]
        if edit == "rewrite":
            self.messages[self.random.randrange(len(self.messages))]["content"] = f"rewritten {number}"
        if edit == "other tools":
            self.tools = [] if self.tools else [TOOL]
        if edit == "again":
            return
        said = {"role": "assistant", "content": "never said"} if edit == "invent" else answer
        results = [{"role": "tool", "tool_call_id": "1", "content": f"r{k}"} for k in range(self.random.randint(0, 2))]
        self.messages += [said, *(results or [{"role": "user", "content": f"question {number}"}])]


def row_of(name: str, prompt: Prompt, asked: ChatRequest, sampled: TokenIds, reply: Turn) -> SimpleNamespace:
    """The parts of a call's row that hold what it was asked and answered."""
    added = prompt.added(asked.sent)
    return SimpleNamespace(
        id=name,
        parent_call_id=added.continues,
        shared_turns=added.shared_turns,
        shared_tokens=added.shared_tokens,
        turns=[turn_json(turn) for turn in asked.turns[added.shared_turns :]],
        tools=list(asked.tools) if added.continues is None else None,
        answer=turn_json(reply),
        prompt_ids=added.ids.tobytes(),
        sampled_ids=sampled.tobytes(),
    )


def stored_bytes(row: Any) -> int:
    """What a row holds of a conversation."""
    return len(json.dumps(row.turns)) + len(row.prompt_ids) + len(row.sampled_ids)


def chain_of(rows: dict[str, SimpleNamespace], row: Any) -> list[SimpleNamespace]:
    """A row and those that it continues."""
    chain = [row]
    while chain[-1].parent_call_id is not None:
        chain.append(rows[chain[-1].parent_call_id])
    return chain


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
@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False))
async def test_a_prompt_is_the_same_whatever_is_remembered(tmp_path_factory, template, random):
    marks = ["<assistant>", "</outputs>", "</think>"]
    model = ChatModel(make_chat_model(tmp_path_factory.mktemp("m"), template, context_length=2**20, more_marks=marks))
    remembering, store, agents = History(model, max_bytes=10**7), Store(), [Agent(random), Agent(random)]
    rows: dict[str, SimpleNamespace] = {}
    for number in range(14):
        agent = random.choice(agents)
        body = agent.body()
        known = remembering.opening(KEY, body)
        asked = parse_request(body, max_choices=1, opening=known)
        prompt = await remembering.prompt(KEY, asked, store.read)
        whole = await History(model, max_bytes=10**7).prompt(KEY, parse_request(body, max_choices=1), store.read)
        assert (prompt.ids.tolist(), prompt.is_fork) == (whole.ids.tolist(), whole.is_fork)
        assert (prompt.characters, prompt.text_digest) == (whole.characters, whole.text_digest)
        assert prompt.conversation_digest == whole.conversation_digest
        text = random.choice(ANSWERS)
        ids = np.asarray([*model.encode(text).tolist(), number % 250, EOS], dtype=np.int32)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if CALL in text:
            calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
            message = {"role": "assistant", "content": text.replace(CALL, ""), "tool_calls": calls}
        name, reply = f"c{number}", parse_answer(message)
        rows[name] = row_of(name, prompt, asked, ids, reply)
        assert full_call(rows, rows[name])[:3] == (asked.turns, asked.tools, prompt.ids.tobytes())
        conversation = Conversation(asked.turns, asked.tools, {})
        store.answers.append(StoredAnswer(name, conversation, reply, prompt.ids.copy(), ids))
        remembering.remember(KEY, name, prompt, reply, ids, added=prompt.added(asked.sent))
        agent.take(message, number)


class Session:
    """A session of calls that are remembered and whose rows are kept."""

    def __init__(self, model: ChatModel) -> None:
        self.history, self.rows = History(model, max_bytes=10**9), dict[str, SimpleNamespace]()

    def read(self, messages: list[dict[str, Any]], tools: Any = None) -> ChatRequest:
        """A request that came now."""
        body = json.dumps({"messages": messages, "model": "m", "tools": tools}, separators=(",", ":")).encode()
        return parse_request(body, max_choices=1, opening=self.history.opening(KEY, body))

    async def ask(self, messages: list[dict[str, Any]], tools: Any = None) -> SimpleNamespace:
        """The row of a call that was answered."""
        asked = self.read(messages, tools)
        prompt = await self.history.prompt(KEY, asked, Store().read)
        row = self.answer(asked, prompt)
        assert full_call(self.rows, row)[:3] == (asked.turns, asked.tools, prompt.ids.tobytes())
        return row

    def answer(self, asked: ChatRequest, prompt: Prompt) -> SimpleNamespace:
        """The row of a call that is answered now."""
        name, sampled = f"c{len(self.rows)}", np.asarray([5, EOS], dtype=np.int32)
        reply = Turn("assistant", "ok")
        self.rows[name] = row_of(name, prompt, asked, sampled, reply)
        self.history.remember(KEY, name, prompt, reply, sampled, added=prompt.added(asked.sent))
        return self.rows[name]


@pytest.mark.parametrize(("state_bytes", "wholes"), [(10, 1), (500, 1), (20_000, 16)])
async def test_what_is_read_for_a_call_and_what_is_stored_of_a_session_are_bounded(tmp_path, state_bytes, wholes):
    """Each request ends with a state that no later one has."""
    session = Session(ChatModel(make_chat_model(tmp_path / "m", context_length=2**24)))
    messages, least = [{"role": "system", "content": "s"}], 0
    for number in range(80):
        messages.append({"role": "user", "content": f"question {number:02}" + "x" * 200})
        state = {"role": "user", "content": f"state {number:02}" + "y" * state_bytes}
        row = await session.ask([*messages, state])
        full = full_call(session.rows, row)
        read = sum(map(stored_bytes, chain_of(session.rows, row)))
        assert read <= MOST_READ * (len(full.prompt_ids) + len(json.dumps(list(map(turn_json, full.turns)))))
        messages.append({"role": "assistant", "content": "ok"})
        # Two rounds and the state, as JSON and as tokens of a byte each.
        least += 5 * (2 * 250 + state_bytes)
    assert sum(map(stored_bytes, session.rows.values())) < 1.5 * least
    assert sum(row.parent_call_id is None for row in session.rows.values()) == wholes


async def test_calls_whose_messages_begin_the_same_continue_the_last_one_that_is_stored_whole(tmp_path):
    session = Session(ChatModel(make_chat_model(tmp_path / "m", context_length=2**20)))
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    sizes = [("large", None), ("b", None), ("c", None), ("b", [TOOL]), ("c", [TOOL]), ("d", [TOOL])]
    states = [({"role": "user", "content": text * 2000 if text == "large" else text}, tools) for text, tools in sizes]
    rows = [await session.ask([*opening, state], tools) for state, tools in states]
    # To read the first with every other one is too much, and the fourth has other tools.
    assert [row.parent_call_id for row in rows] == [None, None, "c1", None, "c3", "c3"]


QUESTION, FIRST, SECOND = ({"role": "user", "content": text} for text in ("question", "first", "second"))
SAID = {"role": "assistant", "content": "ok"}


async def test_a_call_is_continued_by_what_overlapped_with_it(model):
    """Both read the same opening, each its own."""
    session = Session(model)
    asked = [session.read([QUESTION, state]) for state in (FIRST, SECOND)]
    first, second = [await session.history.prompt(KEY, one, Store().read) for one in asked]
    row = session.answer(asked[0], first)
    assert (await session.ask([QUESTION, FIRST])).parent_call_id == row.id
    session.answer(asked[1], second)


@pytest.mark.parametrize("results", ["aa", "ab"], ids=["same", "branches"])
async def test_calls_that_overlap_in_every_turn_store_what_they_add(model, results):
    """One waits for the store, as its answer is of elsewhere, while the other one goes on from the same opening."""
    session, is_read = Session(model), asyncio.Event()

    async def read(_: Collection[str]) -> Sequence[StoredAnswer]:
        await is_read.wait()
        return []

    rows, messages = [await session.ask([QUESTION, FIRST])], [QUESTION]
    for number in range(4):
        said = {"role": "assistant", "content": f"never said {number}"}
        bodies = [[*messages, said, {"role": "user", "content": result}, SAID, FIRST] for result in results]
        asked = [session.read(body) for body in bodies]
        is_read.clear()
        waiting = asyncio.create_task(session.history.prompt(KEY, asked[0], read))
        await asyncio.sleep(0)
        rows.append(session.answer(asked[1], await session.history.prompt(KEY, asked[1], Store().read)))
        is_read.set()
        rows.append(session.answer(asked[0], await waiting))
        messages = bodies[0][:-2]
    assert [row.parent_call_id is None for row in rows] == [True, *[False] * 8]


async def test_a_result_more_in_another_branch_is_in_no_prompt_without_it(tmp_path):
    """The results of a round are one message to a template that knows of no tools."""
    model = ChatModel(make_chat_model(tmp_path / "m", context_length=2**20))
    session, calls = Session(model), [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    first, more = ({"role": "tool", "tool_call_id": "1", "content": text} for text in ("r0", "r1"))
    asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}, said, first]
    later = [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    for messages in ([*asked, *later], [*asked, more], [*asked, *later]):
        row = await session.ask(messages, [TOOL])
        turns = parse_request(json.dumps({"messages": messages, "model": "m"}).encode(), max_choices=1).turns
        text = model.render(turns, (TOOL,), {}, add_generation_prompt=True)
        assert full_call(session.rows, row).prompt_ids == model.encode(text).tobytes()


@pytest.mark.parametrize("reminder", [[], [{"role": "user", "content": "be brief"}]], ids=["", "reminded"])
@pytest.mark.parametrize("template", [CHATML, CHATML_WITH_TOOLS])
async def test_a_late_turn_reads_writes_and_encodes_what_is_new_and_nothing_else(
    tmp_path, monkeypatch, template, reminder
):
    """A reminder stands at the end of each request, and in none of the later ones."""
    model = ChatModel(make_chat_model(tmp_path / "m", template, context_length=2**20))
    history, seen = History(model, max_bytes=10**7), []
    spell, encode = ChatModel.messages, ChatModel.encode

    def counted_spell(found, turns, tools):
        seen.append(len(turns))
        return spell(found, turns, tools)

    def counted_encode(found, text, *, after=None):
        seen.append(len(text))
        return encode(found, text, after=after)

    monkeypatch.setattr(ChatModel, "messages", counted_spell)
    monkeypatch.setattr(ChatModel, "encode", counted_encode)
    messages: list[Any] = [{"role": "system", "content": "s"}]
    costs = []
    for number in range(30):
        messages.append({"role": "user", "content": f"question {number:02}"})
        body = json.dumps({"messages": messages + reminder, "model": "m", "tools": [TOOL]}).encode()
        asked = parse_request(body, max_choices=1, opening=history.opening(KEY, body))
        seen.clear()
        prompt = await history.prompt(KEY, asked, Store().read)
        read = len(asked.turns) - len(asked.continues.turns if asked.continues else ())
        costs.append((read, *seen))
        history.remember(KEY, f"c{number}", prompt, Turn("assistant", "ok"), np.asarray([5, EOS], dtype=np.int32))
        messages.append({"role": "assistant", "content": "ok"})
    # Turns of the body and of the text first.
    assert costs[3:] == [costs[3]] * 27
    assert costs[3][:2] == (4 + len(reminder),) * 2
    # Of the text, all but the question stood in the prompt before, too.
    assert not reminder or costs[3][2:] == (2, len("<|im_start|>user\nquestion 00"), 2)


async def test_of_requests_whose_last_message_is_never_kept_those_continue_a_call_that_have_its_answer(tmp_path):
    model = ChatModel(make_chat_model(tmp_path / "m", context_length=2**20))
    history, store, messages = History(model, max_bytes=10**7), Store(), [{"role": "system", "content": "s"}]
    # Encoded, `the` is two tokens.
    sampled = np.asarray([int(model.encode(letter)[0]) for letter in "the"] + [EOS], dtype=np.int32)
    begins, before = np.empty(0, dtype=np.int32), ""
    for number in range(12):
        messages.append({"role": "user", "content": f"question {number}"})
        reminder = [] if number == 4 else [{"role": "user", "content": f"step {number} of 12"}]
        body = json.dumps({"messages": messages + reminder, "model": "m"}).encode()
        asked = parse_request(body, max_choices=1, opening=history.opening(KEY, body))
        prompt = await history.prompt(KEY, asked, store.read)
        text = model.render(asked.turns, (), {}, add_generation_prompt=True)
        assert prompt.ids.tolist() == [*begins.tolist(), *model.encode(text.removeprefix(before)).tolist()]
        if not reminder:
            begins, before = np.concatenate([prompt.ids, sampled]), f"{text}the<|im_end|>"
        history.remember(KEY, f"c{number}", prompt, Turn("assistant", "the"), sampled)
        messages.append({"role": "assistant", "content": "the"})


@pytest.mark.parametrize(("left_out", "reads"), [(1, 0), (4, 0), (5, 1)])
async def test_the_store_is_asked_for_answers_that_were_not_given_here(model, left_out, reads):
    history, store = History(model, max_bytes=10**6), Store()
    asked = [Turn("user", "a")]
    state = [Turn("user", f"part {number}") for number in range(left_out)]
    await answer(history, store, [5, EOS], "x", *asked, *state)
    asked += [Turn("assistant", "x"), Turn("user", "b")]
    await answer(history, store, [5, EOS], "y", *asked, *state)
    assert store.reads == reads
    # Another gateway was asked for more, and answered otherwise.
    asked += [Turn("assistant", "y"), Turn("user", "c")]
    ids = np.asarray([7, EOS], dtype=np.int32)
    prompt = (await History(model, max_bytes=10**6).prompt(KEY, request(*asked), store.read)).ids
    store.answers.append(StoredAnswer("other", Conversation(tuple(asked), (), {}), Turn("assistant", "z"), prompt, ids))
    before = store.reads
    later = await answer(history, store, [5, EOS], "x", *asked, Turn("assistant", "z"), Turn("user", "d"))
    assert store.reads == before + 1
    assert later[: len(prompt) + 2] == [*prompt.tolist(), 7, EOS]


async def test_tokens_end_where_what_comes_next_may_be_written_otherwise(tmp_path):
    model = ChatModel(make_chat_model(tmp_path / "m", MARKED_BEFORE_ANSWERS))
    history, store = History(model, max_bytes=10**6), Store()
    for said in ("u:h u:e a:x u:q", "u:h u:e u:z a:y u:q"):
        turns = [turn.split(":") for turn in said.split()]
        messages = [{"role": {"u": "user", "a": "assistant"}[who], "content": what} for who, what in turns]
        body = json.dumps({"messages": messages, "model": "m"}).encode()
        asked = parse_request(body, max_choices=1, opening=history.opening(KEY, body))
        prompt = await history.prompt(KEY, asked, store.read)
        text = model.render(asked.turns, (), {}, add_generation_prompt=True)
        assert prompt.ids.tolist() == model.encode(text).tolist()


async def memory_of(one: Callable[[int], Awaitable[None]], count: int) -> int:
    """Bytes that are held after all but the first of so many, which takes what is taken once."""
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


async def turns_read(history: History, conversations: int, turns: int) -> list[int]:
    """Turns of the bodies that had to be read: the conversations of one attempt go on in turns."""
    said = [[{"role": "system", "content": f"s {number}"}] for number in range(conversations)]
    read = []
    for turn in range(turns):
        for number, messages in enumerate(said):
            messages.append({"role": "user", "content": f"question {turn}"})
            body = json.dumps({"messages": messages, "model": "m"}).encode()
            asked = parse_request(body, max_choices=1, opening=history.opening(KEY, body))
            read.append(len(asked.turns) - len(asked.continues.turns if asked.continues else ()))
            prompt, sampled = await history.prompt(KEY, asked, Store().read), np.asarray([5, EOS], dtype=np.int32)
            history.remember(KEY, f"c{turn} {number}", prompt, Turn("assistant", "ok"), sampled)
            messages.append({"role": "assistant", "content": "ok"})
    return read


async def test_many_conversations_of_an_attempt_are_each_read_from_where_they_were_left(model):
    assert await turns_read(History(model, max_bytes=10**7), 32, 4) == [2] * 32 + [3] * 32 + [4] * 64


async def test_of_conversations_that_take_more_memory_than_they_may_the_last_are_kept(model, monkeypatch):
    history = History(model, max_bytes=10**7)
    await turns_read(history, 1, 3)
    [one] = history._attempts[KEY].settled
    monkeypatch.setattr(history_module, "MOST_SETTLED_BYTES", 3 * one.size_bytes + 100)
    history = History(model, max_bytes=10**7)
    read = await turns_read(history, 5, 3)
    assert (read[10:], len(history._attempts[KEY].settled)) == ([6] * 5, 3)
    monkeypatch.setattr(history_module, "MOST_SETTLED_BYTES", 1)
    assert await turns_read(History(model, max_bytes=10**7), 1, 3) == [2, 3, 4]


async def test_siblings_begin_with_a_prompt_that_is_written_once_and_go_on_alone(model, monkeypatch):
    history, rendered = History(model, max_bytes=10**6), []
    render = ChatModel.render_from

    def counted(found, messages, *rest, **options):
        rendered.append(len(messages))
        return render(found, messages, *rest, **options)

    monkeypatch.setattr(ChatModel, "render_from", counted)
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text} for text in "ab"]}).encode()
    keys = [(f"run-a.0.{number}", 1) for number in range(3)]
    prompts = []
    # The first of them asks twice.
    for key in (*keys, keys[0]):
        asked = parse_request(body, max_choices=1, opening=history.opening(key, body))
        prompts.append(await history.prompt(key, asked, Store().read))
    assert [prompt.ids.tolist() for prompt in prompts] == [prompts[0].ids.tolist()] * 4
    assert rendered == [2]
    sampled = [np.asarray([5, 6 + number, EOS], dtype=np.int32) for number in range(3)]
    for key, prompt, ids in zip(keys, prompts, sampled, strict=False):
        history.remember(key, key[0], prompt, Turn("assistant", "x"), ids)
    turns = (*asked.turns, Turn("assistant", "x"), Turn("user", "c"))
    later = [await history.prompt(key, request(*turns), Store().read) for key in keys]
    begun = [[*prompt.ids.tolist(), *ids.tolist()] for prompt, ids in zip(prompts, sampled, strict=False)]
    assert [prompt.ids.tolist()[: len(before)] for prompt, before in zip(later, begun, strict=True)] == begun
    assert [bytes(prompt.tokens.json).decode() for prompt in later] == [
        ",".join(map(str, prompt.ids.tolist())) for prompt in later
    ]


async def test_a_first_prompt_that_tells_the_time_is_written_again(tmp_path, monkeypatch):
    now = ["one"]
    monkeypatch.setattr(render, "_strftime_now", lambda _form: now[0])
    model = ChatModel(make_chat_model(tmp_path / "m", "{{ strftime_now('%Y') }}" + CHATML))
    history, texts = History(model, max_bytes=10**6), []
    for text in ("one", "two"):
        now[0] = text
        prompt = await history.prompt(KEY, request(Turn("user", "a")), Store().read)
        texts.append(model.decode(prompt.ids.tolist())[:3])
    assert texts == ["one", "two"]


async def test_first_prompts_take_no_more_memory_than_they_may(model, monkeypatch):
    monkeypatch.setattr(firsts, "FIRSTS_BYTES", 20_000)
    history, store = History(model, max_bytes=10**6), Store()
    prompts = [await history.prompt(KEY, request(Turn("user", str(number))), store.read) for number in range(9)]
    assert 0 < len(history._firsts._known) < 9
    again = [await history.prompt(KEY, request(Turn("user", str(number))), store.read) for number in range(9)]
    assert [prompt.ids.tolist() for prompt in again] == [prompt.ids.tolist() for prompt in prompts]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ({"name": "n" * 20_000}, {}),
        ({"tool_call_id": "\U0001f600" + "i" * 5000}, {}),
        ({}, {"chat_template_kwargs": {"unknown": "x" * 20_000}}),
        ({}, {"chat_template_kwargs": {"unknown": [[]] * 1000}}),
    ],
    ids=["name", "id", "option", "lists"],
)
async def test_what_no_template_writes_of_first_prompts_takes_no_more_memory_than_it_may(
    model, monkeypatch, message, fields
):
    monkeypatch.setattr(firsts, "FIRSTS_BYTES", 500_000)
    # Of attempts, it keeps the last one alone.
    history, store = History(model, max_bytes=1), Store()

    async def one(number: int) -> None:
        key, messages = (f"run-a.{number}.0", 1), [{"role": "user", "content": f"{number:03}", **message}]
        asked = parse_request(json.dumps({"model": "m", "messages": messages, **fields}).encode(), max_choices=1)
        await history.prompt(key, asked, store.read)

    assert 0.4 * 10**6 < await memory_of(one, 100) < 0.7 * 10**6


async def test_a_first_prompt_that_takes_more_than_all_may_is_not_remembered(model, monkeypatch):
    monkeypatch.setattr(firsts, "FIRSTS_BYTES", 20_000)
    history, store = History(model, max_bytes=10**6), Store()
    for turn in (Turn("user", "a"), Turn("user", "b", name="n" * 20_000)):
        await history.prompt(KEY, request(turn), store.read)
    assert [turns for turns, _ in history._firsts._known] == [(Turn("user", "a"),)]


@pytest.mark.parametrize(("said", "is_fork"), [("fine", False), ("<think>hm</think>fine", True), ("fi\nne ", False)])
async def test_an_answer_is_continued_if_its_letters_are_kept_however_a_last_one_is_written(tmp_path, said, is_fork):
    model = ChatModel(make_chat_model(tmp_path / "m", LAST_APART))
    history, store = History(model, max_bytes=10**6), Store()
    sampled = [*model.encode(said).tolist(), EOS]
    first = await answer(history, store, sampled, said, Turn("user", "a"))
    turns = (Turn("user", "a"), Turn("assistant", said.strip()), Turn("user", "b"))
    prompt = await history.prompt(KEY, request(*turns), store.read)
    assert prompt.is_fork is is_fork
    assert (prompt.ids.tolist()[: len(first)] == first) is not is_fork
    if not is_fork:
        rest = "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
        assert model.decode(prompt.ids.tolist()[len(first) :]) == rest


async def test_forgotten_attempts_are_read_again(model):
    history, store = History(model, max_bytes=1), Store()
    first = await answer(history, store, [5, 6, EOS], "x", Turn("user", "a"))
    # Another attempt takes the memory.
    other = Store()
    prompt = await history.prompt(("run-a.0.1", 1), request(Turn("user", "a")), other.read)
    history.remember(("run-a.0.1", 1), "c9", prompt, Turn("assistant", "y"), np.asarray([1], dtype=np.int32))
    turns = (Turn("user", "a"), Turn("assistant", "x"), Turn("user", "b"))
    again = await history.prompt(KEY, request(*turns), store.read)
    assert (again.ids.tolist()[: len(first)], store.reads, again.is_fork) == (first, 1, False)


async def test_attempts_of_short_calls_take_no_more_memory_than_they_may(model):
    history, store = History(model, max_bytes=10**6), Store()
    sampled = np.asarray([5, EOS], dtype=np.int32)

    async def one(number: int) -> None:
        key = (f"run-abcdefghij.{number}.0", 1)
        prompt = await history.prompt(key, request(Turn("user", "a")), store.read)
        history.remember(key, f"call-{number:020}", prompt, Turn("assistant", "x"), sampled)

    assert 0.5 * 10**6 < await memory_of(one, 3000) < 1.2 * 10**6


def _said(fields: dict[str, Any], content: str) -> dict[str, Any]:
    return {"role": "user", "content": content, **fields}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"name": "n" * 600},
        {"role": "tool", "tool_call_id": "\U0001f600" + "i" * 600},
        {"role": "assistant", **LISTS},
    ],
    ids=["text", "names", "ids", "arguments"],
)
async def test_sessions_take_no_more_memory_than_they_may(tmp_path, monkeypatch, fields):
    # They have a bound of their own.
    monkeypatch.setattr(firsts, "FIRSTS_BYTES", 0)
    model = ChatModel(make_chat_model(tmp_path / "m", CHATML_WITH_TOOLS, context_length=2**20))
    history, store = History(model, max_bytes=2 * 10**6), Store()

    async def session(number: int) -> None:
        key, messages = (f"run-abcdefghij.{number}.0", 1), [{"role": "system", "content": "s"}]
        for turn in range(12):
            messages.append(_said(fields, f"{turn:02} in {number}" * 20))
            messages.append({"role": "user", "content": "go on"})
            body = json.dumps({"messages": messages, "model": "m"}, ensure_ascii=False).encode()
            asked = parse_request(body, max_choices=1, opening=history.opening(key, body))
            prompt = await history.prompt(key, asked, store.read)
            sampled = np.arange(50, dtype=np.int32)
            history.remember(key, f"call-{number:010}-{turn:09}", prompt, Turn("assistant", "x" * 200), sampled)
            messages.append({"role": "assistant", "content": "x" * 200})

    assert 10**6 < await memory_of(session, 80) < 2.4 * 10**6


async def test_long_prompts_that_were_never_answered_take_no_more_memory_than_they_may(tmp_path):
    model = ChatModel(make_chat_model(tmp_path / "m", context_length=2**20))
    history, store = History(model, max_bytes=10**6), Store()

    async def attempt(number: int) -> None:
        key, turns = (f"run-abcdefghij.{number}.0", 1), [Turn("user", "a")]
        for turn in range(4):
            prompt = await history.prompt(key, request(*turns), store.read)
            history.remember(key, f"c{turn}", prompt, Turn("assistant", "x"), np.asarray([5, EOS], dtype=np.int32))
            turns.append(Turn("assistant", "x"))
            await history.prompt(key, request(*turns, Turn("user", f"{turn}" * 4000)), store.read)
            turns.append(Turn("user", "b"))

    assert 0.4 * 10**6 < await memory_of(attempt, 40) < 1.2 * 10**6


async def test_what_is_known_of_prompts_that_were_never_answered_takes_no_more_memory_than_it_may(tmp_path):
    model = ChatModel(make_chat_model(tmp_path / "m", context_length=2**20))
    history, store = History(model, max_bytes=2 * 10**6), Store()

    async def attempt(number: int) -> None:
        key, messages = (f"run-abcdefghij.{number}.0", 1), [{"role": "user", "content": "a"}]
        for turn in range(4):
            messages += [{"role": "assistant", "content": "never said"}, {"role": "user", "content": f"{turn}" * 2000}]
            body = json.dumps({"messages": [*messages, {"role": "user", "content": "x" * 4000}], "model": "m"}).encode()
            asked = parse_request(body, max_choices=1, opening=history.opening(key, body))
            await history.prompt(key, asked, store.read)

    assert 0.4 * 10**6 < await memory_of(attempt, 40) < 2.4 * 10**6


async def test_a_conversation_without_an_answer_in_it_reads_nothing(model):
    history, store = History(model, max_bytes=10**6), Store()
    await answer(history, store, [5, EOS], "x", Turn("system", "s"), Turn("user", "a"))
    assert store.reads == 0


async def test_a_prompt_must_leave_room_for_an_answer(model, tmp_path):
    small = ChatModel(make_chat_model(tmp_path / "small", context_length=32))
    with pytest.raises(ContextOverflow):
        await History(small, max_bytes=1).prompt(KEY, request(Turn("user", "x" * 40)), Store().read)


def test_spelling_that_agents_change_does_not_tell_conversations_apart():
    def last(*turns: Turn) -> bytes:
        return digest_chain(Conversation(turns, (), {}))[-1]

    said = Turn("assistant", " ok", tool_calls=(ToolCall("1", "f", '{"a": 1, "b": 2}'),))
    echoed = Turn("assistant", "ok ", name="me", tool_calls=(ToolCall("2", "f", '{"b":2,"a":1}'),))
    other = Turn("assistant", "ok", tool_calls=(ToolCall("1", "f", '{"a": 1, "b": 3}'),))
    huge = Turn("assistant", "ok", tool_calls=(ToolCall("1", "f", f'{{"a": {10**30}}}'),))
    assert last(said) == last(echoed)
    assert len({last(said), last(other), last(huge), last(Turn("user", "ok"))}) == 4


@pytest.mark.parametrize("turns", [0, 1], ids=["first", "after an answer"])
async def test_a_long_text_is_encoded_beside_the_calls_of_others(model, monkeypatch, turns):
    history, store, threads = History(model, max_bytes=2**20), Store(), []
    begin = [Turn("user", "hi")][:turns]
    if begin:
        await answer(history, store, [1, 2, EOS], "ab", *begin)
        begin.append(store.answers[0].answer)

    def encode(_model, text, *, after=None):
        threads.append((len(text) >= LONG_CHARACTERS, threading.current_thread() is threading.main_thread()))
        return np.arange(9, dtype=np.int32)

    monkeypatch.setattr(ChatModel, "encode", encode)
    await history.prompt(KEY, request(*begin, Turn("user", "x" * LONG_CHARACTERS)), store.read)
    assert threads == [(True, False)]


def test_an_answer_whose_tool_calls_the_template_leaves_out_is_not_kept() -> None:
    answer = Turn("assistant", "Now.", tool_calls=(ToolCall(id="1", name="look", arguments="{}"),))
    assert _is_kept(answer, ' Now.\n<call>{"name": "look"}</call>')
    assert not _is_kept(answer, "Now.")
    assert not _is_kept(answer, '<call>{"name": "look"}</call>')
