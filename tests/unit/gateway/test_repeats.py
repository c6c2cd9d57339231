"""Which repeat gets which answer."""

from __future__ import annotations

import pytest

from leyden.services.gateway.door import Door
from leyden.services.gateway.repeats import Repeats, Retry

DOOR = Door("run-a", "run-a.0.0", 1)


@pytest.mark.parametrize(
    ("headers", "retry"),
    [
        ({}, Retry(0, "")),
        ({"x-stainless-retry-count": "2"}, Retry(2, "")),
        ({"x-stainless-retry-count": "many"}, Retry(0, "")),
        ({"idempotency-key": "k"}, Retry(0, "k")),
    ],
)
def test_headers_say_what_a_request_repeats(headers, retry):
    assert Retry.of(headers) == retry
    assert retry.is_repeat == (retry != Retry(0, ""))


def test_an_answer_goes_to_one_repeat_of_each_count():
    repeats: Repeats[str] = Repeats()
    claims = [repeats.claim("c1", Retry(count, "")) for count in (1, 1, 2, 1, 2, 3)]
    assert claims == [True, False, True, False, False, True]


def test_a_repeat_joins_the_latest_unclaimed_call_of_its_attempt_and_body():
    repeats: Repeats[str] = Repeats()
    for name in ("first", "second"):
        repeats.add(DOOR, b"body", name, name)
    repeats.add(Door("run-a", "run-a.0.0", 2), b"body", "other attempt", "other attempt")
    joined = [repeats.join(DOOR, b"body", Retry(1, "")) for _ in range(3)]
    assert joined == ["second", "first", None]
    repeats.remove(DOOR, b"body", "second")
    assert repeats.join(DOOR, b"body", Retry(2, "")) == "first"
    assert repeats.join(DOOR, b"other body", Retry(2, "")) is None
