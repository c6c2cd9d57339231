"""A process that runs built-in graders: a request is a line of JSON on stdin, and each grade a line on stdout.

A signal ends the process when a component takes too long: Python cannot interrupt a regular expression. SIGVTALRM says
that the task's part computed for so long, SIGPROF that the agent's part did, and SIGALRM that neither ended. A machine
under load can cause the last one alone.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from dataclasses import asdict

from leyden.libs.contracts.config import Component
from leyden.libs.contracts.states import ComponentState
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.grade import Grade, grade

MEMORY_BYTES = 2 * 2**30
PATIENCE_SECONDS = 60.0
"""Time of a component beyond its processor time. Why so much: a machine under load must not decide about a grade."""


class _Clock:
    """Limits the processor time of the task's part of a component, and then that of the agent's."""

    def __init__(self) -> None:
        self._seconds: float | None = None

    def start(self, seconds: float) -> None:
        self._seconds = seconds
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds + PATIENCE_SECONDS)

    def begin_agents_part(self) -> None:
        seconds, self._seconds = self._seconds, None
        if seconds is not None:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.setitimer(signal.ITIMER_PROF, seconds)

    def stop(self) -> None:
        for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)


_CLOCK = _Clock()


class _Facts(AttemptFacts):
    def begin_reading(self) -> None:
        _CLOCK.begin_agents_part()


def main() -> None:
    """Answers requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        facts = _Facts(**request["facts"])
        for document in request["components"]:
            sys.stdout.write(_answer(document, facts, request["seconds"]))
            sys.stdout.flush()


def _answer(document: dict[str, object], facts: AttemptFacts, seconds: float) -> str:
    began = time.perf_counter()
    _CLOCK.start(seconds)
    try:
        found = grade(Component.model_validate(document), facts)
    # A grader's error is its finding: the document's schema, or a task's reference.
    except Exception as error:  # noqa: BLE001
        found = Grade(ComponentState.FAILED, explanation=f"{type(error).__name__}: {error}"[:500])
    finally:
        _CLOCK.stop()
    return json.dumps({"grade": asdict(found), "seconds": time.perf_counter() - began}) + "\n"


if __name__ == "__main__":
    main()
