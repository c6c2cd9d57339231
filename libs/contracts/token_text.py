"""The text of each token, by the tokenizer in a model's folder on this machine."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path

TokenText = Callable[[int], str]


def find_tokenizer(folders: Iterable[Path]) -> TokenText | None:
    """The tokenizer of the first folder that has one; None without one or without the package `tokenizers`.

    A token's bytes that are no complete character are shown as "�".
    """
    path = next((folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()), None)
    if path is None or importlib.util.find_spec("tokenizers") is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda token: str(tokenizer.decode([token], skip_special_tokens=False))
