import time
from pathlib import Path
from typing import Any, cast

import pytest

from leyden.libs.capability import KeyRing, sign, write_keys
from leyden.libs.contracts.capability import Capability, Scope
from leyden.libs.contracts.ids import parse_weight_version
from leyden.services.gateway.auth import Authenticator
from leyden.services.gateway.errors import NotServed


class Running:
    """Every attempt runs."""

    async def confirm(self, rollout_id: str, attempt: int) -> None:
        return None


def test_an_attempt_has_one_spelling(tmp_path: Path) -> None:
    write_keys(tmp_path / "keys.json")
    ring = KeyRing(tmp_path / "keys.json")
    capability = Capability(
        run_id="run-a",
        rollout_id="run-a.0.1",
        attempt=1,
        scopes=frozenset({Scope.MODEL}),
        expires_at=int(time.time()) + 600,
    )
    auth, headers = Authenticator(ring, cast(Any, Running())), {"authorization": f"Bearer {sign(ring, capability)}"}
    assert auth.attempt_of(headers, "run-a.0.1", "1").attempt == 1
    for attempt in (
        "01",
        "001",
        "\u0661",
        "\uff11",
        "\u00b9",
        "+1",
        " 1",
        "1 ",
        "1\n",
        "1_0",
        "1.0",
        "",
        "-1",
        "9" * 10,
    ):
        with pytest.raises(NotServed, match="is no attempt"):
            auth.attempt_of(headers, "run-a.0.1", attempt)


@pytest.mark.parametrize("version", ["\u0663", "\u00b2", "03", "+3", " 3", "3\n", ""])
def test_a_policy_version_has_one_spelling(version: str) -> None:
    assert parse_weight_version("run-a:3") == ("run-a", 3)
    with pytest.raises(ValueError, match="given a policy"):
        parse_weight_version(f"run-a:{version}")
