"""Each retry of an SDK gets the answer to its own request."""

from __future__ import annotations

from typing import Any

import pytest

from leyden.libs.store.attempts import AttemptKey
from leyden.services.gateway.calls.retries import Retry, RetryIndex

KEY = (AttemptKey("run-a.0.0", 1), b"body")


@pytest.mark.parametrize(
    ("headers", "retry"),
    [
        ({}, Retry(0, "")),
        ({"x-stainless-retry-count": "2"}, Retry(2, "")),
        ({"x-stainless-retry-count": "many"}, Retry(0, "")),
        ({"idempotency-key": "k"}, Retry(0, "k")),
    ],
)
def test_headers_count_the_tries(headers, retry):
    assert Retry.of(headers) == retry
    assert retry.may_be_answered == (retry != Retry(0, ""))


def test_an_answer_goes_to_one_retry_of_each_count():
    retries: Any = RetryIndex()
    claims = [retries.claim("c1", Retry(count, "")) for count in (1, 1, 2, 1, 2, 3)]
    assert claims == [True, False, True, False, False, True]


def test_a_retry_joins_the_latest_unclaimed_call_of_its_attempt_and_body():
    retries: Any = RetryIndex()
    for name in ("first", "second"):
        retries.add(KEY, name, name)
    retries.add((AttemptKey("run-a.0.0", 2), b"body"), "other attempt", "other attempt")
    joined = [retries.join(KEY, Retry(1, "")) for _ in range(3)]
    assert joined == ["second", "first", None]
    retries.remove(KEY, "second")
    assert retries.join(KEY, Retry(2, "")) == "first"
    assert retries.join((KEY[0], b"other body"), Retry(2, "")) is None
