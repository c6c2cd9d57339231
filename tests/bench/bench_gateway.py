"""The gateway's budget: CPU and delay of a call and of a token, long sessions, and many calls at once.

The gateway is the real process with a durable Postgres. A stub engine answers at once. After each measurement the calls
and their tokens are counted in the store.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

import psycopg

from tests.bench import load
from tests.bench.litellm_proxy import proxy, version
from tests.bench.rows import Row
from tests.bench.served import Stand, Worker, chat_body, http_request, stand
from tests.bench.stored import process_seconds

TOKENS, LONE_CALLS = 900, 150
CLIENTS, CALLS = 32, 600
STREAMS, STREAM_TOKENS, PACE_SECONDS, SPREAD_SECONDS = 256, 128, 0.04, 1.0
IN_FLIGHT, WAIT_SECONDS = 2000, 20.0
TURNS, SESSIONS, LAST_TURNS, MESSAGE_BYTES, ANSWER_TOKENS = 100, 4, 5, 2000, 60
WORDS = "the agent read the table and wrote down the rows that it had found there before it continued "
MIB = 2**20


def rows(repeats: int) -> list[Row]:
    """Complete answers, streams, sessions, and calls in flight."""
    with stand() as running, Worker() as worker:
        bench = _Bench(running, worker)
        in_flight = bench.in_flight()
        alone = [bench.alone() for _ in range(repeats)]
        crowd = [bench.crowd() for _ in range(repeats)]
        streams = [bench.streams() for _ in range(repeats)]
        sessions = [bench.sessions(first=number * SESSIONS) for number in range(min(2, repeats))]
        beside = bench.beside_litellm(repeats)
    added, cpu = zip(*alone, strict=True)
    first, token = zip(*streams, strict=True)
    turns, stored = zip(*sessions, strict=True)
    at_100 = f"turn {TURNS} of a session, {MESSAGE_BYTES / 1000:g} KB messages"
    return [
        Row("gateway", f"answer of {TOKENS} tokens with its durable record: CPU", "ms", cpu, at_most=2.5),
        Row("gateway", f"answer of {TOKENS} tokens with its durable record: added p50", "ms", added, at_most=4),
        Row("gateway", f"{CLIENTS} clients: calls per second of CPU", "calls", crowd, at_least=300),
        Row("gateway", f"{STREAMS} streams: CPU of a token", "ms", token, at_most=0.15),
        Row("gateway", f"{STREAMS} streams: added median time to the first token", "ms", first, at_most=10),
        Row("gateway", f"{at_100}: CPU", "ms", turns, at_most=8),
        Row("gateway", f"{TURNS} turns stored, over {TURNS // 2} turns", "times the bytes", stored, at_most=2.2),
        Row("gateway", f"{IN_FLIGHT:,} calls in flight: peak memory", "MiB", [in_flight], at_most=1024),
        *beside,
    ]


class _Bench:
    """The measurements."""

    def __init__(self, running: Stand, worker: Worker) -> None:
        self._stand, self._worker = running, worker
        self._requests = [running.request(number) for number in range(len(running.rollouts))]
        self._streams = [running.request(number, stream=True) for number in range(len(running.rollouts))]
        running.shape(tokens=TOKENS)
        # Warm: the gateway has cached every attempt.
        worker.run(load.closed_loop, running.gateway.url, self._requests, clients=CLIENTS, calls=CALLS)

    def _cpu_seconds(self) -> float:
        return process_seconds(self._stand.gateway.process.pid)

    def alone(self) -> tuple[float, float]:
        """Added milliseconds and milliseconds of CPU for a call of one client."""
        running, warm_up = self._stand, 10
        running.shape(tokens=TOKENS)
        asked = [
            (running.engine.url, http_request("/generate", chat_body())),
            (running.gateway.url, self._requests[0]),
        ]
        before = self._cpu_seconds()
        with running.proven(LONE_CALLS + warm_up, TOKENS):
            direct, through = self._worker.run(load.in_turns, asked, calls=LONE_CALLS, warm_up=warm_up)
        cpu = (self._cpu_seconds() - before) / (LONE_CALLS + warm_up)
        added = statistics.median(through.seconds) - statistics.median(direct.seconds)
        return added * 1000, cpu * 1000

    def beside_litellm(self, repeats: int) -> list[Row]:
        """LiteLLM's proxy, which records nothing, with the calls of `alone`."""
        running, warm_up = self._stand, 10
        running.shape(tokens=TOKENS)
        request = http_request("/v1/chat/completions", chat_body())
        added, cpu = list[float](), list[float]()
        with TemporaryDirectory(prefix="bench-litellm-") as folder, proxy(Path(folder), running.engine.url) as server:
            asked = [(running.engine.url, request), (server.url, request)]
            for _ in range(repeats):
                before = process_seconds(server.process.pid)
                direct, through = self._worker.run(load.in_turns, asked, calls=LONE_CALLS, warm_up=warm_up)
                cpu.append((process_seconds(server.process.pid) - before) / (LONE_CALLS + warm_up) * 1000)
                added.append((statistics.median(through.seconds) - statistics.median(direct.seconds)) * 1000)
        name = f"LiteLLM {version()} on the same stub, answer of {TOKENS} tokens, not recorded"
        return [Row("gateway", f"{name}: CPU", "ms", cpu), Row("gateway", f"{name}: added p50", "ms", added)]

    def crowd(self) -> float:
        """Calls per second of CPU, for clients that ask without a pause."""
        running = self._stand
        running.shape(tokens=TOKENS)
        before = self._cpu_seconds()
        with running.proven(CALLS, TOKENS):
            self._worker.run(load.closed_loop, running.gateway.url, self._requests, clients=CLIENTS, calls=CALLS)
        return CALLS / (self._cpu_seconds() - before)

    def streams(self) -> tuple[float, float]:
        """Added milliseconds to the first token, and milliseconds of CPU for a token."""
        running = self._stand
        running.shape(tokens=STREAM_TOKENS, seconds=0.0, pace_seconds=PACE_SECONDS)
        times = {"clients": STREAMS, "spread_seconds": SPREAD_SECONDS}
        direct_request = http_request("/generate", chat_body(stream=True))
        direct = self._worker.run(load.one_each, running.engine.url, [direct_request], **times)
        before = self._cpu_seconds()
        with running.proven(STREAMS, STREAM_TOKENS):
            through = self._worker.run(load.one_each, running.gateway.url, self._streams, **times)
        cpu = (self._cpu_seconds() - before) / (STREAMS * STREAM_TOKENS)
        added = statistics.median(through.first_seconds) - statistics.median(direct.first_seconds)
        return added * 1000, cpu * 1000

    def in_flight(self) -> float:
        """Peak memory in MiB while so many calls wait for their engine."""
        running = self._stand
        running.shape(tokens=4, seconds=WAIT_SECONDS, pace_seconds=0.001)
        with running.proven(IN_FLIGHT, 4):
            self._worker.run(load.one_each, running.gateway.url, self._requests, clients=IN_FLIGHT, spread_seconds=5.0)
        running.shape(seconds=0.0)
        return running.gateway.peak_bytes() / MIB

    def sessions(self, first: int) -> tuple[float, float]:
        """Milliseconds of CPU for a call in the last turns, and the stored bytes of all turns over those of half."""
        running = self._stand
        running.shape(tokens=ANSWER_TOKENS, seconds=0.0)
        conversations: list[list[dict[str, str]]] = [[] for _ in range(SESSIONS)]
        before = 0.0
        with running.proven(SESSIONS * TURNS, ANSWER_TOKENS):
            for turn in range(1, TURNS + 1):
                if turn == TURNS - LAST_TURNS + 1:
                    before = self._cpu_seconds()
                for number, messages in enumerate(conversations, first):
                    text = f"Session {number}, turn {turn}: {WORDS * (MESSAGE_BYTES // len(WORDS) + 1)}"
                    messages.append({"role": "user", "content": text[:MESSAGE_BYTES]})
                    messages.append({"role": "assistant", "content": self._ask(number, messages)})
        cpu = (self._cpu_seconds() - before) / (SESSIONS * LAST_TURNS)
        rollouts = [running.rollouts[number] for number in range(first, first + SESSIONS)]
        return cpu * 1000, self._stored_bytes(rollouts, TURNS) / self._stored_bytes(rollouts, TURNS // 2)

    def _ask(self, number: int, messages: list[dict[str, str]]) -> str:
        url, headers = self._stand.address(number)
        # As OpenAI's client writes it.
        body = json.dumps({"messages": messages, "model": "policy"}, ensure_ascii=False, separators=(",", ":"))
        with urlopen(Request(url, data=body.encode(), headers=headers)) as response:
            return str(json.load(response)["choices"][0]["message"]["content"])

    def _stored_bytes(self, rollouts: list[str], turns: int) -> int:
        """Bytes of the last so many rows of each rollout's first turns, as Postgres stores them."""
        with psycopg.connect(self._stand.dsn) as connection:
            row = connection.execute(
                "SELECT sum(size) FROM (SELECT pg_column_size(c.*) AS size, row_number() OVER"
                " (PARTITION BY rollout_id ORDER BY sequence DESC) AS back FROM model_calls c"
                " WHERE run_id = %s AND rollout_id = ANY(%s)) AS sizes WHERE back > %s AND back <= %s",
                (self._stand.run_id, rollouts, TURNS - turns, TURNS),
            ).fetchone()
        assert row is not None
        return int(row[0])
