import base64
import json
import time
from pathlib import Path

import jwt
import pytest

from leyden.libs.capability import (
    CapabilityError,
    Cause,
    KeyRing,
    KeyRingError,
    key_from_headers,
    sign,
    verify,
    write_keys,
)
from leyden.libs.capability.capability import LEEWAY_SECONDS
from leyden.libs.contracts.capability import Capability, Scope

KEYS = {"new": "n" * 40, "old": "o" * 40}


def capability(**changes: object) -> Capability:
    values = {
        "run_id": "run-a",
        "rollout_id": "run-a.0.1",
        "attempt": 2,
        "scopes": frozenset({Scope.MODEL, Scope.TELEMETRY}),
        "expires_at": int(time.time()) + 60,
    }
    return Capability(**{**values, **changes})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_keys(tmp_path / "keys.json", KEYS)
    return tmp_path / "keys.json"


def refused(ring: KeyRing, key: str | None, **changes: object) -> Cause:
    endpoint = {"rollout_id": "run-a.0.1", "attempt": 2, "scope": Scope.MODEL, **changes}
    with pytest.raises(CapabilityError) as caught:
        verify(ring, key, **endpoint)
    return caught.value.cause


def test_a_key_contains_the_signed_capability(path: Path) -> None:
    ring = KeyRing(path)
    signed = capability()
    assert verify(ring, sign(ring, signed), rollout_id="run-a.0.1", attempt=2, scope=Scope.TELEMETRY) == signed
    assert jwt.get_unverified_header(sign(ring, signed))["kid"] == "new"


def test_a_key_is_refused_for_another_attempt_or_scope(path: Path) -> None:
    ring = KeyRing(path)
    key = sign(ring, capability())
    assert refused(ring, key, rollout_id="run-a.0.2") == Cause.WRONG_ROLLOUT
    assert refused(ring, key, attempt=1) == Cause.WRONG_ROLLOUT
    assert refused(ring, key, scope=Scope.REWARD) == Cause.WRONG_SCOPE
    assert refused(ring, sign(ring, capability(expires_at=int(time.time()) - 31))) == Cause.EXPIRED
    assert refused(ring, None) == refused(ring, "") == Cause.MISSING


def test_forgeries_are_malformed(path: Path) -> None:
    ring = KeyRing(path)
    claims = {"iss": "leyden", "run": "run-a", "rollout": "run-a.0.1", "attempt": 2, "scopes": ["model"], "exp": 2**32}
    forged = [
        "nonsense",
        "a.b.c",
        sign(ring, capability())[:-2],
        jwt.encode(claims, "x" * 40, "HS256", headers={"kid": "new"}),
        jwt.encode(claims, "n" * 40, "HS256", headers={"kid": "unknown"}),
        jwt.encode(claims, "n" * 40, "HS256"),
        jwt.encode(claims, "n" * 64, "HS512", headers={"kid": "new"}),
        jwt.encode(claims, None, "none", headers={"kid": "new"}),
        jwt.encode({**claims, "iss": "other"}, "n" * 40, "HS256", headers={"kid": "new"}),
        jwt.encode({**claims, "scopes": ["everything"]}, "n" * 40, "HS256", headers={"kid": "new"}),
        jwt.encode({k: v for k, v in claims.items() if k != "exp"}, "n" * 40, "HS256", headers={"kid": "new"}),
        "x" * 100_000,
        "\udcff\u00e9.b.c",
    ]
    assert {refused(ring, key) for key in forged} == {Cause.MALFORMED}


def test_causes_have_a_status() -> None:
    statuses = {cause: CapabilityError(cause).status for cause in Cause}
    assert statuses == {
        Cause.MISSING: 401,
        Cause.MALFORMED: 401,
        Cause.EXPIRED: 401,
        Cause.ENDED: 403,
        Cause.WRONG_ROLLOUT: 403,
        Cause.WRONG_SCOPE: 403,
    }


def test_rotation_needs_no_restart(path: Path) -> None:
    ring = KeyRing(path)
    before = sign(ring, capability())
    write_keys(path, {"newest": "z" * 40, **KEYS})
    assert jwt.get_unverified_header(sign(ring, capability()))["kid"] == "newest"
    verify(ring, before, rollout_id="run-a.0.1", attempt=2, scope=Scope.MODEL)
    write_keys(path, {"newest": "z" * 40})
    assert refused(ring, before) == Cause.MALFORMED


def test_a_key_that_was_verified_before_is_refused_when_its_time_is_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, signed = KeyRing(path), capability()
    key = sign(ring, signed)
    said = [verify(ring, key, rollout_id="run-a.0.1", attempt=2, scope=Scope.MODEL) for _ in range(2)]
    assert said == [signed, signed]
    later = signed.expires_at + LEEWAY_SECONDS
    monkeypatch.setattr(time, "time", lambda: later - 0.5)
    verify(ring, key, rollout_id="run-a.0.1", attempt=2, scope=Scope.MODEL)
    monkeypatch.setattr(time, "time", lambda: later)
    assert refused(ring, key) == Cause.EXPIRED


def test_keys_expire_by_the_rings_clock_and_not_by_the_machines(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed = capability(expires_at=1000)
    ring = KeyRing(path, lambda: 1000)
    assert verify(ring, sign(ring, signed), rollout_id="run-a.0.1", attempt=2, scope=Scope.MODEL) == signed
    ring.clock = lambda: 1000 + LEEWAY_SECONDS
    assert refused(ring, sign(ring, signed)) == Cause.EXPIRED


def test_a_ring_caches_no_more_keys_than_it_may(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leyden.libs.capability.keyring.MAX_VERIFIED", 2)
    ring = KeyRing(path)
    keys = [sign(ring, capability(attempt=number)) for number in range(1, 5)]
    for number, key in enumerate(keys, 1):
        verify(ring, key, rollout_id="run-a.0.1", attempt=number, scope=Scope.MODEL)
    assert [ring.cached(key) is not None for key in keys] == [False, False, True, True]


def test_an_invalid_key_ring_file_does_not_replace_the_loaded_secrets(path: Path) -> None:
    ring = KeyRing(path)
    key = sign(ring, capability())
    for content in (b"", b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"new": 1e999}', b'{"new"' + b"\0" * 40):
        path.write_bytes(content)
        verify(ring, key, rollout_id="run-a.0.1", attempt=2, scope=Scope.MODEL)
    path.unlink()
    verify(ring, key, rollout_id="run-a.0.1", attempt=2, scope=Scope.MODEL)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"{}", b'{"k": 5}', b'{"k": null}', b'{"k": "short"}', b"\xff\xfe", b"[" * 100_000, b"\0" * 99],
    ids=lambda content: repr(content[:20]),
)
def test_an_invalid_key_ring_is_refused_with_the_reason(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "keys.json").write_bytes(content)
    (tmp_path / "keys.json").chmod(0o600)
    with pytest.raises(KeyRingError, match=r"keys\.json"):
        KeyRing(tmp_path / "keys.json")
    with pytest.raises(KeyRingError, match="LEYDEN_CAPABILITY_KEYS_FILE"):
        KeyRing(tmp_path / "absent.json")


def test_a_key_ring_readable_by_others_is_refused_and_does_not_replace_loaded_secrets(path: Path) -> None:
    ring = KeyRing(path)
    key = sign(ring, capability())
    write_keys(path, {"other": "x" * 40})
    path.chmod(0o644)
    verify(ring, key, rollout_id="run-a.0.1", attempt=2, scope=Scope.MODEL)
    with pytest.raises(KeyRingError, match=r"mode 0644.*chmod 600"):
        KeyRing(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"run": 5},
        {"run": None},
        {"rollout": ["run-a.0.1"]},
        {"attempt": "two"},
        {"attempt": 2.5},
        {"scopes": "model"},
        {"scopes": None},
        {"scopes": {"model": True}},
        {"exp": "soon"},
        {"exp": None},
        {"exp": 1e400},
        {"exp": -1},
        {"nbf": 2**33},
        {"iat": "now"},
        {"iss": ["leyden"]},
    ],
)
def test_claims_of_a_wrong_type_are_refused(path: Path, wrong: dict[str, object]) -> None:
    ring = KeyRing(path)
    claims = {"iss": "leyden", "run": "run-a", "rollout": "run-a.0.1", "attempt": 2, "scopes": ["model"], "exp": 2**32}
    body = json.dumps({**claims, **wrong}).encode()
    key = jwt.api_jws.PyJWS().encode(body, "n" * 40, "HS256", headers={"kid": "new"})
    assert refused(ring, key) in {Cause.MALFORMED, Cause.EXPIRED}


def test_a_key_of_another_algorithm_is_never_checked_with_our_secret(path: Path) -> None:
    ring = KeyRing(path)
    header, claims, signature = sign(ring, capability()).split(".")
    for algorithm in ("none", "None", "HS384", "RS256", "ES256", "EdDSA", "hs256", "", None, 5, ["HS256"]):
        forged = base64.urlsafe_b64encode(json.dumps({"alg": algorithm, "typ": "JWT", "kid": "new"}).encode())
        for end in (signature, ""):
            assert refused(ring, f"{forged.decode().rstrip('=')}.{claims}.{end}") is Cause.MALFORMED
    for kid in ("../new", "", None, 5, {"a": 1}, ["new"]):
        forged = base64.urlsafe_b64encode(json.dumps({"alg": "HS256", "kid": kid}).encode()).decode().rstrip("=")
        assert refused(ring, f"{forged}.{claims}.{signature}") is Cause.MALFORMED
    assert refused(ring, f"{header}.{claims}.{signature}.x") is Cause.MALFORMED


def test_written_keys_are_random_and_private(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_keys(tmp_path / name)
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"authorization": "Bearer k"}, "k"),
        ({"authorization": "bearer  k ", "x-api-key": "other"}, "k"),
        ({"authorization": "Basic k", "x-api-key": "x"}, "x"),
        ({"x-api-key": "x"}, "x"),
        ({"api-key": "a"}, "a"),
        ({"x-goog-api-key": "g"}, "g"),
        ({"authorization": "Bearer ", "x-api-key": "", "api-key": "a"}, "a"),
        ({"authorization": "Bearer "}, None),
        ({}, None),
    ],
)
def test_key_from_headers(headers: dict[str, str], key: str | None) -> None:
    assert key_from_headers(headers) == key
