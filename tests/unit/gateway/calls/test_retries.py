"""Each retry of an SDK gets the answer to its own request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest

from leyden.libs.store.attempts import AttemptKey
from leyden.libs.store.records.deliveries import NewDelivery
from leyden.services.gateway.calls.retries import InFlightCall, Retry, RetryIndex
from leyden.services.gateway.records.deliveries import Delivery

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
    first, second, other = (SimpleNamespace(is_abandoned=False) for _ in range(3))
    retries.add(KEY, "first", first)
    retries.add(KEY, "second", second)
    retries.add((AttemptKey("run-a.0.0", 2), b"body"), "other attempt", other)
    joined = [retries.join(KEY, Retry(1, "")) for _ in range(3)]
    assert joined == [second, first, None]
    retries.remove(KEY, second)
    assert retries.join(KEY, Retry(2, "")) == first
    assert retries.join((KEY[0], b"other body"), Retry(2, "")) is None


async def test_a_retry_joins_the_call_that_its_client_left_before_a_later_one():
    retries = RetryIndex()
    async with running(60) as left, running(60) as later:
        retries.add(KEY, "left", left)
        retries.add(KEY, "later", later)
        with left.listening():
            pass
        with later.listening():
            assert retries.join(KEY, Retry(1, "")) is left


async def test_a_call_that_its_client_left_goes_to_one_repeat_until_that_leaves_too():
    retries = RetryIndex()
    async with running(60) as call:
        retries.add(KEY, "c1", call)
        with call.listening():
            pass
        retries.undelivered[KEY] = "c1"
        assert retries.join_abandoned(KEY) is call
        assert retries.join_abandoned(KEY) is None
        assert KEY not in retries.undelivered
        with call.listening():
            assert retries.join_abandoned(KEY) is None
        assert retries.join_abandoned(KEY) is call
        # The repeat left before it listened.
        call.abandon()
        assert retries.join_abandoned(KEY) is call


def test_each_loss_of_a_stored_answer_goes_to_one_repeat():
    retries = RetryIndex()
    for _ in range(2):
        retries.undelivered[KEY] = "c1"
        assert [retries.repeats(KEY, "c1", request_id) for request_id in ("c2", "c1", "c1")] == [False, True, False]
    assert [retries.repeats(KEY, None, "c3") for _ in range(2)] == [True, False]


@asynccontextmanager
async def running(abandoned_seconds: float) -> AsyncIterator[InFlightCall]:
    """A call that runs until the test cancels it."""
    delivery = Delivery(NewDelivery("run", "c1", "run.0.0", 1, "", 0, b""), 0.0)
    context, nothing = cast(Any, SimpleNamespace(request_id="c1")), cast(Any, None)
    call = InFlightCall(context, [], nothing, delivery, abandoned_seconds=abandoned_seconds)
    call.task = asyncio.create_task(cast(Any, asyncio.Event().wait()))
    yield call
    call.task.cancel()


async def test_a_repeat_that_joins_begins_the_grace_again_until_it_listens():
    async with running(60) as call:
        with call.listening():
            assert not call.is_abandoned
        assert call.gives_up is not None
        earlier = call.gives_up
        assert not call.joined().is_abandoned
        assert earlier.cancelled()
        assert call.gives_up.when() > earlier.when()
        with call.listening():
            assert not call.is_abandoned


async def test_no_repeat_joins_a_call_that_ends_with_its_last_listener():
    async with running(0) as call:
        with call.listening():
            assert call.may_complete
        assert not call.may_complete
        assert not call.is_abandoned
