"""SGLang's control endpoints of one engine: read its version, change its weights, let it continue."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import httpx
from prometheus_client import Counter

from leyden.libs.contracts.ids import weight_version
from leyden.libs.faults import fault_point
from leyden.libs.service.secrets import read_secret
from leyden.libs.store.transfers import Sender, TensorShape
from leyden.libs.telemetry import logger
from leyden.services.controller.engines.targets import TargetVersion
from leyden.services.controller.settings import Settings

log = logger()

TRANSFER_FAILURES = Counter(
    "controller_weight_transfer_failures_total", "Versions that came by disk after a transfer failed."
)
FETCH_FAILURES = Counter(
    "controller_version_fetch_failures_total",
    "Versions that engines load from the trainer's folder: no fetcher had them.",
)
PARTIAL = "partial"
"""The label of an engine's weights during a transfer. No run gave it, so that nobody trains tokens sampled then."""
OTHER = "other"
"""The label of weights that are not those of the version which the engine was given."""
BUCKET_BYTES = 1 << 30
"""An engine receives so much in one request; its memory holds it beside the weights."""
CONNECT_SECONDS, ALIVE_SECONDS = 2.0, 0.3
"""A trainer accepts a connection within the first time, and retains it for the second, or has ended."""


class EngineRefused(Exception):
    """The engine answered, and did not do what it was asked; the message is its own."""


class IncomingWeights(NamedTuple):
    """The process group in which an engine receives a version; `world_size` counts the sender."""

    group_name: str
    world_size: int
    sender: Sender


class EngineClient:
    """The control endpoints of one engine. Bodies are always JSON: SGLang answers 400 to an empty one.

    Raises: SecretError: a key's file cannot be used
    """

    def __init__(self, url: str, http: httpx.AsyncClient, settings: Settings) -> None:
        self.url = url
        self._http, self._update_seconds = http, settings.engine_update_seconds
        self._fetcher_port = settings.fetcher_port
        api_key = read_secret(settings.engine_api_key, settings.engine_api_key_file)
        admin_key = read_secret(settings.engine_admin_key, settings.engine_admin_key_file)
        # SGLang's control routes refuse the API key where there is an admin key.
        self._headers, self._control_headers = _bearer(api_key), _bearer(admin_key or api_key)

    async def weight_version(self) -> str:
        """Returns the label of the weights that the engine serves.

        Raises: httpx.HTTPError: it does not answer; ValueError: its answer is not an engine's
        """
        return str((await self._model_info()).get("weight_version"))

    async def embeds(self) -> bool:
        """Returns whether the engine's model makes embeddings in place of text.

        Raises: httpx.HTTPError: it does not answer; ValueError: its answer is not an engine's
        """
        return (await self._model_info()).get("is_generation") is False

    async def _model_info(self) -> dict[str, Any]:
        answer = await self._http.get(f"{self.url}/model_info", headers=self._headers)
        answer.raise_for_status()
        return _document(answer)

    async def processes(self) -> int | None:
        """Returns how many processes of the engine receive weights; None where it receives none over the network.

        Raises: httpx.HTTPError: it does not answer
        """
        answer = await self._http.get(f"{self.url}/server_info", headers=self._headers)
        if answer.status_code != 200:
            return None
        found = _document(answer)
        sizes = found.get("tp_size"), found.get("dp_size"), found.get("pp_size")
        return sizes[0] if isinstance(sizes[0], int) and sizes[1:] == (1, 1) else None

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

    async def computes_in_float32(self) -> bool:
        """Whether the engine says that it computes in float32, without quantised weights or caches.

        Raises: httpx.HTTPError: it does not answer
        """
        answer = await self._http.get(f"{self.url}/server_info", headers=self._headers)
        found = _document(answer) if answer.status_code == 200 else {}
        is_plain = found.get("quantization") is None and found.get("kv_cache_dtype") in {None, "auto"}
        return found.get("dtype") == "float32" and is_plain

    async def generate(self, body: Mapping[str, object]) -> Any:
        """The answer to a request for tokens.

        Raises: EngineRefused; httpx.HTTPError: it does not answer; ValueError: its answer is no JSON
        """
        answer = await self._http.post(f"{self.url}/generate", json=body, headers=self._headers)
        if answer.status_code >= 400:
            raise EngineRefused(f"/generate answered {answer.status_code}: {_cause_in(answer)[:500]}")
        return answer.json()

    async def disown(self, label: str) -> str:
        """Labels weights as OTHER, so that nobody trains what calls in flight sample with them; aborts nothing.

        Returns: the label that the engine then has: `label` where it refuses
        """
        with contextlib.suppress(EngineRefused, httpx.HTTPError):
            await self._rename_weights(OTHER)
            return OTHER
        return label

    async def join(self, incoming: IncomingWeights) -> bool:
        """Makes the engine join the sender's group, while it serves. Returns whether it did."""
        sender = incoming.sender
        body = {
            "master_address": sender.address,
            "master_port": sender.port,
            "rank_offset": 1,
            "world_size": incoming.world_size,
            "group_name": incoming.group_name,
            "backend": sender.backend,
        }
        try:
            await _require_listening(sender)
            await self._post("/init_weights_update_group", body, seconds=self._update_seconds)
        except (EngineRefused, httpx.HTTPError, OSError) as error:
            self._count_failure(error)
            return False
        return True

    async def leave(self, incoming: IncomingWeights) -> None:
        """Makes the engine leave the sender's group; one that restarted has left it."""
        with contextlib.suppress(EngineRefused, httpx.HTTPError):
            await self._post("/destroy_weights_update_group", {"group_name": incoming.group_name})

    async def fetched(self, target: TargetVersion, *, adapter: bool = False) -> TargetVersion:
        """Returns the version with its folder on the engine's node, once the fetcher has it; the engine serves then.

        It is the version with the trainer's folder if there is no fetcher, or that fails.

        Args: adapter: the engine loads the version's LoRA adapter alone
        """
        if self._fetcher_port is None or not target.is_own:
            return target
        url = httpx.URL(self.url).copy_with(scheme="http", port=self._fetcher_port, path="/fetch")
        body = {"run_id": target.run_id, "version": target.version, "content_sha256": target.content_sha256}
        timeout = httpx.Timeout(self._update_seconds, connect=CONNECT_SECONDS)
        try:
            answer = await self._http.post(
                url, json={**body, "adapter": adapter}, timeout=timeout, headers=self._control_headers
            )
            if answer.status_code != 200:
                raise EngineRefused(f"the fetcher answered {answer.status_code}: {_detail_in(answer)[:500]}")
            return target._replace(path=str(_document(answer)["path"]))
        except (EngineRefused, httpx.HTTPError, ValueError, LookupError) as error:
            FETCH_FAILURES.inc()
            cause = f"{type(error).__name__}: {error}"[:600]
            log.warning("version not fetched", url=str(url), version=target.version, cause=cause)
            return target

    async def update(self, target: TargetVersion, incoming: IncomingWeights | None = None) -> None:
        """Pauses, loads and continues. Safe to repeat.

        Args:   incoming: a group that the engine has joined; it loads from the disk where receiving fails
        Raises: EngineRefused: the weights could not be loaded, the old ones stay; httpx.HTTPError: it does not answer.
        """
        await self._post("/pause_generation", {"mode": "retract"})
        fault_point("controller.engine_paused")
        try:
            if incoming is None or not await self._receive(target, incoming):
                await self._load(target)
        except asyncio.CancelledError:
            # An error would replace the cancellation, and whoever cancelled would wait for ever.
            with contextlib.suppress(Exception):
                await self._resume_shielded()
            raise
        except Exception:
            # One that does not continue now is asked again at the next poll.
            with contextlib.suppress(EngineRefused, httpx.HTTPError, ValueError):
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
        """Lets a paused engine continue; changes nothing on one that is not paused.

        An engine that has a part of a version stays paused: the next update loads a complete one.
        """
        if await self.weight_version() != PARTIAL:
            await self._post("/continue_generation", {})

    async def _receive(self, target: TargetVersion, incoming: IncomingWeights) -> bool:
        """Loads the version from the sender. False: it failed, and the weights may be a part of each version."""
        group = {"group_name": incoming.group_name}
        buckets = list(_buckets(incoming.sender.tensors))
        try:
            await self._rename_weights(PARTIAL)
            await self._post("/begin_weight_update", {})
            for number, bucket in enumerate(buckets, 1):
                tensors = {
                    "names": [tensor.name for tensor in bucket],
                    "dtypes": [tensor.dtype for tensor in bucket],
                    "shapes": [tensor.shape for tensor in bucket],
                }
                # Prefixes that older weights computed go with the last bucket.
                body = {**group, **tensors, "flush_cache": number == len(buckets)}
                await self._post("/update_weights_from_distributed", body, seconds=self._update_seconds)
                fault_point("controller.bucket_received")
            await self._post("/end_weight_update", {})
            await self._rename_weights(weight_version(target.run_id, target.version))
        except (EngineRefused, httpx.HTTPError) as error:
            self._count_failure(error)
            # A session that stays open would refuse the next one.
            with contextlib.suppress(EngineRefused, httpx.HTTPError):
                await self._post("/end_weight_update", {})
            return False
        return True

    async def _rename_weights(self, label: str) -> None:
        await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    def _count_failure(self, error: Exception) -> None:
        TRANSFER_FAILURES.inc()
        log.warning("transfer failed", url=self.url, cause=f"{type(error).__name__}: {error}"[:500])

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
        try:
            answer = await self._http.post(self.url + path, json=body, timeout=limit, headers=self._control_headers)
        except httpx.ReadTimeout as error:
            waited = (error.request.extensions.get("timeout") or {}).get("read")
            raise httpx.ReadTimeout(f"{path} had no answer within {waited:g} s", request=error.request) from error
        if answer.status_code >= 400:
            raise EngineRefused(f"{path} answered {answer.status_code}: {_cause_in(answer)[:500]}")
        return answer


async def _require_listening(sender: Sender) -> None:
    """Raises OSError where the sender has ended: an engine would wait for it for half an hour, and serve nobody."""
    async with asyncio.timeout(CONNECT_SECONDS):
        reader, writer = await asyncio.open_connection(sender.address, sender.port)
    try:
        # It waits for words of the engine's; a process that is being killed resets the connection.
        async with asyncio.timeout(ALIVE_SECONDS):
            await reader.read(1)
    except TimeoutError:
        return
    finally:
        writer.close()
    raise ConnectionError(f"the trainer at {sender.address}:{sender.port} has ended")


def _buckets(tensors: Sequence[TensorShape]) -> Iterator[list[TensorShape]]:
    """Divides tensors, in their order, into lists of BUCKET_BYTES at most, or of one larger tensor."""
    bucket, size = list[TensorShape](), 0
    for tensor in tensors:
        own = math.prod(tensor.shape) * (4 if tensor.dtype == "float32" else 2)
        if bucket and size + own > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket, size = [*bucket, tensor], size + own
    if bucket:
        yield bucket


def _bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def _cause_in(answer: httpx.Response) -> str:
    """The message in an answer about an adapter; the whole answer where it has none."""
    with contextlib.suppress(ValueError):
        return str(_document(answer).get("error_message") or answer.text)
    return answer.text


def _detail_in(answer: httpx.Response) -> str:
    """The detail of problem details; the whole answer where it has none."""
    with contextlib.suppress(ValueError):
        return str(_document(answer).get("detail") or answer.text)
    return answer.text


def _document(answer: httpx.Response) -> dict[str, Any]:
    """Raises ValueError where the answer is no JSON object."""
    document = answer.json()
    if not isinstance(document, dict):
        raise ValueError(f"{answer.url.path} answered {str(document)[:100]!r}, no JSON object")
    return document
