"""The grader, as a process that one output kills at once: `python -m tests.fakes.deadly_grader`.

It stands for an output that ends the whole process, as by its memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from leyden.libs.contracts.config import Component
from leyden.libs.grading.facts import AttemptFacts
from leyden.libs.grading.pool import Graded, Pool
from leyden.services.grader.__main__ import main

DEADLY = "answer: deadly"

_grade = Pool.grade


async def grade(self: Pool, components: Sequence[Component], facts: AttemptFacts) -> list[Graded]:
    """Kills this process, or grades."""
    if facts.text == DEADLY:
        os.kill(os.getpid(), signal.SIGKILL)
    return await _grade(self, components, facts)


if __name__ == "__main__":
    Pool.grade = grade  # type: ignore[method-assign]
    main()
