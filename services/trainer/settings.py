"""Settings of the trainer, read from `TRAINER_` variables."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import ServiceSettings
from leyden.libs.weights import StoreSettings


class Settings(ServiceSettings, StoreSettings):
    """A trainer's folders, device and waits; the run's document says what it computes."""

    model_config = SettingsConfigDict(env_prefix="TRAINER_")

    run_id: str
    """The run to train; `--run-id` sets it."""
    folder: Path = Path("runs")
    """Folder of versions and checkpoints, one subfolder a run; engines see it under the same path."""
    model_path: Path | None = None
    """Hugging Face folder of the model, for runs that name none and whose pool names none."""
    device: str = "auto"
    """`cpu`, or `auto` for the accelerator that this machine has."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of matrix products; unset: torch's choice. A resumed run continues bit for bit at the same number."""
    poll_seconds: float = Field(default=1.0, gt=0)
    """Longest pause between two checks for credited groups; a notification shortens it."""
    checkpoint_delay_seconds: float = Field(default=4.0, ge=0)
    """Pause before a checkpoint is written, so that engines on the same machine load the new weights first. The next
    update of weights and the trainer's end cut it short. A trainer of several processes pauses at most half of
    `rank_timeout_seconds`."""
    address: str | None = None
    """Address by which engines reach this machine, where weights travel over the network; unset: that of its host
    name."""
    gap_patience: int = Field(default=3, ge=1)
    """Steps in a row, restarts included, that exceed `training.max_logprob_gap` or `training.min_effective_share`: the
    last is not recorded, and the run fails."""
    world_size: int = Field(default=1, ge=1, validation_alias="WORLD_SIZE")
    """Processes of this trainer, as `torchrun` sets it."""
    rank: int = Field(default=0, ge=0, validation_alias="RANK")
    """The number of this process among them, as `torchrun` sets it. Rank 0 leads."""
    copies: int = Field(default=1, ge=1)
    """Copies of the model among the processes of this trainer, each divided among consecutive ones. As many as
    machines: each machine gathers layers from its own memory, and gradients alone travel between machines."""
    rank_timeout_seconds: float = Field(default=600.0, gt=0)
    """Longest wait of a trainer's processes for each other within a step or a checkpoint; then they end, and the
    trainer fails."""

    @field_validator("copies")
    @classmethod
    def _divided_alike(cls, copies: int, info: ValidationInfo) -> int:
        if info.data.get("world_size", copies) % copies:
            raise ValueError(f"should divide the number of processes, {info.data['world_size']}")
        return copies
