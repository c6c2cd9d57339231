"""SGLang's control endpoints of one engine: read its version, change its weights, let it continue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import httpx

from leyden.libs.contracts.ids import weight_version
from leyden.libs.faults import fault_point
from leyden.libs.service.secrets import read_secret
from leyden.services.controller.settings import Settings


class EngineRefused(Exception):
    """The engine answered, and did not do what it was asked; the message is its own."""


class TargetVersion(NamedTuple):
    """The policy version that every engine should serve, the folder of its weights, and their hash on record."""

    run_id: str
    version: int
    path: str
    content_sha256: str


class EngineClient:
    """The control endpoints of one engine. Bodies are always JSON: SGLang answers 400 to an empty one.

    Raises: SecretError: a key's file cannot be used
    """

    def __init__(self, url: str, http: httpx.AsyncClient, settings: Settings) -> None:
        self.url = url
        self._http, self._update_seconds = http, settings.engine_update_seconds
        api_key = read_secret(settings.engine_api_key, settings.engine_api_key_file)
        admin_key = read_secret(settings.engine_admin_key, settings.engine_admin_key_file)
        # SGLang's control routes refuse the API key where there is an admin key.
        self._headers, self._control_headers = _bearer(api_key), _bearer(admin_key or api_key)

    async def weight_version(self) -> str:
        """Returns the label of the weights that the engine serves.

        Raises: httpx.HTTPError: it does not answer; ValueError: its answer is not an engine's
        """
        answer = await self._http.get(f"{self.url}/model_info", headers=self._headers)
        answer.raise_for_status()
        return str(_document(answer).get("weight_version"))

    async def adapters(self) -> set[str]:
        """Returns the names of the LoRA adapters that the engine has loaded.

        Raises: httpx.HTTPError: it does not answer; ValueError: its answer is not an engine's
        """
        answer = await self._http.get(f"{self.url}/v1/models", headers=self._headers)
        answer.raise_for_status()
        models = _document(answer).get("data")
        if not isinstance(models, list):
            raise ValueError(f"{answer.url.path} has no list of models")
        return {str(model["id"]) for model in models if isinstance(model, dict) and model.get("parent")}

    async def load_adapter(self, name: str, folder: str) -> None:
        """Loads a LoRA adapter beside those that are loaded; requests in flight go on meanwhile.

        Raises: EngineRefused; httpx.HTTPError: it does not answer.
        """
        body = {"lora_name": name, "lora_path": folder}
        await self._post("/load_lora_adapter", body, seconds=self._update_seconds)

    async def unload_adapter(self, name: str) -> None:
        """Frees an adapter once no request uses it.

        Raises: EngineRefused: the engine has no such adapter; httpx.HTTPError: it does not answer.
        """
        await self._post("/unload_lora_adapter", {"lora_name": name})

    async def update(self, target: TargetVersion) -> None:
        """Pauses, loads and continues. Safe to repeat.

        Raises: EngineRefused: the weights could not be loaded, the old ones stay; httpx.HTTPError: it does not answer.
        """
        await self._post("/pause_generation", {"mode": "retract"})
        fault_point("controller.engine_paused")
        try:
            await self._load(target)
        except asyncio.CancelledError:
            # An error would replace the cancellation, and whoever cancelled would wait for ever.
            with contextlib.suppress(Exception):
                await self._resume_shielded()
            raise
        except Exception:
            await self._resume_shielded()
            raise
        await self._resume_shielded()

    async def _resume_shielded(self) -> None:
        """Resumes also when the caller is cancelled: an engine that stays paused would hold every agent for good."""
        resuming = asyncio.ensure_future(self.resume())
        # Nobody fetches the exception of a cancelled caller, which is no accident.
        resuming.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(resuming)

    async def resume(self) -> None:
        """Lets a paused engine continue; changes nothing on one that is not paused."""
        await self._post("/continue_generation", {})

    async def _load(self, target: TargetVersion) -> None:
        label = weight_version(target.run_id, target.version)
        body = {"model_path": target.path, "weight_version": label, "flush_cache": True}
        answer = await self._post("/update_weights_from_disk", body, seconds=self._update_seconds)
        fault_point("controller.engine_loaded")
        result = _document(answer)
        if not result.get("success"):
            raise EngineRefused(str(result.get("message"))[:500])

    async def _post(self, path: str, body: Mapping[str, object], seconds: float | None = None) -> httpx.Response:
        limit = httpx.USE_CLIENT_DEFAULT if seconds is None else httpx.Timeout(seconds)
        answer = await self._http.post(self.url + path, json=body, timeout=limit, headers=self._control_headers)
        if answer.status_code >= 400:
            raise EngineRefused(f"{path} answered {answer.status_code}: {answer.text[:500]}")
        return answer


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _document(answer: httpx.Response) -> dict[str, Any]:
    """Raises ValueError where the answer is no JSON object."""
    document = answer.json()
    if not isinstance(document, dict):
        raise ValueError(f"{answer.url.path} answered {str(document)[:100]!r}, no JSON object")
    return document
