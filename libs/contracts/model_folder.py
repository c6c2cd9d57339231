"""Compares model folders (Hugging Face format): can engines that were started with one load the weights of the other?

An engine builds its layers, its limits and its table of tokens once, from the folder that it was started with. New
weights change none of them, so a run's model must agree with its pool's in all that the engine keeps. A folder has a
tokenizer, too, which gives the text of a token.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

FREE_KEYS = frozenset(
    {
        "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "bos_token_id", "eos_token_id",
        "pad_token_id", "unk_token_id", "initializer_range", "attention_dropout", "return_dict", "auto_map",
        "max_window_layers", "attention_probs_dropout_prob", "hidden_dropout_prob", "architectures",
    }
)  # fmt: skip
"""Keys of config.json that change no answer of an engine: gateways send the tokens that end an answer."""
_ROPE = ("rope_theta", "rope_scaling", "rope_parameters")


def serving_mismatch(served: Path, model: Path) -> str | None:
    """Returns why engines that were started with folder `served` cannot serve the weights of folder `model`; None if
    they can.

    Raises: OSError, ValueError: a folder lacks config.json or tokenizer.json, or one is damaged
    """
    if served.resolve() == model.resolve():
        return None
    ours, theirs = (_settings(_read(folder / "config.json")) for folder in (served, model))
    for key in sorted((ours.keys() & theirs.keys()) | {"model_type"}):
        if ours.get(key) != theirs.get(key):
            return f"its config.json has {key} {_short(theirs.get(key))}, theirs {_short(ours.get(key))}"
    return token_mismatch(served, model)


def token_mismatch(ours: Path, theirs: Path) -> str | None:
    """Returns how the tokens of folder `theirs` differ from those of `ours`; None where they are the same.

    Raises: OSError, ValueError: a folder lacks tokenizer.json, or it is damaged
    """
    own, other = (_tokens(_read(folder / "tokenizer.json")) for folder in (ours, theirs))
    if own == other:
        return None
    text = next(iter(sorted(other.items() - own.items()) or sorted(own.items() - other.items())))[0]
    return (
        f"its tokenizer.json has other tokens ({len(other)}, theirs {len(own)}): {text!r} is"
        f" {other.get(text, 'none')}, theirs {own.get(text, 'none')}"
    )


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that engines read; rope's two forms, of transformers 4 and 5, as one."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {"rope_theta": config.get("rope_theta"), **scaling}
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or "default"
    found = {key: value for key, value in config.items() if key not in FREE_KEYS and key not in _ROPE}
    return found | {"rope": {"rope_type": kind} | {key: value for key, value in rope.items() if value is not None}}


def _tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    if isinstance(vocabulary, list):
        vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in tokenizer.get("added_tokens") or ()}}


def _read(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path} holds no JSON object: download the model again")
    return document


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


TokenText = Callable[[int], str]
"""The text of a token alone."""


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
