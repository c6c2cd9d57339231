"""A process that runs built-in graders: a request is a line of JSON on stdin, and each grade a line on stdout.

A signal ends the process when a component takes too long: Python cannot interrupt a regular expression. SIGPROF says
that it computed for so long, which a machine under load cannot cause, and SIGALRM that it did not end.
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


def main() -> None:
    """Answers requests until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        request = json.loads(line)
        facts = AttemptFacts(**request["facts"])
        for document in request["components"]:
            sys.stdout.write(_answer(document, facts, request["seconds"]))
            sys.stdout.flush()


def _answer(document: dict[str, object], facts: AttemptFacts, seconds: float) -> str:
    began = time.perf_counter()
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, seconds + PATIENCE_SECONDS)
    try:
        found = grade(Component.model_validate(document), facts)
    # A grader's error is its finding: the document's schema, or a task's reference.
    except Exception as error:  # noqa: BLE001
        found = Grade(ComponentState.FAILED, explanation=f"{type(error).__name__}: {error}"[:500])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return json.dumps({"grade": asdict(found), "seconds": time.perf_counter() - began}) + "\n"


if __name__ == "__main__":
    main()
