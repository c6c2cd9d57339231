from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import pytest
from pydantic import ValidationError

from leyden.libs.sandbox import users
from leyden.libs.sandbox.users import SandboxUsers, closed_to, sandbox_users
from leyden.libs.service.errors import Misconfigured
from leyden.services.runner.backends.machine import place_of
from leyden.services.runner.settings import Settings

STRANGER = 1_700_000_000


@pytest.fixture
def as_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_a_user_id_is_lent_to_one_attempt_at_a_time_among_all_runners(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users, "UIDS", 3)
    one, other = (SandboxUsers(5000, tmp_path / "locks") for _ in range(2))
    with ExitStack() as stack:
        lent = [stack.enter_context(lender.lend()) for lender in (one, other, one)]
        assert sorted(user.uid or 0 for user in lent) == [5000, 5001, 5002]
        with pytest.raises(OSError, match="each of the 3 user ids"), other.lend():
            pass
        assert lent[0].lock is not None
        # A supervisor that outlives its runner still holds the lock.
        supervisors = os.dup(lent[0].lock)
    with ExitStack() as stack:
        again = {stack.enter_context(other.lend()).uid for _ in range(2)}
        assert again == {5000, 5001, 5002} - {lent[0].uid}
        os.close(supervisors)
        assert stack.enter_context(one.lend()).uid == lent[0].uid


def test_a_folder_closed_to_others_is_found_from_above(tmp_path: Path) -> None:
    base = Path(os.path.realpath(tmp_path))
    inner = base / "outer" / "inner"
    inner.mkdir(parents=True)
    # If the tests' own folder is closed already, that is found first.
    closed = (str(folder) for folder in (*reversed(base.parents), base) if not folder.stat().st_mode & 1)
    assert closed_to(STRANGER, [str(inner / "file")]) == next(closed, None)
    own = base.stat().st_uid
    if own != 0:
        assert closed_to(own, [str(inner / "file")]) is None
    (base / "outer").chmod(0o077)
    assert closed_to(own, [str(inner / "file")]) == str(base / "outer")
    (base / "outer").chmod(0o700)


def test_the_way_after_a_link_counts_too(tmp_path: Path) -> None:
    closed, opened = tmp_path / "closed", tmp_path / "opened"
    for folder in (closed, opened):
        folder.mkdir()
    (closed / "python").touch()
    (opened / "python").symlink_to(closed / "python")
    own = tmp_path.stat().st_uid
    closed.chmod(0o077)
    assert closed_to(own, [str(opened / "python")]) == os.path.realpath(closed)
    closed.chmod(0o700)


def test_an_unknown_kind_of_user_is_refused() -> None:
    with pytest.raises(ValidationError, match="agent_user"):
        Settings(agent_user="nobody")


def test_a_runner_without_root_cannot_lend_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(Misconfigured, match="RUNNER_AGENT_USER=own needs a service that runs as root"):
        sandbox_users(place_of(Settings(agent_user="own")))
    assert sandbox_users(place_of(Settings())).first is None


@pytest.mark.usefixtures("as_root")
def test_an_interpreter_unreachable_for_other_users_prevents_agent_users(
    tmp_path: Path,
) -> None:
    python = tmp_path / "closed" / "python"
    python.parent.mkdir(mode=0o700)
    python.touch(0o755)
    assert sandbox_users(place_of(Settings(python=str(python)))).first is None
    assert sandbox_users(place_of(Settings(python="/bin/sh", agent_user="same"))).first is None
    with pytest.raises(Misconfigured, match="is closed to other users, and RUNNER_PYTHON lies below it: let other"):
        sandbox_users(place_of(Settings(python=str(python), agent_user="own")))


@pytest.mark.usefixtures("as_root")
def test_user_ids_missing_in_the_namespace_are_refused_if_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(users, "UIDS", 2**32)
    assert sandbox_users(place_of(Settings(python="/bin/sh"))).first is None
    for wishes in ({"agent_user": "own"}, {"agent_uids_from": 100_000}):
        with pytest.raises(Misconfigured, match="set RUNNER_AGENT_UIDS_FROM"):
            sandbox_users(place_of(Settings(python="/bin/sh", **wishes)))  # type: ignore[arg-type]
