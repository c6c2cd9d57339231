"""A notebook's two cells: a function that plays an attempt, and a line that works until the run has ended.

LEYDEN_URL and LEYDEN_TOKEN say where the platform is; the argument is the run.
"""

import os
import sys
from typing import Any

from openai import OpenAI
from play import play

from leyden import Attempt, Client

AT_ONCE = 16


def answer(attempt: Attempt) -> dict[str, Any]:
    """Plays the attempt in this thread."""
    with OpenAI(base_url=attempt.base_url, api_key=attempt.api_key) as model:
        grade = play(attempt.task, model, attempt.environment["OTEL_EXPORTER_OTLP_ENDPOINT"])
    return {"reward": grade.pop("reward"), "facts": grade}


if __name__ == "__main__":
    with Client(os.environ["LEYDEN_URL"], os.environ["LEYDEN_TOKEN"], patience_seconds=120) as client:
        print(client.work(sys.argv[1], answer, at_once=AT_ONCE, worker="notebook"), "attempts")
