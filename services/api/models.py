"""Refuses a run whose base model can be no folder of a trainer, before its trainer fails on it."""

from __future__ import annotations

from pathlib import Path

from leyden.libs.contracts.api import FieldProblem
from leyden.libs.service import Problem


def check_model(model: str | None) -> None:
    """Passes a model folder, and one below a folder that this machine does not see: a trainer may see it.

    Raises: Problem: `model` is no absolute path, or no folder in Hugging Face format where it must be visible
    """
    if model is None:
        return
    folder = Path(model)
    if not folder.is_absolute():
        raise _refusal(
            f"{model!r} is no absolute path: write the folder of a model in Hugging Face format; download a model of"
            f" the Hub with `huggingface-cli download {model} --local-dir FOLDER`"
        )
    if _exists(folder.parent) and not _exists(folder / "config.json"):
        raise _refusal(f"{model!r} holds no config.json: write the folder of a model in Hugging Face format")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        # A name too long, a folder that this process may not enter: only a trainer can tell.
        return False


def _refusal(message: str) -> Problem:
    field = FieldProblem(path="model", message=message)
    return Problem(422, f"model: {message}", cause="invalid", extensions={"errors": [field.model_dump()]})
