"""Agent sessions, and the exact tokens that the gateway made of them.

`recorded_sessions.json.gz` was recorded with the gateway of release 0.1.0's predecessor at commit f1d87af:

    python -m tests.contract.gateway.recorded_sessions --record

`restarted_gateway` was recorded again later: since the store keeps the order of a tool's members, a gateway that reads
an attempt back continues the sampled tokens of its answers, where it encoded them again before. So were
`unusual_tool_calls` and `reordered_arguments` (a malformed call is a tool call, and no template refuses its arguments),
`parallel_calls_refused` (the next prompt shows the one call that the agent was shown), and `unicode` (special tokens in
what a user says are letters).

Each session talks to the gateway over HTTP alone, with a scripted engine behind it, and is then read from Postgres.
Requests stream in turns: every second one is answered as a stream. The engine spells some words in pieces that no
encoder gives, so a prompt that encodes an answer again differs from one that continues its tokens.

A new recording is right only where prompts are meant to change: the tokens of running runs change with it.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import gzip
import json
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import httpx
import numpy as np
from sqlalchemy import select
from tokenizers import Tokenizer

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.embedded.servers import EmbeddedPostgres
from leyden.libs.store import tables
from leyden.libs.store.database import Database
from leyden.libs.store.migrate import migrate
from leyden.libs.store.records.chains import FullCall
from leyden.libs.store.records.chains import full_calls as read_full_calls
from leyden.services.gateway.app import create_app
from leyden.services.gateway.calls.context import seed_of_rollout
from leyden.services.gateway.settings import Settings
from tests.contract.gateway.recorded_models import FAMILIES, Family
from tests.fakes.scripted_engine import ScriptedEngine, running
from tests.support import builders

Json = dict[str, Any]
Calls = list[tuple[list[int], list[int]]]
"""Prompt and sampled tokens of each call, in order."""
RECORDING = Path(__file__).with_name("recorded_sessions.json.gz")
SEED = 40
SIBLINGS = 3


class RecordedCall(TypedDict):
    """One call: `parent` is the index of the latest earlier call whose tokens its prompt begins with."""

    prompt: list[int]
    sampled: list[int]
    parent: int | None


class RecordedSession(TypedDict):
    """One session: the HTTP status of each request, and the calls that are in the store."""

    statuses: list[int]
    calls: list[RecordedCall]


async def full_calls(database: Database, rollout_ids: Sequence[str]) -> Calls:
    """The full prompt and the sampled tokens of every recorded call of these rollouts, in order.

    Nothing else here knows how the store keeps calls.
    """
    table = tables.ModelCall
    query = select(table).where(table.rollout_id.in_(rollout_ids)).order_by(table.sequence, table.choice)
    calls: Calls = []
    async with database.read() as session:
        rows = (await session.scalars(query)).all()
        for row, full in zip(rows, await read_full_calls(session, rows), strict=True):
            assert isinstance(full, FullCall)
            calls.append((_ids(full.prompt_ids), _ids(row.sampled_ids)))
    return calls


def _ids(data: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(data, "<i4").tolist()
    return ids


class Speller:
    """Turns the script's texts into the engine's tokens.

    `script` has a text for each choice of the next request, which the choice's seed selects; `first` is the first's.
    A request without a seed has one choice, whose seed comes from its call.
    """

    def __init__(self, tokenizer: Tokenizer, stop: str) -> None:
        self.script: Sequence[str] = ()
        self.first = SEED
        self.tokenizer = tokenizer
        self._stop = tokenizer.token_to_id(stop)

    def says(self, body: Json) -> list[int]:
        """The tokens of a text; every second word is spelled letter by letter, the first one included."""
        choice = body["sampling_params"]["sampling_seed"] - self.first
        text = self.script[choice if 0 <= choice < len(self.script) else 0]
        spelled, words = list[int](), 0
        for token in self.tokenizer.encode(text, add_special_tokens=False).ids:
            word = self.tokenizer.id_to_token(token)
            if len(word) > 1 and word.lstrip("Ġ▁").isalpha():
                words += 1
                spelled += [self.tokenizer.token_to_id(letter) for letter in word] if words % 2 else [token]
            else:
                spelled.append(token)
        return [*spelled, self._stop]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=False)


@dataclass
class Stage:
    """A run of one family: its model folder, its engine and its gateway."""

    family: Family
    database: Database
    run: tables.Run
    speller: Speller
    ring: KeyRing
    settings: Settings
    http: httpx.AsyncClient
    groups: int = 0

    async def play(self, session: Callable[[Play], Awaitable[None]]) -> tuple[list[int], Calls]:
        """Plays a session in rollouts of its own; returns the status of each request and the recorded calls."""
        _, rollouts = await builders.add_group(self.database, self.run, self.groups, size=SIBLINGS)
        self.groups += 1
        for rollout in rollouts:
            await builders.add_attempt(self.database, rollout)
        async with AsyncExitStack() as stack:
            play = Play(self, rollouts, stack, self.http)
            await session(play)
        return play.statuses, await full_calls(self.database, [rollout.id for rollout in rollouts])


@asynccontextmanager
async def staged(folder: Path, database: Database, family: Family) -> AsyncIterator[Stage]:
    """A gateway and an engine for the sessions of a family."""
    run = await builders.add_run(database)
    model_path, keys = family.write(folder / "model"), folder / "keys.json"
    write_keys(keys, {"test": "s" * 40})
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    speller = Speller(tokenizer, family.stops[0])
    scripted = ScriptedEngine(speller.says, speller.decode, f"{run.id}:0", tokens_per_chunk=3)
    async with running(scripted) as engine:
        settings = Settings(
            model_path=model_path,
            database_url=database.dsn,
            capability_keys_file=keys,
            engine_urls=[engine.url],
            # The sampled calls of the sessions have this form in every family.
            tool_parsers={"default": "hermes"},
        )
        async with gateway(settings) as http:
            yield Stage(family, database, run, speller, KeyRing(keys), settings, http)


@asynccontextmanager
async def gateway(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a new gateway in this process."""
    app = create_app(settings)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway", timeout=60) as http,
    ):
        yield http


@dataclass
class Play:
    """The agents of one session."""

    stage: Stage
    rollouts: Sequence[tables.Rollout]
    stack: AsyncExitStack
    http: httpx.AsyncClient
    statuses: list[int] = field(default_factory=list)
    call_ids: int = 0

    async def ask(self, messages: list[Json], *says: str, sibling: int = 0, attempt: int = 1, **fields: Any) -> Json:
        """The assistant's message, of the first choice."""
        return (await self.choices(messages, *says, sibling=sibling, attempt=attempt, **fields))[0]

    async def choices(
        self, messages: list[Json], *says: str, sibling: int = 0, attempt: int = 1, **fields: Any
    ) -> list[Json]:
        """The assistant's message of each choice; the scripted text itself where the request is refused."""
        self.stage.speller.script = says
        stream = len(self.statuses) % 2 == 1
        body = {"model": "m", "messages": messages, "stream": stream, "seed": SEED, "n": len(says), **fields}
        rollout_id = self.rollouts[sibling].id
        self.stage.speller.first = seed_of_rollout(SEED, rollout_id)
        address = f"/r/{rollout_id}/{attempt}/v1/chat/completions"
        headers = {"authorization": f"Bearer {self._key(rollout_id, attempt)}"}
        response = await self.http.post(address, json=body, headers=headers)
        self.statuses.append(response.status_code)
        if response.status_code != 200:
            assert response.status_code == 400, response.text
            return [assistant(text) for text in says]
        if stream:
            answers = _joined(response.text, len(says))
        else:
            answers = [choice["message"] for choice in response.json()["choices"]]
        return [self._with_own_ids(answer) for answer in answers]

    async def end_attempt(self, sibling: int = 0) -> None:
        """Ends attempt 1 and begins attempt 2."""
        await builders.end_attempt(self.stage.database, self.rollouts[sibling].id)
        await builders.add_attempt(self.stage.database, self.rollouts[sibling], 2)

    async def start_gateway(self) -> httpx.AsyncClient:
        """A client of another gateway on the same store, which knows nothing but what is stored."""
        return await self.stack.enter_async_context(gateway(self.stage.settings))

    def _key(self, rollout_id: str, attempt: int) -> str:
        capability = Capability(
            run_id=self.stage.run.id,
            rollout_id=rollout_id,
            attempt=attempt,
            scopes=frozenset({Scope.MODEL}),
            expires_at=int(time.time()) + 600,
        )
        return sign(self.stage.ring, capability)

    def _with_own_ids(self, answer: Json) -> Json:
        if self.stage.family.prints_call_ids:
            for call in answer.get("tool_calls") or []:
                self.call_ids += 1
                call["id"] = f"call{self.call_ids:05}"
        return answer


def _joined(events: str, count: int) -> list[Json]:
    """The messages of a stream."""
    answers: list[Json] = [{"role": "assistant", "content": None} for _ in range(count)]
    for line in events.splitlines():
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
            answer, delta = answers[choice["index"]], choice["delta"]
            if delta.get("content") is not None:
                answer["content"] = (answer["content"] or "") + delta["content"]
            for call in delta.get("tool_calls") or []:
                calls = answer.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": "function", "function": {"name": "", "arguments": ""}})
                for name, text in call["function"].items():
                    calls[call["index"]]["function"][name] += text or ""
    return answers


def system(content: str) -> Json:
    return {"role": "system", "content": content}


def user(content: Any) -> Json:
    return {"role": "user", "content": content}


def assistant(content: str) -> Json:
    return {"role": "assistant", "content": content}


def result(answer: Json, index: int, content: str) -> Json:
    """The result of a call; a call that was not understood gets one, too."""
    calls = answer.get("tool_calls") or []
    return {"role": "tool", "tool_call_id": calls[index]["id"] if index < len(calls) else "none", "content": content}


def sampled_call(city: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"city":  "{city}", "step": 1}}}}\n</tool_call>'


def tool(name: str, description: str = "The weather in a city") -> Json:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}, "step": {"type": "integer"}}}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS = [tool("weather"), tool("time", "The time in a city, « là-bas »")]
BRIEF = system("You answer the question of the user in few words.")
QUESTION = user("What is the weather in Paris?")


async def plain(play: Play) -> None:
    messages = [BRIEF]
    for number, text in enumerate(("It is the rain.", "Go on to the answer, step by step.", "No.", "You are right!")):
        messages.append(user(f"Question number {number} of the user"))
        messages.append(await play.ask(messages, text))


async def without_system(play: Play) -> None:
    messages: list[Json] = []
    for number in range(3):
        messages.append(user(f" the question {number}\n"))
        messages.append(await play.ask(messages, f"the answer is {number}"))


async def one_tool_call(play: Play) -> None:
    messages = [BRIEF, QUESTION]
    for city in ("Paris", "Rome"):
        answer = await play.ask(messages, sampled_call(city), tools=TOOLS)
        messages += [answer, result(answer, 0, f"rain in {city}")]
        messages += [await play.ask(messages, f"There is rain in {city}.", tools=TOOLS), user("And the time?")]
    await play.ask(messages, "Noon.", tools=TOOLS)


async def tool_call_after_text(play: Play) -> None:
    messages = [QUESTION]
    for text in (f"Let me think of the weather. \n\n{sampled_call('Paris')}\n", f"\n{sampled_call('Rome')} So.", ""):
        answer = await play.ask(messages, text, tools=TOOLS)
        messages += [answer, result(answer, 0, "rain")]
    await play.ask(messages, "Done.", tools=TOOLS)


async def parallel_tool_calls(play: Play) -> None:
    messages = [BRIEF, QUESTION]
    both = f"{sampled_call('Paris')}\n{sampled_call('Rome', 'time')}"
    answer = await play.ask(messages, both, tools=TOOLS)
    for order in ((0, 1), (1, 0)):
        branch = [*messages, answer, *(result(answer, index, f"result {index}") for index in order)]
        branch += [await play.ask(branch, "Rain, and noon.", tools=TOOLS), user("Are you sure?")]
        branch += [await play.ask(branch, f"Yes. {both}", tools=TOOLS)]
        branch += [result(branch[-1], 1, "later"), result(branch[-1], 0, "snow")]
        await play.ask(branch, "Snow, and later.", tools=TOOLS)


async def parallel_calls_refused(play: Play) -> None:
    both, messages = f"{sampled_call('Paris')}{sampled_call('Rome')}", [QUESTION]
    answer = await play.ask(messages, both, tools=TOOLS, parallel_tool_calls=False)
    messages += [answer, result(answer, 0, "rain")]
    messages += [await play.ask(messages, both, tools=TOOLS, tool_choice="none"), user("Go on.")]
    await play.ask(messages, "The answer.", tools=TOOLS)


async def branches_of_one_answer(play: Play) -> None:
    answer = await play.ask([QUESTION], sampled_call("Paris"), tools=TOOLS)
    branches = [[QUESTION, answer, result(answer, 0, text)] for text in ("rain", "snow")]
    for number in range(3):
        for index, branch in enumerate(branches):
            branch += [await play.ask(branch, f"step {number} of {index}", tools=TOOLS), user(f"Go on, {number}")]
    await play.ask(branches[0], "the end", tools=TOOLS)


async def one_result_more_in_a_branch(play: Play) -> None:
    answer = await play.ask([QUESTION], f"{sampled_call('Paris')}{sampled_call('Rome')}", tools=TOOLS)
    short = [QUESTION, answer, result(answer, 0, "rain")]
    later = [await play.ask(short, "Rain.", tools=TOOLS), user("And?")]
    await play.ask([*short, *later], "No more.", tools=TOOLS)
    await play.ask([*short, result(answer, 1, "snow")], "Rain and snow.", tools=TOOLS)
    await play.ask([*short, result(answer, 1, "snow"), *later], "Both.", tools=TOOLS)
    await play.ask([*short, *later], "No more of it.", tools=TOOLS)


async def edited_answer(play: Play) -> None:
    messages = [BRIEF, user("one")]
    for number in range(3):
        messages += [await play.ask(messages, f"the answer {number}"), user(f"next {number}")]
    edited = copy.deepcopy(messages)
    edited[4]["content"] = "the user edited this answer"
    for messages_now in (edited, messages, edited):
        messages_now += [await play.ask(messages_now, "Go on with the system."), user("again")]
    await play.ask(edited, "end")


async def answers_never_given(play: Play) -> None:
    messages = [BRIEF, user("2+2"), assistant("4"), user("2+3"), assistant("5")]
    for number in range(3):
        messages.append(user(f"2+{number + 4}"))
        messages.append(await play.ask(messages, f"the result is {number + 6}"))
    messages[4] = assistant("five")
    await play.ask([*messages, user("Go on")], "on")


async def dropped_last_message(play: Play) -> None:
    messages = [BRIEF]
    for number in range(5):
        messages.append(user(f"question {number}"))
        reminder = {"role": "system" if number % 2 else "user", "content": f"step {number} of 5"}
        messages.append(await play.ask([*messages, reminder], "the answer of the assistant"))
    await play.ask([*messages, user("the last question")], "the last answer")


async def dropped_last_messages_of_several(play: Play) -> None:
    messages = [BRIEF, user("Go on")]
    for number in range(4):
        state = [user(f"state {part}: {number}") for part in range(3 if number % 2 else 6)]
        answer = await play.ask([*messages, *state], sampled_call(f"city {number}"), tools=TOOLS)
        messages += [answer, result(answer, 0, f"result {number}")]
    await play.ask(messages, "the end", tools=TOOLS)


async def replaced_last_question(play: Play) -> None:
    messages = [BRIEF, user("a")]
    messages.append(await play.ask(messages, "the first answer"))
    for text in ("first try", "second try", "first try"):
        answer = await play.ask([*messages, user(text)], f"you said {text}")
    messages += [user("first try"), answer, user("Go on")]
    messages.append(await play.ask(messages, "on and on"))
    await play.ask([*messages[:2], user("more"), *messages[2:]], "the weather")


async def same_question_again(play: Play) -> None:
    for _ in range(3):
        answer = await play.ask([QUESTION], "the rain")
    messages = [QUESTION, answer, user("Why?")]
    first = await play.ask(messages, "Think of the rain!")
    await play.ask(messages, "the system")
    await play.ask([*messages, first, user("So?")], "So it is.")


async def changed_system_prompt(play: Play) -> None:
    messages = [BRIEF]
    for number in range(4):
        messages[0] = system(f"You are at step {number // 2}.")
        messages.append(user(f"question {number}"))
        messages.append(await play.ask(messages, f"the answer {number}", tools=TOOLS))
    messages[0] = system("You are at step 0.")
    await play.ask([*messages, user("back")], "back at the question", tools=TOOLS)
    await play.ask([*messages[1:], user("back")], "without the system", tools=TOOLS)


async def system_messages_between(play: Play) -> None:
    messages = [BRIEF, system("Two of them.")]
    for number in range(3):
        messages += [user(f"question {number}"), system(f"note {number}")]
        messages.append(await play.ask(messages, f"the answer {number}"))


async def two_choices(play: Play) -> None:
    messages = [BRIEF, QUESTION]
    first, second = await play.choices(messages, "the rain", "the snow in Paris")
    for answer in (second, first, second):
        branch = [*messages, answer, user("Are you sure?")]
        again = await play.choices(branch, "Yes.", "No, the system is wrong.", "Yes.")
        await play.ask([*branch, again[1], user("Why?")], "the reason")
        await play.ask([*branch, again[2], user("Why?")], "the other reason")


async def two_choices_of_tool_calls(play: Play) -> None:
    answers = await play.choices([QUESTION], sampled_call("Paris"), sampled_call("Rome"), tools=TOOLS)
    for answer in (answers[1], answers[0], answers[1]):
        branch = [QUESTION, answer, result(answer, 0, "rain")]
        branch.append(await play.ask(branch, "It is the rain.", tools=TOOLS))
        await play.ask([*branch, user("?")], "Yes.", tools=TOOLS)


async def stop_strings(play: Play) -> None:
    messages = [BRIEF, QUESTION]
    for number in range(4):
        text = f"Thought {number} of the weather\nObservation: rain"
        messages.append(await play.ask(messages, text, stop=["Observation:", "never"]))
        messages.append(user(f"Observation: result {number}"))
    await play.ask(messages, "the answer")


async def cut_by_length(play: Play) -> None:
    messages = [BRIEF, QUESTION]
    for tokens in (1, 2, 5, 9):
        answer = await play.ask(messages, "the weather in Paris 日本 is the rain", max_tokens=tokens)
        messages += [answer, user("Go on.")]
    messages.append(await play.ask(messages, sampled_call("Paris"), tools=TOOLS, max_completion_tokens=12))
    await play.ask([*messages, user("Go on.")], "the answer", tools=TOOLS)


THOUGHT = "<think>\nThe user is in Paris.\nSo think of the rain.\n</think>\n\nIt is the rain."


async def thoughts_echoed(play: Play) -> None:
    messages = [BRIEF]
    for number in range(4):
        messages.append(user(f"question {number}"))
        messages.append(await play.ask(messages, f"{THOUGHT} {number}"))


async def thoughts_left_out(play: Play) -> None:
    """The agent sends other thoughts than were sampled: no prompt continues those tokens."""
    messages = [BRIEF]
    for number in range(4):
        messages.append(user(f"question {number}"))
        answer = await play.ask(messages, f"{THOUGHT} {number}")
        answer["content"] = (answer["content"] or "").split("</think>")[-1].lstrip()
        answer["reasoning_content"] = "The user is in Paris."
        messages.append(answer)


async def thoughts_between_tool_calls(play: Play) -> None:
    messages = [BRIEF]
    for question in ("rain?", "snow?"):
        messages.append(user(question))
        for number in range(2):
            text = f"<think>\nstep {number}\n</think>\n\n{sampled_call('Paris')}"
            messages.append(await play.ask(messages, text, tools=TOOLS))
            messages.append(result(messages[-1], 0, f"result {number}"))
        messages.append(await play.ask(messages, f"{THOUGHT} {question}", tools=TOOLS))


async def unusual_thoughts(play: Play) -> None:
    """Thoughts that are never closed are reasoning, too: a template that drops earlier reasoning drops them."""
    messages = [BRIEF]
    for text in ("<think></think>no thought", "one</think>two</think>three", "<think>never closed", "</think>", "ok"):
        messages += [user("Think."), await play.ask([*messages, user("Think.")], text)]


async def no_thinking(play: Play) -> None:
    messages = [BRIEF]
    for number, text in enumerate(("the answer", THOUGHT, "the result", "the end")):
        messages.append(user(f"question {number}"))
        options = {"enable_thinking": False} if number != 2 else {"enable_thinking": True}
        messages.append(await play.ask(messages, text, chat_template_kwargs=options))


async def template_options(play: Play) -> None:
    messages = [BRIEF]
    options: list[Json | None] = [{"reasoning_effort": "high", "date_string": "Monday"}, None, {"unknown": [1]}, {}]
    for number, given in enumerate([*options, options[0]]):
        messages.append(user(f"question {number}"))
        fields = {} if given is None else {"chat_template_kwargs": given}
        messages.append(await play.ask(messages, f"the answer {number}", **fields))


async def content_parts(play: Play) -> None:
    def parts(*texts: str) -> list[Json]:
        return [{"type": "text", "text": text} for text in texts]

    messages: list[Json] = [{"role": "system", "content": parts("Be", "brief.")}]
    for number in range(3):
        messages.append(user(parts("question", f"number {number}", "")))
        answer = await play.ask(messages, f"the answer {number}")
        messages.append({"role": "assistant", "content": parts(answer["content"])})
    messages[1] = user("question\nnumber 0\n")
    messages += [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}, user([])]
    await play.ask(messages, "the end")


async def developer_role(play: Play) -> None:
    messages = [{"role": "developer", "content": "You answer in few words."}]
    for number in range(3):
        messages.append(user(f"question {number}"))
        messages.append(await play.ask(messages, f"the answer {number}", tools=TOOLS))
    messages[0] = system("You answer in few words.")
    await play.ask([*messages, user("Go on.")], "on", tools=TOOLS)


async def respaced_arguments(play: Play) -> None:
    messages = [QUESTION]
    for number, separators in enumerate([(",", ":"), (", ", ": "), (" ,\n", " : ")]):
        answer = await play.ask(messages, f"Let me see. {sampled_call('Paris')}\n", tools=TOOLS)
        for call in answer.get("tool_calls") or []:
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, separators=separators, sort_keys=number == 1)
            call["id"] = f"other{number:04}"
        answer |= {"name": "agent", "content": f" {answer['content'] or ''}\n", "refusal": None, "audio": None}
        messages += [answer, result(answer, 0, "rain")]
    await play.ask(messages, "the end", tools=TOOLS)


async def reordered_arguments(play: Play) -> None:
    answer = await play.ask([QUESTION], sampled_call("Paris"), tools=TOOLS)
    for arguments in ('{"step": 1, "city": "Paris"}', '{"city": "Rome", "step": 1}', '{"city": "Paris"', ""):
        echoed = copy.deepcopy(answer)
        for call in echoed.get("tool_calls") or []:
            call["function"]["arguments"] = arguments
        branch = [QUESTION, echoed, result(echoed, 0, "rain")]
        await play.ask([*branch, await play.ask(branch, "Rain.", tools=TOOLS), user("?")], "Yes.", tools=TOOLS)


async def unusual_tool_calls(play: Play) -> None:
    messages = [QUESTION]
    for text in (
        '<tool_call>{"name": "weather", "arguments": {"city": }</tool_call>',
        '<tool_call>{"arguments": {"city": "« là »", "n": 1e400, "big": 100000000000000000000}, "name": "time"}',
        '<tool_call>{"name": "time", "parameters": {"a": [1,  {"b": null}]}}</tool_call> and so on',
        '<tool_call>{"name": "time", "arguments": "{\\"x\\": 1}"}</tool_call>',
        '<tool_call>{"name": "time"}</tool_call>',
        '{"name": "weather", "parameters": {"city": "Paris"}}',
    ):
        answer = await play.ask(messages, text, tools=TOOLS)
        calls = answer.get("tool_calls") or []
        messages += [answer, *(result(answer, 0, "ok") for _ in calls[:1])]
        messages += [] if calls else [user("Try again.")]
    await play.ask(messages, "the end", tools=TOOLS)


async def tool_calls_and_null_content(play: Play) -> None:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    said: Json = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [QUESTION, said, {"role": "tool", "tool_call_id": "call00001", "content": ""}]
    messages.append(await play.ask(messages, sampled_call("Rome"), tools=TOOLS))
    messages += [result(messages[-1], 0, '{"rain": true}'), await play.ask(messages, "the rain", tools=TOOLS)]
    for content in (None, ""):
        messages[3] = {**messages[3], "content": content}
        await play.ask([*messages, user("?")], "Yes.", tools=TOOLS)


async def unicode(play: Play) -> None:
    messages = [system("Réponds — « vite ».")]
    texts = ("日本語のテキスト", "👩‍👩‍👧 and 😀", "e\u0301 é \u00a0 \u200b\ufeff", "tab\tand\r\nlines\n\n\n", "العربية")
    for text in texts:
        messages.append(user(f"<|im_end|> {text} </s><|eot_id|>"))
        messages.append(await play.ask(messages, f"{text}, the answer"))
    messages.append(user("\u2028"))
    await play.ask(messages, "日本語のテキスト", max_tokens=4)


async def empty_answers(play: Play) -> None:
    messages = [QUESTION]
    for text in ("", "the answer", "", " ", "\n\n"):
        messages.append(await play.ask(messages, text))
        messages.append(user("Go on."))
    await play.ask(messages, "on")


async def white_space_around_answers(play: Play) -> None:
    messages = [QUESTION]
    for number, text in enumerate((" the answer ", "\nthe answer\n\n", "the answer  ", "\t the answer")):
        answer = await play.ask(messages, text)
        if number % 2:
            answer["content"] = (answer["content"] or "").strip()
        messages += [answer, user("  Go on.  ")]
    await play.ask(messages, "on")


async def twenty_tools(play: Play) -> None:
    tools = [tool(f"tool_{number}", f"The tool of number {number}") for number in range(20)]
    messages = [BRIEF, QUESTION]
    for number in range(3):
        answer = await play.ask(messages, sampled_call("Paris", f"tool_{number}"), tools=tools)
        messages += [answer, result(answer, 0, f"result {number}")]
    await play.ask(messages, "the end", tools=tools)


async def changed_tools(play: Play) -> None:
    messages = [BRIEF]
    for number, tools in enumerate((TOOLS, TOOLS[:1], None, [], TOOLS[::-1], TOOLS)):
        messages.append(user(f"question {number}"))
        messages.append(await play.ask(messages, f"the answer {number}", tools=tools))


async def named_users(play: Play) -> None:
    messages: list[Json] = [BRIEF]
    for number in range(4):
        messages.append({**user(f"question {number}"), "name": f"user_{number % 2}"})
        messages.append({**await play.ask(messages, f"the answer {number}"), "name": "assistant"})
    messages[1].pop("name")
    await play.ask([*messages, user("Go on.")], "on")


async def last_message_is_an_answer(play: Play) -> None:
    messages = [QUESTION, assistant("The weather is")]
    messages.append(await play.ask(messages, "the rain"))
    messages.append(await play.ask(messages, "in Paris"))
    messages.append(user("Go on."))
    messages.append(await play.ask(messages, "on"))
    await play.ask(messages[:3], "the snow")


async def summed_up(play: Play) -> None:
    messages = [BRIEF]
    for number in range(4):
        messages += [user(f"question {number}"), await play.ask([*messages, user(f"question {number}")], "the answer")]
    short = [BRIEF, user("So far: four questions, and the answer.")]
    for number in range(3):
        short += [await play.ask(short, f"the result {number}"), user(f"more {number}")]
    await play.ask([*messages, user("back")], "back")
    await play.ask([*short[:2], *messages[5:], user("both")], "both")


async def thirty_turns(play: Play) -> None:
    messages = [BRIEF]
    for number in range(30):
        if number % 3 == 2:
            messages.append(result(messages[-1], 0, f"result {number} of the tool"))
        else:
            messages.append(user(f"question number {number} of the user"))
        text = sampled_call("Paris") if number % 3 == 1 else f"the answer {number}"
        messages.append(await play.ask(messages, text, tools=TOOLS))


async def long_document(play: Play) -> None:
    messages = [BRIEF, user("the weather in Paris is the rain\n" * 520)]
    for number in range(3):
        messages.append(await play.ask(messages, f"the answer {number}"))
        messages.append(user(f"question {number}"))


async def equal_first_prompts(play: Play) -> None:
    sessions = [[BRIEF, QUESTION] for _ in range(SIBLINGS)]
    for number in range(3):
        for sibling, messages in enumerate(sessions):
            text = "the rain" if number == 0 else f"the answer {number} of {sibling}"
            messages += [await play.ask(messages, text, sibling=sibling), user(f"Go on {number}")]


async def interleaved_attempts(play: Play) -> None:
    """A second attempt begins as the first one did, between the calls of a sibling."""
    other = [BRIEF, QUESTION]
    sessions = {1: [BRIEF, QUESTION], 2: [BRIEF, QUESTION]}
    for attempt, messages in sessions.items():
        if attempt == 2:
            await play.end_attempt()
        for number in range(3):
            answer = await play.ask(messages, sampled_call("Paris"), tools=TOOLS, attempt=attempt)
            messages += [answer, result(answer, 0, f"result {number}")]
            other += [await play.ask(other, f"the answer {number}", tools=TOOLS, sibling=1), user("Go on.")]
    # An answer of the first attempt is none of the second.
    await play.ask([*sessions[1], user("So?")], "So.", tools=TOOLS, attempt=2)


async def restarted_gateway(play: Play) -> None:
    messages = [BRIEF, QUESTION]
    for number in range(3):
        play.http = await play.start_gateway()
        answer = await play.ask(messages, f"the step {number}\n{sampled_call('Paris')}", tools=TOOLS)
        messages += [answer, result(answer, 0, f"result {number}")]
        messages += [await play.ask(messages, f"{THOUGHT} {number}", tools=TOOLS), user(f"Go on {number}")]
    edited = copy.deepcopy(messages)
    edited[4]["content"] = "edited"
    play.http = await play.start_gateway()
    await play.ask(edited, "after the edit", tools=TOOLS)
    await play.ask(messages, "as it was", tools=TOOLS)


async def two_gateways(play: Play) -> None:
    gateways = [play.http, await play.start_gateway()]
    messages = [BRIEF]
    branch = [BRIEF, QUESTION]
    for number in range(5):
        play.http = gateways[number % 2]
        messages.append(user(f"question {number}"))
        messages.append(await play.ask(messages, f"the answer {number}"))
        branch += [await play.ask(branch, "the rain"), user("Are you sure?")]


SESSIONS: dict[str, Callable[[Play], Awaitable[None]]] = {
    session.__name__: session
    for session in (
        plain, without_system, one_tool_call, tool_call_after_text, parallel_tool_calls, parallel_calls_refused,
        branches_of_one_answer, one_result_more_in_a_branch, edited_answer, answers_never_given, dropped_last_message,
        dropped_last_messages_of_several, replaced_last_question, same_question_again, changed_system_prompt,
        system_messages_between, two_choices, two_choices_of_tool_calls, stop_strings, cut_by_length, thoughts_echoed,
        thoughts_left_out, thoughts_between_tool_calls, unusual_thoughts, no_thinking, template_options, content_parts,
        developer_role, respaced_arguments, reordered_arguments, unusual_tool_calls, tool_calls_and_null_content,
        unicode, empty_answers, white_space_around_answers, twenty_tools, changed_tools, named_users,
        last_message_is_an_answer, summed_up, thirty_turns, long_document, equal_first_prompts, interleaved_attempts,
        restarted_gateway, two_gateways,
    )
}  # fmt: skip


def as_recorded(statuses: list[int], calls: Calls) -> RecordedSession:
    """A session as the recording holds it."""
    recorded: list[RecordedCall] = []
    for index, (prompt, sampled) in enumerate(calls):
        earlier = (place for place in reversed(range(index)) if _begins_with(prompt, calls[place]))
        recorded.append({"prompt": prompt, "sampled": sampled, "parent": next(earlier, None)})
    return {"statuses": statuses, "calls": recorded}


def _begins_with(prompt: list[int], call: tuple[list[int], list[int]]) -> bool:
    tokens = [*call[0], *call[1]]
    return prompt[: len(tokens)] == tokens


def read_recording() -> dict[str, dict[str, RecordedSession]]:
    """Sessions by family and name."""
    recording: dict[str, dict[str, RecordedSession]] = json.loads(gzip.decompress(RECORDING.read_bytes()))
    return recording


async def _record(folder: Path, dsn: str, titles: Sequence[str]) -> None:
    """Records the sessions with these titles anew; all where none is named."""
    database, recording = Database(dsn), read_recording() if titles else {}
    try:
        for name, family in FAMILIES.items():
            async with staged(folder / name, database, family) as stage:
                recording[name] = recording.get(name, {}) | {
                    title: as_recorded(*await stage.play(session))
                    for title, session in SESSIONS.items()
                    if not titles or title in titles
                }
    finally:
        await database.close()
    text = json.dumps(recording, separators=(",", ":")).encode()
    RECORDING.write_bytes(gzip.compress(text, 9, mtime=0))
    calls = [call for sessions in recording.values() for session in sessions.values() for call in session["calls"]]
    parents = sum(call["parent"] is not None for call in calls)
    print(f"{len(calls)} calls, {parents} with a parent, {RECORDING.stat().st_size} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="*", required=True, metavar="SESSION", help="record these sessions, or all")
    titles = parser.parse_args().record
    with tempfile.TemporaryDirectory() as name:
        server = EmbeddedPostgres(Path(name) / "postgres", durable=False)
        try:
            dsn = server.start()
            migrate(dsn)
            asyncio.run(_record(Path(name), dsn, titles))
        finally:
            server.stop()


if __name__ == "__main__":
    main()
