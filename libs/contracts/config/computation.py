"""Settings that a run's document leaves to the device of its trainer. This module alone resolves them.

A document has null for a setting of the device. The trainer resolves it where it runs, when it first opens the run, and
records the result: a trainer that starts again computes as the record says, on another kind of device, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leyden.libs.contracts.config.algorithms import Algorithm
from leyden.libs.contracts.config.corrections import BypassCorrection, Correction, DecoupledCorrection
from leyden.libs.contracts.config.document import Document
from leyden.libs.contracts.config.training import Training

CUDA = "cuda"
RATIOS = frozenset({"ppo_clip", "gspo", "cispo", "sapo"})
"""Losses of a ratio that they bound. The others have none, or are defined by that to the engine."""


@dataclass(frozen=True)
class Device:
    """Args: kind: as torch names it; flex: whether FlexAttention can be compiled for it"""

    kind: str
    flex: bool = False


CPU = Device("cpu")


class Computation(Document):
    """How the trainer of a run computes: the document's settings, and those of the device where the document has null.

    device: the kind of device that resolved them; moved_to: the kind on which the trainer was last opened, if it is
    another one.
    """

    device: str
    precision: Literal["float32", "bfloat16"]
    """Precision of matrix products. Null in the document: bfloat16 on CUDA devices, else float32."""
    attention: Literal["dense", "flex"]
    """Kernel of CUDA devices. Null: flex where Triton is installed, else dense."""
    export_dtype: Literal["float32", "bfloat16"]
    """Type of the weights in versions. Null: that of `precision`, and on a CPU float32 (ADR 46)."""
    correction: Correction
    """Null: decoupled for losses that bound a ratio on CUDA devices, where trainer and engine round differently."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the matrices of LoRA's base model lie in memory. Null: that of `precision` on CUDA devices, else
    float32."""
    moved_to: str | None = None

    @classmethod
    def of(cls, training: Training, algorithm: Algorithm, device: Device) -> Computation:
        """Resolves the parts of a document. Those that are resolved keep their settings on every device.

        >>> from leyden.libs.contracts.config import PpoClip
        >>> Computation.of(Training(), PpoClip(), Device("cuda", flex=True)).words
        'bfloat16, attention flex, versions in bfloat16, correction decoupled (tis_token)'
        """
        on_cuda = device.kind == CUDA
        precision = training.precision or ("bfloat16" if on_cuda else "float32")
        corrects = on_cuda and algorithm.type in RATIOS and not algorithm.clips_of_the_engine
        return cls(
            device=device.kind,
            precision=precision,
            attention=training.attention or ("flex" if on_cuda and device.flex else "dense"),
            # On a CPU bfloat16 rounds the factors of some products and no weights, in trainer and engine alike.
            export_dtype=training.export_dtype or ("float32" if device.kind == "cpu" else precision),
            base_dtype=(training.lora and training.lora.base_dtype)
            or (precision if on_cuda and training.lora else "float32"),
            correction=algorithm.correction or (DecoupledCorrection() if corrects else BypassCorrection()),
        )

    def of_training(self, training: Training) -> Training:
        """Returns `training` with these settings."""
        lora = training.lora and training.lora.model_copy(update={"base_dtype": self.base_dtype})
        own = {name: getattr(self, name) for name in ("precision", "attention", "export_dtype")}
        return training.model_copy(update={**own, "lora": lora})

    @property
    def words(self) -> str:
        """The settings in one line, without devices."""
        weights = f" ({self.correction.weights})" if isinstance(self.correction, DecoupledCorrection) else ""
        kernel = "" if self.device == "cpu" else f", attention {self.attention}"
        base = ", LoRA on a base model in bfloat16" if self.base_dtype == "bfloat16" else ""
        correction = f"correction {self.correction.type}{weights}"
        return f"{self.precision}{kernel}{base}, versions in {self.export_dtype}, {correction}"


def tile_logits(device: str) -> int:
    """Logits of one tile of the head: 8 MB in float32 for a CPU, near a core's cache.

    Elsewhere 64 MB: the product of a tile, 2048 rows of 4096 by 8192 tokens, is 0.14 TFLOP, far above the cost of its
    start. By arithmetic: no GPU has run it.
    """
    return 2**21 if device == "cpu" else 2**24
