"""SGLang's HTTP routes, as far as this engine supports them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel, ConfigDict

from leyden.libs.service import JsonResponse
from leyden.services.engine.answer import Answer
from leyden.services.engine.engine import Engine
from leyden.services.engine.errors import BadRequest, WeightsRefused
from leyden.services.engine.request import GenerateRequest, parse_generate
from leyden.services.engine.sequence import Sequence

SGLANG_VERSION = "0.5.23"
"""The SGLang release that this engine imitates."""

# Interval at which a request without streaming checks for a disconnected client.
_DISCONNECT_SECONDS = 1.0
HEALTH_SECONDS = 20.0
"""The longest wait of `/health_generate` for its token."""
_REPORTED = {"dtype", "max_running_requests", "chunked_prefill_size", "seed", "incremental_streaming_output"}

router = APIRouter()


class _Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class AbortBody(_Body):
    rid: str | None = None
    abort_all: bool = False


class PauseBody(_Body):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class ContinueBody(_Body):
    pass


class UpdateBody(_Body):
    model_path: Path
    weight_version: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class LoadAdapterBody(_Body):
    lora_name: str
    lora_path: Path


class UnloadAdapterBody(_Body):
    lora_name: str


class VersionBody(_Body):
    new_version: str
    abort_all_requests: bool = True


def engine_of(request: Request) -> Engine:
    """Returns the engine of the application that serves this request."""
    engine: Engine = request.app.state.engine
    return engine


@router.post("/generate")
async def generate(request: Request) -> Response:
    engine = engine_of(request)
    parsed = parse_generate(_json(await request.body()))
    sequences = engine.prepare(parsed)
    if parsed.stream:
        return StreamingResponse(_stream(engine, parsed, sequences), media_type="text/event-stream")
    answers = await _complete(engine, parsed, sequences, request)
    failed = [sequence.finish for sequence in sequences if sequence.finish and sequence.finish.status_code]
    if failed:
        return JsonResponse({"error": {"message": failed[0].message}}, failed[0].status_code or 500)
    return JsonResponse(answers if parsed.batch or len(answers) > 1 else answers[0])


async def _complete(
    engine: Engine, parsed: GenerateRequest, sequences: list[Sequence], request: Request
) -> list[dict[str, Any]]:
    async with engine.gate.request():
        try:
            await engine.submit(sequences)
            while any(sequence.finish is None for sequence in sequences):
                await _changed(sequences[0].changed)
                if await request.is_disconnected():
                    break
        finally:
            await _abort_unfinished(engine, sequences)
        answers = [Answer(sequence, parsed, engine.text) for sequence in sequences]
        return [a.build(a.sequence.finish, len(a.sequence.output_ids), engine.weight_version) for a in answers]


async def _stream(engine: Engine, parsed: GenerateRequest, sequences: list[Sequence]) -> AsyncIterator[bytes]:
    """Yields chunks of every sequence, each with its index when there are several; then `[DONE]`."""
    pending = {index: Answer(sequence, parsed, engine.text) for index, sequence in enumerate(sequences)}
    sent = dict.fromkeys(pending, 0)
    changed = sequences[0].changed
    async with engine.gate.request():
        try:
            await engine.submit(sequences)
            while pending:
                await changed.wait()
                changed.clear()
                for index, answer in list(pending.items()):
                    # `finish` is read before the count, so that the last chunk contains every token.
                    finish, count = answer.sequence.finish, len(answer.sequence.output_ids)
                    # As in SGLang: the first token at once.
                    interval = answer.sequence.draw.sampling.stream_interval if sent[index] else 1
                    if finish is None and count < sent[index] + interval:
                        continue
                    start = sent[index] if engine.settings.incremental_streaming_output else 0
                    chunk = answer.build(finish, count, engine.weight_version, start)
                    if len(sequences) > 1:
                        chunk["index"] = index
                    yield b"data: " + orjson.dumps(chunk) + b"\n\n"
                    sent[index] = count
                    if finish is not None:
                        del pending[index]
        finally:
            await _abort_unfinished(engine, sequences)
    yield b"data: [DONE]\n\n"


async def _changed(event: asyncio.Event) -> None:
    try:
        async with asyncio.timeout(_DISCONNECT_SECONDS):
            await event.wait()
    except TimeoutError:
        return
    event.clear()


async def _abort_unfinished(engine: Engine, sequences: list[Sequence]) -> None:
    """Aborts the unfinished sequences of a disconnected client."""
    if any(sequence.finish is None for sequence in sequences):
        # Shielded and all at once: a request that is being cancelled is cancelled again at each await.
        await asyncio.shield(engine.abort_sequences(sequences))


@router.get("/health")
async def health(request: Request) -> Response:
    """Answers 200 without generating a token, also while paused."""
    return Response(status_code=200 if engine_of(request).alive else 503)


@router.get("/health_generate")
async def health_generate(request: Request) -> Response:
    """Answers 200 if the engine generates one token in time, else 503."""
    engine = engine_of(request)
    parsed = parse_generate({"input_ids": [0], "sampling_params": {"max_new_tokens": 1, "temperature": 0}})
    try:
        async with asyncio.timeout(HEALTH_SECONDS):
            await _complete(engine, parsed, engine.prepare(parsed), request)
    except TimeoutError:
        return Response(status_code=503)
    return Response(status_code=200)


@router.get("/model_info")
@router.get("/get_model_info")
async def model_info(request: Request) -> Response:
    engine = engine_of(request)
    return JsonResponse(
        {
            "model_path": engine.model_path,
            "served_model_name": engine.model_path,
            "tokenizer_path": str(engine.settings.model_path),
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": engine.weight_version,
            "load_format": "auto",
            "reasoning_parser": None,
            "tool_call_parser": None,
            "disaggregation_mode": "null",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": engine.config.model_type,
            "architectures": list(engine.config.architectures),
        }
    )


@router.get("/server_info")
@router.get("/get_server_info")
async def server_info(request: Request) -> Response:
    engine = engine_of(request)
    settings = engine.settings
    facts = settings.model_dump(mode="json", include=_REPORTED)
    return JsonResponse(
        {
            **facts,
            "version": SGLANG_VERSION,
            "implementation": "leyden",
            "model_path": engine.model_path,
            "served_model_name": engine.model_path,
            "weight_version": engine.weight_version,
            "device": "cpu",
            "context_length": engine.context_length,
            "max_total_num_tokens": settings.max_total_tokens,
            # SGLang reserves six places.
            "max_req_input_len": engine.context_length - 6,
            "status": "paused" if engine.gate.paused else "ready",
            "internal_states": [_load(engine)],
        }
    )


@router.get("/v1/loads")
async def loads(request: Request) -> Response:
    return JsonResponse({"dp_rank_count": 1, "loads": [{"dp_rank": 0, **_load(engine_of(request))}]})


def _load(engine: Engine) -> dict[str, Any]:
    scheduler, totals = engine.scheduler, engine.scheduler.totals
    used, seen = scheduler.row_tokens, totals.cached_tokens + totals.prefill_tokens
    return {
        "num_running_reqs": len(scheduler.running) + len(scheduler.prefilling),
        "num_waiting_reqs": len(scheduler.waiting),
        "num_used_tokens": used,
        "token_usage": used / scheduler.limits.max_total_tokens,
        "gen_throughput": totals.decode_tokens / totals.seconds if totals.seconds else 0.0,
        "cache_hit_rate": totals.cached_tokens / seen if seen else 0.0,
        "prefill_tokens": totals.prefill_tokens,
        "decode_tokens": totals.decode_tokens,
        "cached_tokens": totals.cached_tokens,
    }


@router.get("/v1/models")
async def models(request: Request) -> Response:
    engine = engine_of(request)
    name = engine.model_path
    card = {"id": name, "object": "model", "created": 0, "owned_by": "sglang", "root": name, "parent": None}
    adapters = [
        {**card, "id": key, "root": str(one.folder), "parent": name, "max_model_len": None}
        for key, one in engine.adapters.items()
    ]
    return JsonResponse({"object": "list", "data": [{**card, "max_model_len": engine.context_length}, *adapters]})


@router.get("/flush_cache")
@router.post("/flush_cache")
async def flush_cache(request: Request, timeout: float = Query(0.0, ge=0.0)) -> Response:  # noqa: ASYNC109 - SGLang's
    engine = engine_of(request)
    deadline = asyncio.get_running_loop().time() + timeout
    # Polled, as in SGLang: nothing else needs an event for an idle engine.
    while not (flushed := await engine.flush_cache()) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return Response("Cache flushed.\n" if flushed else "Flush cache failed.\n", 200 if flushed else 400)


@router.post("/abort_request")
async def abort_request(body: AbortBody, request: Request) -> Response:
    engine = engine_of(request)
    if body.abort_all:
        await engine.abort_all()
    elif body.rid is not None:
        await engine.abort(body.rid)
    return Response(status_code=200)


@router.post("/pause_generation")
async def pause_generation(body: PauseBody, request: Request) -> Response:
    await engine_of(request).pause(body.mode)
    return JsonResponse({"message": "Generation paused successfully.", "status": "ok"})


@router.post("/continue_generation")
async def continue_generation(_body: ContinueBody, request: Request) -> Response:
    await engine_of(request).resume()
    return JsonResponse({"message": "Generation continued successfully.", "status": "ok"})


@router.post("/update_weights_from_disk")
async def update_weights_from_disk(body: UpdateBody, request: Request) -> Response:
    engine = engine_of(request)
    if body.abort_all_requests:
        await engine.abort_all()
    try:
        flushed = await engine.update_weights(body.model_path, body.weight_version, body.flush_cache)
    except WeightsRefused as error:
        return _updated(False, f"Failed to update weights: {error}. Rolling back to original weights.")
    if not flushed:
        return _updated(False, "Flush cache failed after updating weights.")
    label = "" if body.weight_version is None else f" Weight version updated to {body.weight_version}."
    return _updated(True, f"Succeeded to update model weights.{label}")


@router.post("/update_weight_version")
async def update_weight_version(body: VersionBody, request: Request) -> Response:
    engine = engine_of(request)
    if body.abort_all_requests:
        await engine.abort_all()
    await engine.rename_weights(body.new_version)
    message = f"Weight version updated to {body.new_version}"
    return JsonResponse({"success": True, "message": message, "new_version": body.new_version})


@router.post("/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterBody, request: Request) -> Response:
    engine = engine_of(request)
    try:
        await engine.load_adapter(body.lora_name, body.lora_path)
    except WeightsRefused as error:
        return _adapters(engine, str(error))
    return _adapters(engine)


@router.post("/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterBody, request: Request) -> Response:
    engine = engine_of(request)
    try:
        engine.unload_adapter(body.lora_name)
    except WeightsRefused as error:
        return _adapters(engine, str(error))
    return _adapters(engine)


def _adapters(engine: Engine, problem: str = "") -> Response:
    loaded = {name: str(adapter.folder) for name, adapter in engine.adapters.items()}
    content = {"success": not problem, "error_message": problem, "loaded_adapters": loaded}
    return JsonResponse(content, 400 if problem else 200)


def _updated(success: bool, message: str) -> Response:
    content = {"success": success, "message": message, "num_paused_requests": 0}
    return JsonResponse(content, 200 if success else 400)


def _json(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from error
