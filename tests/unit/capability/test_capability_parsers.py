"""Any header may come as a key: it opens nothing unless it is the key, and refusing it is never an error."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leyden.libs.capability import CapabilityError, Cause, KeyRing, key_from_headers, sign, verify, write_keys
from leyden.libs.contracts.capability import Capability, Scope

SECRET = "n" * 40
END = int(time.time()) + 86_400
SIGNED = Capability(run_id="run-a", rollout_id="run-a.0.1", attempt=2, scopes=frozenset({Scope.MODEL}), expires_at=END)
REFUSED = {Cause.MALFORMED, Cause.EXPIRED, Cause.WRONG_ROLLOUT, Cause.WRONG_SCOPE, Cause.MISSING}
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
LATIN = st.binary(max_size=100).map(lambda raw: raw.decode("latin-1"))


@pytest.fixture(scope="module")
def ring(tmp_path_factory: pytest.TempPathFactory) -> KeyRing:
    path: Path = tmp_path_factory.mktemp("ring") / "keys.json"
    write_keys(path, {"new": SECRET})
    return KeyRing(path)


def opened(ring: KeyRing, key: str | None) -> Capability | Cause:
    try:
        return verify(ring, key, rollout_id="run-a.0.1", attempt=2, scope=Scope.MODEL)
    except CapabilityError as error:
        return error.cause


@given(LATIN | st.text(max_size=60) | st.lists(LATIN, min_size=3, max_size=3).map(".".join))
def test_random_keys_are_refused(ring: KeyRing, key: str) -> None:
    assert opened(ring, key) in REFUSED


@given(st.data())
def test_a_key_with_any_changed_byte_is_refused(ring: KeyRing, data: st.DataObject) -> None:
    key = sign(ring, SIGNED)
    at = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.characters(max_codepoint=255))
    changed = key[:at] + other + key[at + 1 :]
    found = opened(ring, changed)
    # The last character of a signature carries two bits that mean nothing.
    assert isinstance(found, Cause) or (found == SIGNED and (changed == key or at == len(key) - 1))


@given(
    st.dictionaries(st.sampled_from(["run", "rollout", "attempt", "scopes", "exp", "iss", "nbf", "aud", "sub"]), ODD)
)
def test_claims_of_any_type_allow_only_their_own_attempt(ring: KeyRing, wrong: dict[str, Any]) -> None:
    claims = {"iss": "leyden", "run": "run-a", "rollout": "run-a.0.1", "attempt": 2, "scopes": ["model"], "exp": END}
    body = json.dumps({**claims, **wrong}).encode()
    found = opened(ring, jwt.api_jws.PyJWS().encode(body, SECRET, "HS256", headers={"kid": "new"}))
    if not isinstance(found, Cause):
        assert (found.rollout_id, found.attempt, Scope.MODEL in found.scopes) == ("run-a.0.1", 2, True)


@given(st.dictionaries(st.sampled_from(["alg", "typ", "kid", "crit", "b64", "jku"]), ODD))
def test_jwt_headers_of_any_type_are_refused(ring: KeyRing, wrong: dict[str, Any]) -> None:
    _, claims, signature = sign(ring, SIGNED).split(".")
    header = json.dumps({"alg": "HS256", "kid": "new", **wrong}).encode()
    forged = base64.urlsafe_b64encode(header).decode().rstrip("=")
    assert opened(ring, f"{forged}.{claims}.{signature}") in REFUSED


@given(st.dictionaries(st.sampled_from(["authorization", "x-api-key", "other"]), LATIN | st.just("Bearer k")))
def test_any_headers_hold_a_key_or_none(ring: KeyRing, headers: dict[str, str]) -> None:
    key = key_from_headers(headers)
    assert key is None or any(key in value for value in headers.values())
    assert opened(ring, key) in REFUSED
