"""Settings of the gateway, from environment variables that begin with `GATEWAY_`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator
from pydantic_settings import SettingsConfigDict

from leyden.libs.contracts.addresses import EngineAddress
from leyden.libs.contracts.config import PoolName
from leyden.libs.contracts.conversation import CONVERSATION
from leyden.libs.service import HttpAddress, HttpSettings
from leyden.libs.service.providers import Provider
from leyden.services.gateway.prompt.reasoning import ReasoningParserName
from leyden.services.gateway.prompt.tools.parsers import ToolParserName


class ModelProvider(Provider):
    """A server whose models play roles of runs or make their embeddings.

    Args: extra_parameters: whether it takes `top_k`, `min_p` and `repetition_penalty`, as vLLM, SGLang and OpenRouter
        do. OpenAI's API has none of them and refuses a request with one.
    """

    extra_parameters: bool = False


class Settings(HttpSettings):
    """Settings of the gateway, prefix `GATEWAY_`."""

    model_config = SettingsConfigDict(env_prefix="GATEWAY_")

    port: int = Field(default=8001, ge=0, le=65535)
    """HTTP port for agents; 0 chooses a free one."""
    shutdown_seconds: float = Field(default=300.0, gt=0)
    """How long calls in flight may run after SIGTERM; then, or at a second SIGTERM, they get 503."""
    model_path: Path = Path("model")
    """Hugging Face folder of the model of a pool that names none: tokenizer, chat template and config.json. It also
    serves a run whose base model the trainer names by a path that this machine lacks."""
    tool_parsers: dict[PoolName, ToolParserName] = Field(default_factory=dict)
    """Formats of tool calls by pool as a JSON object, such as `{"default": "llama3"}`; others follow the template, as
    does a run's own `model`."""
    reasoning_parsers: dict[PoolName, ReasoningParserName] = Field(default_factory=dict)
    """Formats of reasoning by pool as a JSON object, such as `{"default": "none"}`; others follow the template, as
    does a run's own `model`."""
    render_seconds: float = Field(default=2.0, gt=0)
    """CPU time that the chat template may take for one prompt; beyond it 400 with `template_timeout`."""
    engine_urls: list[EngineAddress] = Field(default_factory=list)
    """Engines to use while the controller has registered none, as a JSON list of URLs."""
    engine_api_key: SecretStr | None = None
    """API key of the engines' inference routes, sent as a bearer token."""
    engine_api_key_file: Path | None = None
    """File that holds the engines' API key, instead of `engine_api_key`."""
    embeddings_url: HttpAddress | None = None
    """Base URL of a server of embeddings, as `http://embedder:8080/v1`; it gets agents' `/v1/embeddings`
    where their run names no provider and no pool for them. None: the bundled model answers where it is installed."""
    embeddings_api_key: SecretStr | None = None
    """API key of the server of embeddings, sent as a bearer token."""
    embeddings_api_key_file: Path | None = None
    """File that holds that key, instead of `embeddings_api_key`."""
    providers: dict[str, ModelProvider] = Field(default_factory=dict)
    """Servers of OpenAI's API whose models play roles of runs or make their embeddings (`policies` and `embeddings` in
    a run's document), as a JSON object by name:
    `{"openai": {"url": "https://api.openai.com/v1", "api_key_file": "/secrets/openai"}}`. None is `conversation`,
    which is the platform itself."""
    engine_poll_seconds: float = Field(default=0.2, gt=0)
    """Time between reads of the engines' table; ten times as long while no requests arrive."""
    engine_silence_seconds: float = Field(default=600.0, gt=0)
    """A request without any byte from its engine for this long goes to another engine."""
    hold_seconds: float = Field(default=300.0, gt=0)
    """How long a request waits for an engine that serves its run, before 503 with Retry-After."""
    record_hold_seconds: float = Field(default=30.0, gt=0)
    """How long an answer waits for Postgres to store its record, before 503 with Retry-After."""
    abandoned_seconds: float = Field(default=5.0, ge=0)
    """How long a call goes on after its client left, so that a retry joins it; then it is aborted."""
    keepalive_after_seconds: float = Field(default=30.0, gt=0)
    """A stream without a token for this long starts with a comment; until then an error can set the HTTP status."""
    keepalive_seconds: float = Field(default=5.0, gt=0)
    """Time between comments of a stream that waits for tokens."""
    max_calls: int = Field(default=4096, ge=1)
    """Calls that run at once; further ones wait for at most `hold_seconds`."""
    max_calls_per_attempt: int = Field(default=2048, ge=1)
    """Calls of one attempt in flight at once; beyond it 429 with Retry-After. Lower it for untrusted agents."""
    max_attempt_calls: int = Field(default=2000, ge=1)
    """Calls that one attempt may store; beyond it 400 with `attempt_limit`."""
    max_attempt_call_bytes: int = Field(default=2**30, ge=2**16)
    """Bytes of an attempt's stored calls together: tokens and texts that each adds to the call before it."""
    max_attempt_objects: int = Field(default=10_000, ge=1)
    """Items and conversations that one attempt may store by the Responses API; beyond it 400 with `attempt_limit`."""
    max_attempt_object_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Bytes of these objects together."""
    max_choices: int = Field(default=64, ge=1, le=128)
    """Largest `n` of a request."""
    max_body_bytes: int = Field(default=16 * 2**20, ge=1024)
    """Largest body of a request."""
    max_bytes_in_flight: int = Field(default=256 * 2**20, ge=1024)
    """Bytes of all bodies that the gateway reads at once; beyond it 503 with Retry-After. One attempt has a quarter of
    it, or one body where that is more; beyond that 429."""
    history_bytes: int = Field(default=256 * 2**20, ge=2**16)
    """Memory of the cache of completed calls, of all models; the gateway reads dropped attempts from the store."""
    context_length: int | None = Field(default=None, ge=16)
    """Tokens of prompt and answer together in a pool that names no model, if engines allow fewer than config.json."""

    @field_validator("providers")
    @classmethod
    def _no_server_has_the_platforms_name(cls, providers: dict[str, ModelProvider]) -> dict[str, ModelProvider]:
        if CONVERSATION in providers:
            raise ValueError(
                f"{CONVERSATION!r} is the platform itself, which answers with a task's own messages: give the server"
                " another name"
            )
        return providers
