"""Settings of the command, from `LEYDEN_` variables; options of the command line override them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

import leyden

EXAMPLES = (Path(leyden.__file__).parent / "examples").resolve()


class Settings(BaseSettings):
    """The platform's files, and the platform that the client calls."""

    model_config = SettingsConfigDict(
        env_prefix="LEYDEN_", frozen=True, extra="ignore", use_attribute_docstrings=True, env_ignore_empty=True
    )

    home: Path = Field(default_factory=lambda: Path.home() / ".leyden")
    """Folder of the embedded database, secrets, logs and weights; `~/.leyden` by default."""
    url: str | None = None
    """Address of the API; by default the platform in `home`."""
    token: str | None = Field(default=None, repr=False)
    """Bearer token for the API; by default the token in `home`."""
    kube_context: str | None = None
    """kubectl context of the cluster whose platform the commands call, in place of `url`."""
    kube_namespace: str | None = None
    """Namespace of the release on the cluster; by default the context's, else the only one that has a release."""
    release: str | None = None
    """Name of the release on the cluster, where there are several."""
    database_url: str | None = Field(default=None, repr=False)
    """Postgres of your own for `leyden up`, as `postgresql://user:password@host:port/name`; embedded when unset."""
    redis_url: str | None = Field(default=None, repr=False)
    """Redis of your own for `leyden up`; embedded when unset."""
    reflection_url: str = "https://api.openai.com/v1"
    """Server of OpenAI's chat completions that `leyden prompts optimise` asks."""
    reflection_api_key: str | None = Field(default=None, repr=False)
    """Its key."""
    model_path: Path | None = None
    """Hugging Face folder of the base model for `leyden up`; SmolLM2-135M-Instruct when unset."""


def grader_roots(named: Sequence[Path] = (), given: Mapping[str, str] = MappingProxyType({})) -> tuple[Path, ...]:
    """Folders below which the `directory` of a grader may lie: those of GRADER_CODE_ROOTS, and the named ones.

    Args: given: further variables of the service
    """
    roots = json.loads(given.get("GRADER_CODE_ROOTS") or os.environ.get("GRADER_CODE_ROOTS") or "[]")
    return tuple(dict.fromkeys([*map(Path, roots), *named]))


def provider_names(variable: str, given: Mapping[str, str] = MappingProxyType({})) -> tuple[str, ...]:
    """The names of providers in GRADER_PROVIDERS or GATEWAY_PROVIDERS. Args: given: further variables of the service"""
    return tuple(json.loads(given.get(variable) or os.environ.get(variable) or "{}"))


def inherited_environment(agents: Sequence[Path] = ()) -> dict[str, str]:
    """Variables that services inherit: all of the caller's, so that `TRAINER_…` and others reach them.

    Args: agents: folders below which a run's `agent.directory` may lie, beside the examples and RUNNER_AGENT_ROOTS
    """
    given = json.loads(os.environ.get("RUNNER_AGENT_ROOTS") or "[]")
    roots = dict.fromkeys([*given, *(str(folder) for folder in (*agents, EXAMPLES))])
    return {**os.environ, "RUNNER_AGENT_ROOTS": json.dumps(list(roots))}
