"""Shared code of the state machine tests: a database per walk, and both orders of two concurrent operations."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from leyden.libs.store.database import Database
from tests.support.long import LONG

T = TypeVar("T")
State = TypeVar("State")


class StoreMachine(RuleBasedStateMachine):
    """A walk over a database; subclasses begin theirs in an `@initialize` that calls `open`."""

    dsn: ClassVar[str]

    def open(self, pool_size: int = 2) -> None:
        """Connects; asyncio's loop lives as long as the walk."""
        self.runner = asyncio.Runner()
        self.database = Database(self.dsn, pool_size=pool_size)

    def await_(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine."""
        return self.runner.run(work)

    def both(self, first: Coroutine[Any, Any, Any], second: Coroutine[Any, Any, Any]) -> tuple[Any, Any]:
        """Runs two coroutines concurrently and returns their results."""

        async def run() -> tuple[Any, Any]:
            one, other = await asyncio.gather(first, second)
            return one, other

        return self.await_(run())

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.await_(self.database.close())
            self.runner.close()


Step = Callable[[State], tuple[State, Any]]
"""What one thing makes of a state, and what it answers."""


def serial(state: State, first: Step[State], second: Step[State]) -> list[tuple[State, tuple[Any, Any]]]:
    """What may be seen of two things that happened at once: one order or the other, answers in the order given."""
    middle, answer = first(state)
    end, other = second(middle)
    orders = [(end, (answer, other))]
    middle, other = second(state)
    end, answer = first(middle)
    return [*orders, (end, (answer, other))]


def walk(machine: type[RuleBasedStateMachine], dsn: str, *, examples: int, steps: int) -> None:
    """Runs a machine on a database, the same walks every time: half of `examples` in `make test`."""
    machine.dsn = dsn  # type: ignore[attr-defined]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples if LONG else -(-examples // 2),
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            # A walk takes a second: it is told as it was, since making it shorter would take minutes.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
