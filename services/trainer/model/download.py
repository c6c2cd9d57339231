"""Puts a model of Hugging Face into a folder of its own: `python -m leyden.services.trainer.model.download --folder …`.

The folder is named by repository and commit, `Qwen--Qwen2.5-0.5B@060db64…`, and beside it lies a link by the revision
that was asked for, `Qwen--Qwen2.5-0.5B@main`. Both appear when they are complete, and neither changes afterwards:
processes read them, and another commit is another folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


class Hub:
    """The server of models that HF_ENDPOINT names; HF_TOKEN opens it."""

    def commit(self, repository: str, revision: str) -> str:
        """The commit that a branch, tag or commit names now."""
        from huggingface_hub import HfApi

        return str(HfApi().model_info(repository, revision=revision).sha)

    def download(self, repository: str, commit: str, folder: Path) -> None:
        """Writes the repository's files; a second call continues the first."""
        from huggingface_hub import snapshot_download

        snapshot_download(repository, revision=commit, local_dir=folder)


def folder_name(repository: str, revision: str) -> str:
    """The chart makes the same name: `leyden.modelPath`."""
    return f"{repository}@{revision}".replace("/", "--")


def put_model(hub: Hub, models: Path, repository: str, revision: str) -> Path:
    """The path by the revision, which was there or is there now.

    A branch that has moved since its first download is not asked for again: engines that start later would serve
    another model than those that run.
    """
    asked = models / folder_name(repository, revision)
    if (asked / "config.json").exists():
        return asked
    commit = hub.commit(repository, revision)
    complete = models / folder_name(repository, commit)
    if not complete.exists():
        part = models / f"{complete.name}.part"
        part.mkdir(parents=True, exist_ok=True)
        hub.download(repository, commit, part)
        _rename(part, complete)
    if asked != complete:
        link = models / f"{asked.name}.{os.getpid()}"
        link.symlink_to(complete.name)
        link.replace(asked)
    return asked


def _rename(part: Path, complete: Path) -> None:
    try:
        part.rename(complete)
    except OSError:
        # Another Job was here first.
        if not complete.exists():
            raise


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="of all models")
    parser.add_argument("--repository", required=True)
    parser.add_argument("--revision", required=True)
    arguments = parser.parse_args()
    path = put_model(Hub(), arguments.folder, arguments.repository, arguments.revision)
    sys.stdout.write(f"{path}: {path.resolve().name}\n")


if __name__ == "__main__":
    main()
