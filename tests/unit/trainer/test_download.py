"""Models have a folder for each commit, and a reader's folder never changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from leyden.services.trainer.model.download import put_model

QWEN, LLAMA = "Qwen/Qwen2.5", "meta/Llama"


class FakeHub:
    """Args: branches: commit of each repository's main; fails: downloads end in the middle."""

    def __init__(self, **branches: str) -> None:
        self.branches = {QWEN: "a1", LLAMA: "b1"} | branches
        self.fails = False
        self.downloads = 0

    def commit(self, repository: str, revision: str) -> str:
        return self.branches[repository] if revision == "main" else revision

    def download(self, repository: str, commit: str, folder: Path) -> None:
        self.downloads += 1
        (folder / "model.safetensors").write_text(f"{repository} {commit}")
        if self.fails:
            raise OSError("no network")
        (folder / "config.json").write_text(f"{repository} {commit}")


def content(path: Path) -> set[str]:
    return {file.read_text() for file in path.iterdir()}


def test_two_repositories_under_one_revision_share_no_folder(tmp_path: Path) -> None:
    hub = FakeHub()
    one, other = (put_model(hub, tmp_path, name, "main") for name in (QWEN, LLAMA))
    assert (one.name, one.resolve().name) == ("Qwen--Qwen2.5@main", "Qwen--Qwen2.5@a1")
    assert (content(one), content(other)) == ({f"{QWEN} a1"}, {f"{LLAMA} b1"})


def test_a_branch_that_moves_changes_nothing_under_readers(tmp_path: Path) -> None:
    hub = FakeHub()
    path = put_model(hub, tmp_path, QWEN, "main")
    hub.branches[QWEN] = "a2"
    assert put_model(hub, tmp_path, QWEN, "main") == path
    assert content(path) == {f"{QWEN} a1"}
    assert content(put_model(hub, tmp_path, QWEN, "a2")) == {f"{QWEN} a2"}
    assert content(path) == {f"{QWEN} a1"}


def test_a_commit_is_downloaded_once(tmp_path: Path) -> None:
    hub = FakeHub()
    assert put_model(hub, tmp_path, QWEN, "a1") != put_model(hub, tmp_path, QWEN, "main")
    assert hub.downloads == 1


def test_half_a_model_is_no_model(tmp_path: Path) -> None:
    hub = FakeHub()
    hub.fails = True
    with pytest.raises(OSError, match="no network"):
        put_model(hub, tmp_path, QWEN, "main")
    assert [path.name for path in tmp_path.iterdir()] == ["Qwen--Qwen2.5@a1.part"]
    hub.fails = False
    assert content(put_model(hub, tmp_path, QWEN, "main")) == {f"{QWEN} a1"}
