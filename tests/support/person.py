"""A scripted person who rates the bandit's answers through the API."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from leyden.libs.client import Client

LIKED, OTHER = 1.0, 0.25


class Person:
    """Rates each rollout at the moment it shows `grading` or `finished`: 1 for the answer that is wanted, else 0.25."""

    def __init__(self, client: Client, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        self.given: dict[str, float] = {}
        self._stop = threading.Event()

    def rate_all(self) -> None:
        """Rates until the end. An exception, such as a refusal, ends it."""
        while not self._stop.wait(0.05):
            for state in ("grading", "finished"):
                for rollout in self._client.rollouts(run=self._run_id, state=state):
                    if rollout.id not in self.given:
                        self._rate(rollout.id)

    def _rate(self, rollout_id: str) -> None:
        outcome = self._client.rollout(rollout_id).attempts[-1].outcome
        assert outcome is not None
        value = LIKED if json.loads(outcome.stdout_tail.splitlines()[-1])["answer"] == "odd" else OTHER
        given = self._client.rate(rollout_id, "thumbs", value, key="of the person")
        assert given.value == value
        self.given[rollout_id] = value

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """The person works beside the block."""
        failures = list[BaseException]()

        def work() -> None:
            try:
                self.rate_all()
            # The caller reads it: a thread has nobody else to tell.
            except BaseException as error:  # noqa: BLE001
                failures.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()
        assert failures == []
