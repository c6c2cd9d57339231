from __future__ import annotations

import os
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from leyden.libs.service.errors import Misconfigured
from leyden.services.runner import cell
from leyden.services.runner.cell import Cells, OwnUsers, Tenant, closed_above, outermost, trail, ways, within
from leyden.services.runner.folder import Folders
from leyden.services.runner.settings import Settings, open_work_folder

NOBODY = (1_700_000_000, 1_700_000_000)


def program(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_the_way_to_a_file_tells_every_link(tmp_path: Path) -> None:
    real = program(tmp_path / "real" / "bin" / "python3")
    (tmp_path / "current").symlink_to("real")
    venv = tmp_path / "venv" / "bin"
    venv.mkdir(parents=True)
    (venv / "python").symlink_to(tmp_path / "current" / "bin" / ".." / "bin" / "python3")
    assert trail(str(venv / "python")) == (
        {
            str(venv / "python"): str(tmp_path / "current" / "bin" / ".." / "bin" / "python3"),
            str(tmp_path / "current"): "real",
        },
        str(real),
    )


def test_links_in_a_circle_end(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    links, _ = trail(str(tmp_path / "a"))
    assert links == {str(tmp_path / "a"): "b", str(tmp_path / "b"): "a"}


def test_a_command_names_its_program_its_interpreter_and_its_absolute_arguments(tmp_path: Path) -> None:
    interpreter = program(tmp_path / "tools" / "interpreter")
    script = program(tmp_path / "agent" / "run", f"#!{interpreter} -u\n")
    found = program(tmp_path / "search" / "run2", "#!/usr/bin/env interpreter\n")
    task = program(tmp_path / "data" / "task")
    search = f"{tmp_path}/search:{tmp_path}/tools"
    work = str(tmp_path / "agent")
    assert ways([str(script), "relative", str(task), "/no/such"], search, "/work") == (
        {},
        [str(script), str(interpreter), str(task)],
    )
    env = os.path.realpath("/usr/bin/env")
    assert ways(["run2"], search, "/work")[1] == [str(found), env, str(interpreter)]
    # What the attempt's own folder holds is there anyway; what it leads to is not.
    assert ways(["./run"], search, work) == ({}, [str(interpreter)])
    assert ways(["no-such-program"], search, work) == ({}, [])


def test_what_lies_in_another_is_left_out() -> None:
    assert outermost(["/a/b", "/a", "/ab", "/c/d", "/a/b/c", "/a"]) == ["/a", "/ab", "/c/d"]
    assert [within("/a/b", "/a"), within("/a", "/a"), within("/ab", "/a"), within("/a", "/")] == [
        True,
        True,
        False,
        True,
    ]


def test_a_folder_closed_to_others_is_found_from_above(tmp_path: Path) -> None:
    base = Path(os.path.realpath(tmp_path))
    inner = base / "outer" / "inner"
    inner.mkdir(parents=True)
    # Where the tests' own folder is closed already, that is found first.
    closed = (str(folder) for folder in (*reversed(base.parents), base) if not folder.stat().st_mode & 1)
    assert closed_above(str(inner), NOBODY) == next(closed, None)
    own = (base.stat().st_uid, base.stat().st_gid)
    assert closed_above(str(inner), None) is None
    assert closed_above(str(inner), own) is None
    (base / "outer").chmod(0o077)
    assert closed_above(str(inner), own) == str(base / "outer")
    (base / "outer").chmod(0o700)


def test_a_user_id_is_lent_to_one_attempt_at_a_time_whoever_lends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "UIDS", 3)
    one, other = (OwnUsers(5000, tmp_path / "locks") for _ in range(2))
    with ExitStack() as stack:
        tenants = [stack.enter_context(users.lend()) for users in (one, other, one)]
        assert sorted(tenant.user or () for tenant in tenants) == [(5000, 5000), (5001, 5001), (5002, 5002)]
        with pytest.raises(OSError, match="each of the 3 user ids"), other.lend():
            pass
        assert tenants[0].lock is not None
        # A keeper that outlives its runner has the lock still.
        kept = os.dup(tenants[0].lock)
    with ExitStack() as stack:
        again = {stack.enter_context(other.lend()).user for _ in range(2)}
        assert again == {(5000, 5000), (5001, 5001), (5002, 5002)} - {tenants[0].user}
        os.close(kept)
        assert stack.enter_context(one.lend()).user == tenants[0].user


def test_a_user_that_does_not_exist_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="write `own`, `same`, or a user that this machine has"):
        Cells(Settings(agent_user="no-such-user", work_folder=tmp_path))


def test_a_program_that_an_agents_user_cannot_reach_and_may_not_be_shown_is_named_with_the_remedies(
    tmp_path: Path,
) -> None:
    real = program(tmp_path / "closed" / "agent")
    (tmp_path / "closed").chmod(0o700)
    with closing(Folders(tmp_path / "work", "runner-1")) as folders:
        cells = Cells(Settings(agent_user="same", work_folder=tmp_path / "work"))
        folder = folders.make("r.0.0", {}, None)
        cells.mounts = False
        with pytest.raises(PermissionError, match="is closed to the user that agents become: let other users pass"):
            cells.walls([str(real)], folder, Tenant(NOBODY))
        assert cells.walls([str(real)], folder, Tenant())["covers"] == []


def test_a_work_folder_that_agents_users_cannot_reach_gives_way_to_an_open_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cell, "may_mount", lambda: False)
    monkeypatch.setattr(cell, "is_own", lambda _: True)
    (tmp_path / "closed").mkdir(mode=0o700)
    assert Cells(Settings(work_folder=tmp_path / "closed" / "new" / "attempts")).work_folder == open_work_folder()
    monkeypatch.setattr(cell, "is_own", lambda _: False)
    closed = tmp_path / "closed" / "new" / "attempts"
    assert Cells(Settings(work_folder=closed)).work_folder == closed


def test_a_private_folder_is_never_shown_not_even_to_a_command_that_names_it(tmp_path: Path) -> None:
    base = Path(os.path.realpath(tmp_path))
    private, beside = base / "closed" / "platform", base / "closed" / "agent"
    program(private / "key")
    program(beside / "agent")
    (base / "closed").chmod(0o700)
    with closing(Folders(private / "attempts", "runner-1")) as folders:
        cells = Cells(Settings(agent_user="same", work_folder=private / "attempts", hidden_paths=(private,)))
        folder = folders.make("r.0.0", {}, None)
        cells.mounts = True
        words = [str(beside / "agent"), str(private / "key"), str(private), str(base / "closed"), str(base)]
        walls = cells.walls(words, folder, Tenant(NOBODY))
    assert walls["shows"] == [(str(beside), False), (str(folder.root), True)]
    assert any(within(str(private), cover) for cover in walls["covers"])
