"""What the gateway adds to a call, and how many it carries: an engine that answers at once with 38 KB, 900 tokens.

The gateway is started as an operator starts it, with its log, Postgres with its commits, and a key for each attempt.
After each measurement the calls and their tokens are counted in the store.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from functools import partial

from tests.bench import load
from tests.bench.rows import Goal, Growth, Row
from tests.bench.served import Elsewhere, Stand, chat_body, http_request, stand

TOKENS = 900
SIZES = (225, 900, 3600)
LONE_CALLS, LONE_WARM_UP = 150, 10
CROWDS = (16, 64, 256)
CROWD_CALLS = 1000
LOAD = 0.7
SPELLS, SPELL_CALLS = 5, 300
SPELL = "Each spell of 300 calls at 70 % of what saturated right before it; seconds count from when a call was due."
RECORD_BYTES = 16_000
"""A record of such a call: ids, log-probabilities, versions, messages and the answer."""


@dataclass(frozen=True)
class _Delay:
    """99th percentiles: what the gateway adds, and the engine alone."""

    added: float
    direct: float


@dataclass
class _Crowd:
    """What clients at once came to, a value per repeat."""

    per_core: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    by_chance: list[_Delay] = field(default_factory=list)
    evenly: list[_Delay] = field(default_factory=list)


def rows(repeats: int) -> list[Row]:
    """One client; 32 and 256 clients; both beside the engine asked directly."""
    with stand() as ours, Elsewhere() as elsewhere:
        bench = _Bench(ours, elsewhere)
        alone = [bench.alone(TOKENS) for _ in range(repeats)]
        commits = [bench.commit() for _ in range(repeats)]
        crowds = {clients: _Crowd() for clients in (32, 256)}
        for _ in range(repeats):
            for clients, crowd in crowds.items():
                bench.crowd(clients, crowd)
        by_size = [bench.alone(tokens) for tokens in SIZES]
        by_crowd = [1000 / bench.saturated(clients)[0] for clients in CROWDS]
    added, direct, cpu = ([getattr(one, name) for one in alone] for name in ("added", "direct", "cpu"))
    checked = "Calls and tokens counted in Postgres afterwards."
    return [
        Row(
            part="gateway",
            name="a call of one client, 38 KB answer: added p50",
            unit="ms",
            repeats=added,
            baseline_name="the engine alone",
            baseline=direct,
            goal=Goal(at_most=2.0),
            growth=Growth("tokens", "ms added, 1000 tokens", SIZES, [_per_thousand(one) for one in by_size]),
            note=f"The record is durable before the answer leaves. {checked}",
        ),
        Row(
            part="gateway",
            name="a call of one client, 38 KB answer: CPU of the gateway",
            unit="ms",
            repeats=cpu,
            baseline_name="one lone commit of its record",
            baseline=commits,
            goal=Goal(at_most=2.5),
        ),
        *(row for clients, crowd in crowds.items() for row in _crowd_rows(clients, crowd, by_crowd)),
    ]


def _crowd_rows(clients: int, crowd: _Crowd, by_crowd: list[float]) -> list[Row]:
    return [
        Row(
            part="gateway",
            name=f"{clients} clients: calls a second and core of the gateway",
            unit="calls/s",
            repeats=crowd.per_core,
            baseline_name="by the wall, with all else on the machine",
            baseline=crowd.per_second,
            goal=Goal(at_least=400),
            growth=Growth("clients", "ms CPU a call", CROWDS, by_crowd),
        ),
        _delay_row(
            f"70 % of what {clients} clients get: added p99",
            crowd.by_chance,
            f"{SPELL} Calls come by chance and wait for nobody.",
        ),
        _delay_row(
            f"70 % of what {clients} clients get, evenly: added p99",
            crowd.evenly,
            f"{SPELL} Each client's calls are due at even distances.",
        ),
    ]


def _delay_row(name: str, delays: list[_Delay], note: str) -> Row:
    return Row(
        part="gateway",
        name=name,
        unit="ms",
        repeats=[one.added for one in delays],
        baseline_name="the engine alone",
        baseline=[one.direct for one in delays],
        goal=Goal(at_most=25),
        note=note,
    )


@dataclass(frozen=True)
class _Alone:
    tokens: int
    added: float
    direct: float
    cpu: float


def _per_thousand(one: _Alone) -> float:
    return one.added / one.tokens * 1000


class _Bench:
    """The measurements; milliseconds throughout."""

    def __init__(self, ours: Stand, elsewhere: Elsewhere) -> None:
        self._ours = ours
        self._elsewhere = elsewhere
        self._requests = [ours.request(number) for number in range(len(ours.rollouts))]
        self._direct = http_request("/generate", chat_body())
        ours.shape(tokens=TOKENS)
        # Every attempt's key is believed and its first look at the store is over.
        elsewhere.run(load.closed_loop, ours.gateway.url, self._requests, clients=32, calls=10 * len(self._requests))

    def alone(self, tokens: int) -> _Alone:
        """One client, whose calls go to the engine and to the gateway in turn."""
        ours, calls = self._ours, LONE_WARM_UP + LONE_CALLS
        ours.shape(tokens=tokens)
        asked = [(ours.engine.url, self._direct), (ours.gateway.url, self._requests[0])]
        before = ours.gateway.cpu_seconds()
        with ours.proven(calls, tokens):
            direct, through = self._elsewhere.run(load.in_turns, asked, calls=LONE_CALLS, warm_up=LONE_WARM_UP)
        cpu = (ours.gateway.cpu_seconds() - before) / calls * 1000
        ours.shape(tokens=TOKENS)
        medians = [statistics.median(one.seconds) * 1000 for one in (direct, through)]
        return _Alone(tokens, medians[1] - medians[0], medians[0], cpu)

    def commit(self) -> float:
        """The median of lone commits."""
        seconds = self._elsewhere.run(load.commits, self._ours.dsn, size_bytes=RECORD_BYTES, count=LONE_CALLS)
        return statistics.median(seconds) * 1000

    def crowd(self, clients: int, found: _Crowd) -> None:
        """Saturation, and 70 % of it by chance and evenly, through the gateway and to the engine."""
        per_core, per_second = self.saturated(clients)
        found.per_core.append(per_core)
        found.per_second.append(per_second)
        found.by_chance.append(self._delay(clients, evenly=False))
        found.evenly.append(self._delay(clients, evenly=True))

    def saturated(self, clients: int) -> tuple[float, float]:
        """Calls per second of the gateway's CPU time, and per second."""
        ours = self._ours
        asked = partial(self._elsewhere.run, load.closed_loop, ours.gateway.url, self._requests, clients=clients)
        asked(calls=2 * clients)
        before = ours.gateway.cpu_seconds()
        with ours.proven(CROWD_CALLS, TOKENS):
            found = asked(calls=CROWD_CALLS)
        return CROWD_CALLS / (ours.gateway.cpu_seconds() - before), found.rate

    def _delay(self, clients: int, *, evenly: bool) -> _Delay:
        ours = self._ours
        # Fewer than two calls of each connection would end before the first ones' wave is over.
        saturating = max(SPELL_CALLS, 2 * clients)
        spells = load.Spells(clients, evenly, LOAD, SPELLS, saturating, SPELL_CALLS)
        with ours.proven(SPELLS * (saturating + SPELL_CALLS), TOKENS):
            through, direct = self._elsewhere.run(
                load.at_share, ours.gateway.url, self._requests, (ours.engine.url, self._direct), spells
            )
        return _Delay(_p99(through) - _p99(direct), _p99(direct))


def _p99(found: load.Load) -> float:
    return statistics.quantiles(found.seconds, n=100)[98] * 1000
