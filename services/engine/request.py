"""Parses and validates requests to `/generate`: SGLang's fields, as far as this engine supports them.

Top-level fields that are not named here are ignored, as SGLang does; an unknown sampling parameter is refused.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from leyden.services.engine.errors import BadRequest

_SGLANG_ONLY = ("regex", "ebnf", "stop_regex", "custom_params", "beam_width", "watermark", "choice")
# Unsupported top-level fields that would change the answer.
_UNSERVED = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "custom_logit_processor",
    "return_hidden_states",
    "return_sampling_mask",
    "session_params",
)
_MAX_CHOICES = 128
GREEDY_BELOW = 1e-6
"""SGLang's bound: a smaller temperature means greedy decoding, because logits divided by it overflow."""


def _as_list(value: Any) -> Any:
    return [] if value is None else [value] if isinstance(value, str) else value


class SamplingParams(BaseModel):
    """Sampling parameters with SGLang's names, defaults and ranges; null means the default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    max_new_tokens: int = Field(default=128, ge=0)
    min_new_tokens: int = Field(default=0, ge=0)
    stop: Annotated[list[str], BeforeValidator(_as_list)] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=-1, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=2)
    n: int = Field(default=1, ge=1, le=_MAX_CHOICES)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    stream_interval: int = Field(default=1, ge=1)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] = Field(default_factory=dict)
    sampling_seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)
    json_schema: str | None = None
    structural_tag: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, raw: Any) -> Any:
        return {name: value for name, value in raw.items() if value is not None} if isinstance(raw, dict) else raw

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def divisor(self) -> float:
        """The divisor of the logits: the temperature, or 1 for greedy decoding."""
        return self.temperature if self.temperature >= GREEDY_BELOW else 1.0

    @property
    def truncates(self) -> bool:
        """Whether top-k, top-p or min-p can remove tokens."""
        return self.top_k > 1 or self.top_p < 1 or self.min_p > 0

    @property
    def reshapes(self) -> bool:
        """Whether penalties, bias or a minimum length change the logits before the temperature."""
        penalties = self.frequency_penalty, self.presence_penalty, self.repetition_penalty - 1
        return any(penalties) or bool(self.logit_bias) or self.min_new_tokens > 0


class Prompt(BaseModel):
    """One prompt of a request, with its parameters."""

    model_config = ConfigDict(frozen=True)

    rid: str
    text: str | None = None
    input_ids: list[int] | None = None
    sampling: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = Field(default=0, ge=0, le=100)
    token_ids_logprob: list[int] = Field(default_factory=list)
    salt: str = ""
    return_routed_experts: bool = False
    routed_experts_start_len: int = Field(default=0, ge=0)
    lora_path: str | None = None
    """The name of a loaded adapter."""


class GenerateRequest(BaseModel):
    """A request to `/generate`: its prompts in order, and whether the client sent a list of them."""

    model_config = ConfigDict(frozen=True)

    prompts: list[Prompt]
    batch: bool
    stream: bool = False
    return_prompt_token_ids: bool = False
    return_text_in_logprobs: bool = False


def parse_generate(body: Any) -> GenerateRequest:
    """Parses the JSON body of a request.

    Raises:  BadRequest: a field is unknown, of a wrong type, out of range or not served here
    """
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    for name in _UNSERVED:
        if body.get(name):
            raise BadRequest(f"{name} is not served by this engine: leave it out, or use an SGLang server")
    batch = _is_batch(body)
    count = len(body["text"] if body.get("text") is not None else body["input_ids"]) if batch else 1
    if count == 0:
        raise BadRequest("the batch is empty: give at least one prompt")
    columns = {name: _column(body.get(name), count, batch, name) for name in _PER_PROMPT}
    rids = _rids(body.get("rid"), count, batch)
    try:
        return GenerateRequest(
            prompts=[_prompt(rids[i], {name: values[i] for name, values in columns.items()}) for i in range(count)],
            batch=batch,
            stream=_flag(body, "stream"),
            return_prompt_token_ids=_flag(body, "return_prompt_token_ids"),
            return_text_in_logprobs=_flag(body, "return_text_in_logprobs"),
        )
    except ValidationError as error:
        raise BadRequest(_first_error(error)) from error


_PER_PROMPT = (
    "text",
    "input_ids",
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "token_ids_logprob",
    "extra_key",
    "cache_salt",
    "return_routed_experts",
    "routed_experts_start_len",
    "lora_path",
)


def _is_batch(body: dict[str, Any]) -> bool:
    text, ids = body.get("text"), body.get("input_ids")
    if (text is None) == (ids is None):
        raise BadRequest("give either text or input_ids")
    if text is not None:
        return isinstance(text, list)
    if not isinstance(ids, list):
        raise BadRequest("input_ids must be a list of integers, or a list of such lists")
    return bool(ids) and isinstance(ids[0], list)


def _column(value: Any, count: int, batch: bool, name: str) -> Sequence[Any]:
    """Returns a field's value for each prompt: the entries of a list, or one value for all prompts."""
    is_list = isinstance(value, list)
    if name == "token_ids_logprob":
        is_list = is_list and bool(value) and isinstance(value[0], list)
    if not (batch and is_list):
        return [value] * count
    if len(value) != count:
        raise BadRequest(f"{name} has {len(value)} entries for {count} prompts")
    return list(value)


def _rids(value: Any, count: int, batch: bool) -> list[str]:
    if value is None:
        return [secrets.token_hex(16) for _ in range(count)]
    if isinstance(value, str):
        return [f"{value}_{index}" for index in range(count)] if batch else [value]
    if isinstance(value, list) and len(value) == count and all(isinstance(rid, str) for rid in value):
        return value
    raise BadRequest(f"rid must be a string, or a list of {count} strings")


def _prompt(rid: str, fields: dict[str, Any]) -> Prompt:
    sampling = fields.pop("sampling_params") or {}
    salts = [str(salt) for salt in (fields.pop("extra_key"), fields.pop("cache_salt")) if salt]
    given = {name: value for name, value in fields.items() if value is not None}
    if isinstance(given.get("input_ids"), list) and not all(type(token) is int for token in given["input_ids"]):
        raise BadRequest("input_ids must be integers")
    return Prompt(rid=rid, sampling=_sampling(sampling), salt="\0".join(salts), **given)


def _sampling(raw: Any) -> SamplingParams:
    if not isinstance(raw, dict):
        raise BadRequest("sampling_params must be an object")
    for name in _SGLANG_ONLY:
        if raw.get(name):
            raise BadRequest(f"sampling_params.{name} is not supported by this engine; use an SGLang server")
    served = {name: value for name, value in raw.items() if name not in _SGLANG_ONLY}
    if (unknown := next((name for name in served if name not in SamplingParams.model_fields), None)) is not None:
        allowed = ", ".join(f"`{name}`" for name in SamplingParams.model_fields)
        raise BadRequest(f"unknown field `{unknown}`, expected one of {allowed}")
    # SGLang's "no limit" for top_k is -1 or 2^30; it refuses 0, too.
    if served.get("top_k") == 0:
        raise BadRequest("sampling_params.top_k: must be -1 (off) or at least 1")
    try:
        return SamplingParams(**served)
    except ValidationError as error:
        raise BadRequest(f"sampling_params.{_first_error(error)}") from error


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false")
    return bool(value)


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
