"""Streams through the gateway: how late the first token is, what a token costs, and how many calls may wait at once.

The stub's events are cumulative, as SGLang's are by default: each repeats all tokens so far. One row is of streams that
tell each token once, as with `--incremental-streaming-output`. After each measurement the calls and their tokens are
counted in the store.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench import load
from tests.bench.rows import Goal, Growth, Row
from tests.bench.served import Elsewhere, Stand, chat_body, http_request, stand

STREAMS = 256
TOKENS = 128
PACE_SECONDS = 0.04
"""256 streams then tell 6,400 tokens a second."""
SPREAD_SECONDS = 1.0
"""Over which streams begin, so that it is not their beginning alone that is measured."""
ONE_STREAM_CALLS, ONE_STREAM_TOKENS = 12, 4
GROWTH_STREAMS = 64
GROWTH_TOKENS = (32, 128, 512)

IN_FLIGHT = (125, 500, 2000)
HOLD_SECONDS = {125: 3.0, 500: 3.0, 2000: 30.0}
MIB = 2**20


@dataclass(frozen=True)
class _Streams:
    """Of one repeat; milliseconds."""

    first: float
    cpu_token: float
    engine_token: float


def rows(repeats: int) -> list[Row]:
    """2,000 calls that wait for 30 s, then first tokens and the cost of each at one stream and at 256."""
    with stand() as ours, Elsewhere() as elsewhere:
        bench = _Bench(ours, elsewhere)
        idle, peaks = ours.gateway.memory_bytes() / MIB, [bench.in_flight(calls) for calls in IN_FLIGHT]
        alone = [bench.one_stream() for _ in range(repeats)]
        together, first_direct, told_once = zip(*(bench.many_streams() for _ in range(repeats)), strict=True)
        by_tokens = [bench.streams(GROWTH_STREAMS, tokens).cpu_token for tokens in GROWTH_TOKENS]
    return [
        *_first_rows(alone, together, first_direct),
        *_token_rows(together, told_once, by_tokens),
        Row(
            part="streams",
            name=f"{IN_FLIGHT[-1]} calls in flight for 30 s: peak memory",
            unit="MiB",
            repeats=[peaks[-1]],
            baseline_name="before them",
            baseline=[idle],
            goal=Goal(at_most=1024),
            growth=Growth("calls in flight", "KiB a call", IN_FLIGHT, _each_kib(peaks, idle)),
            note="Each a connection of its own, of 64 attempts; all answered with 200 and counted in Postgres.",
        ),
    ]


def _first_rows(
    alone: Sequence[tuple[float, float]], together: Sequence[_Streams], first_direct: Sequence[float]
) -> list[Row]:
    return [
        Row(
            part="streams",
            name="one stream: added time to its first token",
            unit="ms",
            repeats=[through - direct for through, direct in alone],
            baseline_name="the engine alone",
            baseline=[direct for _, direct in alone],
            goal=Goal(at_most=5),
            note="Tokens counted in Postgres afterwards.",
        ),
        Row(
            part="streams",
            name=f"{STREAMS} streams: added median time to a first token",
            unit="ms",
            repeats=[one.first - direct for one, direct in zip(together, first_direct, strict=True)],
            baseline_name="the engine alone",
            baseline=list(first_direct),
            goal=Goal(at_most=5),
        ),
    ]


def _token_rows(together: Sequence[_Streams], told_once: Sequence[_Streams], by_tokens: list[float]) -> list[Row]:
    return [
        Row(
            part="streams",
            name=f"{STREAMS} streams of {TOKENS} tokens: CPU of the gateway for a token",
            unit="ms",
            repeats=[one.cpu_token for one in together],
            baseline_name="CPU of the stub for it",
            baseline=[one.engine_token for one in together],
            goal=Goal(at_most=0.05),
            growth=Growth("tokens of a stream", "ms CPU a token", GROWTH_TOKENS, by_tokens),
            note="All CPU time of the gateway over all tokens: the beginning and the record of each call are in it.",
        ),
        Row(
            part="streams",
            name=f"{STREAMS} streams of {TOKENS} tokens, each told once: CPU of the gateway for a token",
            unit="ms",
            repeats=[one.cpu_token for one in told_once],
            baseline_name="CPU of the stub for it",
            baseline=[one.engine_token for one in told_once],
            goal=Goal(at_most=0.05),
            note="As engines tell them with `--incremental-streaming-output`.",
        ),
    ]


def _each_kib(peaks: list[float], idle: float) -> list[float]:
    return [(peak - idle) * 1024 / calls for peak, calls in zip(peaks, IN_FLIGHT, strict=True)]


class _Bench:
    """The measurements."""

    def __init__(self, ours: Stand, elsewhere: Elsewhere) -> None:
        self._ours = ours
        self._elsewhere = elsewhere
        self._requests = [ours.request(number, stream=True) for number in range(len(ours.rollouts))]
        self._direct = http_request("/generate", chat_body(stream=True))
        ours.shape(tokens=4, pace_seconds=0.001)
        elsewhere.run(load.closed_loop, ours.gateway.url, self._requests, clients=32, calls=10 * len(self._requests))

    def one_stream(self) -> tuple[float, float]:
        """Milliseconds to the first token through the gateway, and of the engine."""
        ours, warm_up = self._ours, 5
        ours.shape(tokens=ONE_STREAM_TOKENS, seconds=0.0, pace_seconds=PACE_SECONDS)
        asked = [(ours.engine.url, self._direct), (ours.gateway.url, self._requests[0])]
        with ours.proven(ONE_STREAM_CALLS + warm_up, ONE_STREAM_TOKENS):
            direct, through = self._elsewhere.run(load.in_turns, asked, calls=ONE_STREAM_CALLS, warm_up=warm_up)
        return _median_ms(through.first_seconds), _median_ms(direct.first_seconds)

    def many_streams(self) -> tuple[_Streams, float, _Streams]:
        """256 streams, milliseconds to a first token from the engine alone, and streams that tell each token once."""
        together = self.streams(STREAMS, TOKENS)
        direct = self._at_once(self._ours.engine.url, [self._direct], STREAMS)
        return together, _median_ms(direct.first_seconds), self.streams(STREAMS, TOKENS, incremental=True)

    def streams(self, streams: int, tokens: int, *, incremental: bool = False) -> _Streams:
        """Streams at once through the gateway."""
        ours, pace = self._ours, PACE_SECONDS * streams / STREAMS
        ours.shape(tokens=tokens, seconds=0.0, pace_seconds=pace, incremental=incremental)
        before, engine_before = ours.gateway.cpu_seconds(), ours.engine.cpu_seconds()
        with ours.proven(streams, tokens):
            through = self._at_once(ours.gateway.url, self._requests, streams)
        cpu = ours.gateway.cpu_seconds() - before
        engine = ours.engine.cpu_seconds() - engine_before
        each = streams * tokens / 1000
        return _Streams(_median_ms(through.first_seconds), cpu / each, engine / each)

    def _at_once(self, url: str, requests: list[bytes], streams: int) -> load.Load:
        return self._elsewhere.run(load.one_each, url, requests, clients=streams, spread_seconds=SPREAD_SECONDS)

    def in_flight(self, calls: int) -> float:
        """The gateway's peak in MiB while so many calls wait for the engine at once."""
        ours, hold = self._ours, HOLD_SECONDS[calls]
        ours.shape(tokens=900, seconds=hold)
        requests = [ours.request(number) for number in range(len(ours.rollouts))]
        with ours.proven(calls, 900):
            found = self._elsewhere.run(
                load.one_each, ours.gateway.url, requests, clients=calls, spread_seconds=hold / 5
            )
        # The last began long before the first was answered: all were in flight at once.
        assert min(found.seconds) >= hold
        return ours.gateway.peak_bytes() / MIB


def _median_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000
