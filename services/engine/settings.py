"""Settings of the engine, read from `ENGINE_` variables."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from leyden.libs.service import HttpSettings


class Settings(HttpSettings):
    """Settings of the engine, prefix `ENGINE_`."""

    model_config = SettingsConfigDict(env_prefix="ENGINE_", protected_namespaces=())

    port: int = Field(default=30000, ge=0, le=65535)
    """HTTP port, SGLang's by default; 0 chooses a free one."""
    model_path: Path = Path("model")
    """Hugging Face folder with config, safetensors and tokenizer of a dense Llama or Qwen2 style model."""
    weight_version: str = "default"
    """Version label of the weights at start; `weight_versions` reports it for every output token."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the linear products. bfloat16 is faster where the processor has it; its log-probabilities are coarser."""
    threads: int = Field(default=0, ge=0)
    """Processor threads of one forward pass; 0 uses every core."""
    max_running_requests: int = Field(default=128, ge=1)
    """Sequences that run at once; more wait in the queue."""
    max_total_tokens: int = Field(default=65536, ge=64)
    """Maximum tokens of the prefix cache, and separately of all running sequences."""
    chunked_prefill_size: int = Field(default=2048, ge=16)
    """Maximum prompt tokens computed between two decoding steps."""
    context_length: int | None = Field(default=None, ge=16)
    """Tokens of prompt and output together; the model's own limit when unset, at most `max_total_tokens`."""
    incremental_streaming_output: bool = False
    """Whether each event of a stream holds its new tokens alone, instead of all tokens so far."""
    seed: int | None = None
    """Sampling seed of requests without one; random when unset. The gateway gives each of its requests one."""
    api_key: SecretStr | None = None
    """Bearer key of all routes except health and metrics; without it no key is required."""
    api_key_file: Path | None = None
    """File that holds the API key, instead of `api_key`."""
    admin_api_key: SecretStr | None = None
    """Bearer key of the control routes instead of the API key; without it they accept the API key."""
    admin_api_key_file: Path | None = None
    """File that holds the admin API key, instead of `admin_api_key`."""
