"""A scripted judge: a server of OpenAI's chat completions whose answers a test writes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True)
class Said:
    """One answer. Args: content: of the message; seconds: before it is sent; hangs_up: the connection ends instead"""

    content: str | None = None
    status: int = 200
    seconds: float = 0.0
    finish_reason: str = "stop"
    headers: dict[str, str] = field(default_factory=dict)
    message: dict[str, Any] = field(default_factory=dict)
    hangs_up: bool = False


def scored(score: object, reason: str = "because") -> Said:
    return Said(json.dumps({"reason": reason, "score": score}))


def ranked(scores: dict[str, object], reason: str = "because") -> Said:
    """Scores by id."""
    given = [{"id": name, "score": score} for name, score in scores.items()]
    return Said(json.dumps({"reason": reason, "scores": given}))


def compared(body: dict[str, Any]) -> dict[str, str]:
    """The texts of a comparison by their ids, in the order of the question; each stands between equal lines."""
    found = dict[str, str]()
    lines = body["messages"][1]["content"].split("\n")
    while lines:
        end = lines.index(lines[0], 1)
        found[lines[0].split()[1]] = "\n".join(lines[1:end])
        lines = lines[end + 2 :]
    return found


@dataclass
class ScriptedJudge:
    """The address, the requests so far, and the answers: in order, the last one for ever."""

    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    answer: Callable[[dict[str, Any], int], Said] = lambda _body, _number: scored(3)

    def says(self, *answers: Said) -> None:
        self.answer = lambda _body, number: answers[min(number, len(answers) - 1)]

    def judged(self, place: int = -1) -> tuple[str, str]:
        """The word and the text between the two lines with it."""
        word, *lines, last = self.bodies[place]["messages"][1]["content"].split("\n")
        assert word == last
        return word, "\n".join(lines)

    async def _answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        said = self.answer(self.bodies[-1], len(self.bodies) - 1)
        await asyncio.sleep(said.seconds)
        if said.hangs_up and request.transport is not None:
            request.transport.abort()
        message = {"role": "assistant", "content": said.content, **said.message}
        document = {
            "choices": [{"index": 0, "message": message, "finish_reason": said.finish_reason}],
            "usage": {"prompt_tokens": 100, "completion_tokens": 20},
        }
        return web.json_response(document, status=said.status, headers=said.headers)


@asynccontextmanager
async def scripted_judge() -> AsyncIterator[ScriptedJudge]:
    judge = ScriptedJudge()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", judge._answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    judge.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    try:
        yield judge
    finally:
        await runner.cleanup()


@contextmanager
def judge_beside() -> Iterator[ScriptedJudge]:
    """A scripted judge in a thread of its own, for tests whose own code is synchronous."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="scripted judge")
    thread.start()
    served = scripted_judge()
    try:
        judge = asyncio.run_coroutine_threadsafe(served.__aenter__(), loop).result(60)
        try:
            yield judge
        finally:
            asyncio.run_coroutine_threadsafe(served.__aexit__(None, None, None), loop).result(60)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
